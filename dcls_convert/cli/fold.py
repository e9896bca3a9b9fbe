"""`dcls-convert fold`: plain convolutions in the layers' places."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from ..files import check_folder
from ..options import FoldFormat
from . import console
from .arguments import OUTPUT, Checkpoint, Force, Json, Quiet, TrustCode, option

OUTPUTS = "./CHECKPOINT-folded, ./CHECKPOINT.onnx or ./CHECKPOINT.pt2"


def fold(
    checkpoint: Checkpoint,
    format: Annotated[
        FoldFormat,
        option(
            OUTPUT, "timm: a folder, which timm loads by itself where its architecture allows. onnx, pt2: one file."
        ),
    ] = "timm",
    output: Annotated[
        Path | None, option(OUTPUT, "Folder or file to write.", metavar="PATH", show_default=OUTPUTS)
    ] = None,
    force: Force = False,
    trust_code: TrustCode = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn a checkpoint's layers into plain convolutions, for use elsewhere.

    Positions are no longer learnable then. Outputs stay the same, which is checked before anything is written.
    """
    check_folder(checkpoint)
    from ..export.formats import fold_checkpoint
    from ..records import write_json
    from ..views.folded import folded_lines

    with console.steps(str(checkpoint), quiet=quiet) as notify:
        folded = fold_checkpoint(checkpoint, format, output, force=force, trust_code=trust_code, notify=notify)
    with console.standing(folded.output):
        if json_:
            console.write(write_json(asdict(folded)))
        else:
            console.show(*([folded.output] if quiet else folded_lines(folded)))
