"""Export a folded model to one file, which is run and compared before it is kept."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import DclsConvertError, ModelError
from ..networks.inputs import Arguments
from ..networks.model_outputs import check_close
from ..networks.running import suppress_output
from ..output import new_file
from .folded_model import BATCHES, ExportReport, FoldedModel, ModelFunction, root_cause, run_model

# (path, inputs, whether the file must take any number of images) -> the model loaded from the file.
ExportFunction = Callable[[Path, Arguments, bool], ModelFunction]


def export_file(
    folded: FoldedModel, bound: float, export: ExportFunction, loading: str
) -> ExportReport:
    """Write one file: for any batch size if the model allows it, otherwise for one image.

    The file is run, and kept only if its outputs are within the bound.

    Args:
        folded: The model to write.
        bound: Largest allowed relative error of the file's outputs.
        export: Function that writes the file and loads it again.
        loading: As in `FoldedModel.report`.

    Raises:
        DclsConvertError: The export fails even for one image, or the outputs differ too much.
    """
    with new_file(folded.output, force=folded.force) as partial:
        folded.notify("exporting")
        try:
            error = _export_and_compare(folded, bound, export, partial, any_batch=True)
            return folded.report(folded.format, error, loading)
        except DclsConvertError as reason:
            # The file is in a folder of its own until it is published. The failed attempt may have
            # left the file there, and also a second file with weights.
            for leftover in partial.parent.iterdir():
                leftover.unlink()
            folded.notify("exporting again, for one image at a time")
            error = _export_and_compare(folded, bound, export, partial, any_batch=False)
            return folded.report(folded.format, error, loading, batch=1, note=str(reason))


def _export_and_compare(
    folded: FoldedModel, bound: float, export: ExportFunction, path: Path, *, any_batch: bool
) -> float:
    """Export for any number of images or for one, and return the outputs' relative error.

    A file for any number of images is exported with the last batch size of BATCHES and compared on
    all of them.
    """
    subject = f"the export to {folded.format}"
    count = len(BATCHES) if any_batch else 1
    try:
        with torch.no_grad(), suppress_output():
            exported = export(path, folded.batches[count - 1], any_batch)
    except (OSError, DclsConvertError):
        raise
    except Exception as error:  # exporters may raise anything
        raise ModelError(f"{subject} fails: {root_cause(error)}") from error
    outputs = run_model(exported, folded.batches[:count], subject)
    return check_close(folded.outputs[:count], outputs, bound=bound, what=subject)
