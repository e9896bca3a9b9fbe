"""Export a folded model to one file, which is run and compared before it is kept."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..atomic_output import new_file
from ..errors import DclsConvertError, ModelError
from ..networks.model_outputs import check_close
from ..networks.running import quietly
from .folded_model import BATCHES, ExportReport, FoldedModel, ModelFunction, brief, run_model

# (file, images, whether the file must take any number of images) -> the model in the file.
ExportFunction = Callable[[Path, Tensor, bool], ModelFunction]


def export_file(
    folded: FoldedModel, bound: float, export: ExportFunction, loading: str
) -> ExportReport:
    """Write one file, for any batch size if the model allows it, else for one image.

    Args:
        folded: To write.
        bound: The largest relative error of the file's outputs. It is run before it is kept.
        export: Writes the file, and loads it.
        loading: As for `FoldedModel.report`.

    Raises:
        DclsConvertError: The export fails for one image too, or gives other outputs.
    """
    with new_file(folded.output, force=folded.force) as partial:
        folded.notify("exporting")
        try:
            error = _export_and_compare(folded, bound, export, partial, any_batch=True)
            return folded.report(folded.format, error, loading)
        except DclsConvertError as reason:
            # Until it is published, the file is in a folder of its own. The failed attempt may have
            # left it there, and a second file of weights.
            for leftover in partial.parent.iterdir():
                leftover.unlink()
            folded.notify("exporting again, for one image at a time")
            error = _export_and_compare(folded, bound, export, partial, any_batch=False)
            return folded.report(folded.format, error, loading, batch=1, note=str(reason))


def _export_and_compare(
    folded: FoldedModel, bound: float, export: ExportFunction, path: Path, *, any_batch: bool
) -> float:
    """Export for any number of images, or for one; the relative error of the file's outputs.

    A file for any number is compared on all of BATCHES, and exported with the last of them.
    """
    what = f"the export to {folded.format}"
    count = len(BATCHES) if any_batch else 1
    try:
        with torch.no_grad(), quietly():
            exported = export(path, folded.images[count - 1], any_batch)
    except (OSError, DclsConvertError):
        raise
    except Exception as error:  # exporters raise anything
        raise ModelError(f"{what} fails: {brief(error)}") from error
    outputs = run_model(exported, folded.images[:count], what)
    return check_close(folded.outputs[:count], outputs, bound=bound, what=what)
