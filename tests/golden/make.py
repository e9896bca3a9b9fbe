"""Make the golden conversions anew: `python -m tests.golden.make`.

Do so only when results change on purpose; say in the commit what changed, and why.
"""

import shutil
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

import dcls_convert
from dcls_convert.export.fold import fold_folder

from .networks import CASES, FOLDED, images, options_of, seeded_network

HERE = Path(__file__).parent


@torch.no_grad()
def make():
    outputs = {}
    for name, case in CASES.items():
        model = seeded_network(case)
        report = dcls_convert.convert_(model, **options_of(case))
        folder = HERE / name
        dcls_convert.save_converted(model, report.plan, folder, report=report, force=True)
        outputs[name] = model.eval().double()(images(2).double())
    folded = HERE / "folded"
    shutil.rmtree(folded, ignore_errors=True)
    fold_folder(HERE / FOLDED, output=folded)
    save_file(outputs, HERE / "outputs.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make()
