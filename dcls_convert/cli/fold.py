"""`dcls-convert fold`: plain convolutions in the layers' places."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..options import DEFAULT_OPSET, OPSETS, FoldFormat
from ..tables import counted
from . import console
from .arguments import OUTPUT, CheckpointFolder, Force, Json, Quiet, TrustCode, number, option

if TYPE_CHECKING:
    from ..export.folded_model import Folded

FORMAT_HELP = (
    "timm: a folder, which timm loads by itself where its architecture allows. onnx, pt2: one file."
)
OPSET_HELP = f"Opset of the ONNX model, from {OPSETS[0]} to {OPSETS[-1]}."
MODEL_HELP = (
    "The unconverted network, for a checkpoint of your own model that does not name it: "
    "package.module:factory, which imports and runs your code."
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
    checkpoint: CheckpointFolder,
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
    from ..export.fold import fold_checkpoint
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
    elif quiet:
        console.show(folded.output)
    else:
        console.show(*_lines(folded))


def _lines(folded: "Folded") -> list[str]:
    """What was written, and how it is loaded."""
    if folded.params_after == folded.params_before:
        change = ", as before: it was folded already"
    else:
        reason = "since kernels are now stored with all cells of their windows"
        change = f" → {folded.params_after:,}, {reason}"
    layers = f"{counted(folded.layers, 'layer')} of {folded.checkpoint}"
    error = f"{folded.relative_error:.1e}"
    lines = [
        f"Folded {layers}; parameters {folded.params_before:,}{change}.",
        f"Outputs equal those of the checkpoint, with a relative error of {error}.",
        f"Wrote {folded.output}: {_description(folded)}.",
        "",
    ]
    for line in folded.loading.splitlines():
        lines.append(f"    {line}" if line else "")
    return lines


def _description(folded: "Folded") -> str:
    """What the output is, and what loads it."""
    if folded.kind == "stock timm":
        kernel_args = folded.kernel_args or {}
        sizes = ", ".join(f"{name}={value}" for name, value in kernel_args.items())
        arguments = f", with {sizes}" if sizes else ""
        return f"timm loads it by itself{arguments}; dcls-convert is not needed"
    if folded.kind == "dcls":
        by_timm = "trust_code" not in folded.loading and "unconverted" not in folded.loading
        loader = "dcls_convert.load_converted"
        if by_timm:
            loader = "timm, where dcls-convert is installed,"
        return f"{loader} loads it, because {folded.note}"
    return _file_description(folded)


def _file_description(folded: "Folded") -> str:
    """ "ONNX model of opset 20 for images of 3x224x224, any number at a time"."""
    from ..depthwise.geometry import size_text
    from ..export.fold import FORMATS

    text = FORMATS[folded.format].noun
    if folded.opset is not None:
        text += f" of opset {folded.opset}"
    text += f" for images of {size_text(folded.input_size)}"
    if folded.batch is None:
        return f"{text}, any number at a time"
    return f"{text}, {folded.batch} at a time, because with any number {folded.note}"
