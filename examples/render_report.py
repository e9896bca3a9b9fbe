"""Draw the report of README.md's main job as a picture: python examples/render_report.py [FILE.svg]"""

import io
import sys
from pathlib import Path

import timm
import torch
from rich.console import Console

from dcls_convert import find_convs, plan_conversion, predict_report
from dcls_convert.reports.report_view import report_view

TITLE = "dcls-convert convnext_tiny --dilated-size 17"


def main(target: str = str(Path(__file__).with_name("report.svg"))) -> None:
    with torch.device("meta"):
        model = timm.create_model("convnext_tiny")
    report = predict_report(plan_conversion(find_convs(model), dilated_size=17, model="timm:convnext_tiny"))
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(report_view(report))
    console.save_svg(target, title=TITLE)


if __name__ == "__main__":
    main(*sys.argv[1:])
