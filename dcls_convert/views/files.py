"""The pictures that lie in a checkpoint folder beside the model."""

from pathlib import Path

from torch import nn

from ..checkpoints.folder import PAGE, PICTURE
from ..files import can_plot
from ..planning.plan import ConversionPlan
from ..reports.report import ConversionReport
from .page import page
from .pictures import pictures_of_model
from .plot import draw


def picture_files(
    model: nn.Module, plan: ConversionPlan, folder: str | Path, report: ConversionReport
) -> dict[str, bytes]:
    """Names and contents for `save_converted(pictures=...)`: the page, and with matplotlib the positions.

    The model was converted by the plan, and is not run; the page's title is the name of the folder to be written.
    """
    pictures = pictures_of_model(model, plan, Path(folder), report)
    files = {PAGE: page(pictures).encode()}
    return files | {PICTURE: draw(pictures, "positions", ".png")} if can_plot() else files
