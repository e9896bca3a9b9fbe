"""`dcls-convert fold`: plain convolutions in the layers' places."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..options import DEFAULT_OPSET, OPSETS, FoldFormat
from ..tables import counted
from . import console
from .arguments import OUTPUT, Checkpoint, Force, Json, Quiet, TrustCode, number, option

if TYPE_CHECKING:
    from ..export.folding import Folded

FORMAT_HELP = (
    "timm: a folder, which timm loads by itself where its architecture allows. onnx, pt2: one file."
)
OPSET_HELP = f"Opset of the ONNX model, from {OPSETS[0]} to {OPSETS[-1]}."
MODEL_HELP = (
    "The unconverted network, for a checkpoint of your own model that does not name it: package.module:factory, which "
    "imports and runs your code."
)
OUTPUTS = "./CHECKPOINT-folded, ./CHECKPOINT.onnx or ./CHECKPOINT.pt2"
OPSET = number(
    int,
    OPSETS[0],
    OPSETS[-1],
    OUTPUT,
    OPSET_HELP,
    metavar="N",
    show_default=str(DEFAULT_OPSET),
)


def fold(
    checkpoint: Checkpoint,
    format: Annotated[FoldFormat, option(OUTPUT, FORMAT_HELP)] = "timm",
    output: Annotated[
        Path | None,
        option(
            OUTPUT,
            "Folder or file to write.",
            "--output",
            "-o",
            metavar="PATH",
            show_default=OUTPUTS,
        ),
    ] = None,
    opset: Annotated[int | None, OPSET] = None,
    model: Annotated[str | None, option(OUTPUT, MODEL_HELP, metavar="MODEL")] = None,
    force: Force = False,
    trust_code: TrustCode = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn a checkpoint's layers into plain convolutions, for use elsewhere.

    Positions are no longer learnable then. Outputs stay the same, which is checked before anything is written.
    """
    from ..export.formats import fold_checkpoint
    from ..records import write_json

    with console.steps(str(checkpoint), quiet=quiet) as notify:
        folded = fold_checkpoint(
            checkpoint,
            format,
            output,
            opset=opset,
            model=model,
            force=force,
            trust_code=trust_code,
            notify=notify,
        )
    if json_:
        console.write(write_json(asdict(folded)))
    else:
        console.show(*([folded.output] if quiet else _lines(folded)))


def _lines(folded: "Folded") -> list[str]:
    """What was written, and how it is loaded."""
    from ..depthwise.geometry import size_text
    from ..export.formats import FORMATS

    if folded.kind == "stock timm":
        sizes = ", ".join(f"{name}={value}" for name, value in (folded.kernel_args or {}).items())
        what = f"timm loads it by itself{', with ' + sizes if sizes else ''}; dcls-convert is not needed"
    elif folded.kind == "dcls":
        own = "trust_code" in folded.loading or "unconverted" in folded.loading
        who = "dcls_convert.load_converted" if own else "timm, where dcls-convert is installed,"
        what = f"{who} loads it, because {folded.note}"
    else:
        several = f"{folded.batch} at a time, because with any number {folded.note}"
        what = FORMATS[folded.format].noun
        if folded.opset is not None:
            what += f" of opset {folded.opset}"
        what += f" for images of {size_text(folded.input_size)}"
        what += f", {'any number at a time' if folded.batch is None else several}"
    grown = (
        f" → {folded.params_after:,}, since kernels are now stored with all cells of their windows"
    )
    return [
        f"Folded {counted(folded.layers, 'layer')} of {folded.checkpoint}; parameters {folded.params_before:,}"
        f"{grown if folded.params_after != folded.params_before else ', as before: it was folded already'}.",
        f"Outputs equal those of the checkpoint, with a relative error of {folded.relative_error:.1e}.",
        f"Wrote {folded.output}: {what}.",
        "",
        *[f"    {line}" if line else "" for line in folded.loading.splitlines()],
    ]
