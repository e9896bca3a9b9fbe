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
    """The page of a converted model, and its positions for the model card, for `save_converted(pictures=...)`.

    Args:
        model: Converted by the plan; it is not run.
        folder: Where it will be written; gives the page its title.
        report: Of the conversion.

    Returns:
        File names and contents; without matplotlib, the page alone.
    """
    pictures = pictures_of_model(model, plan, Path(folder), report)
    files = {PAGE: page(pictures).encode()}
    return files | {PICTURE: draw(pictures, "positions", ".png")} if can_plot() else files
