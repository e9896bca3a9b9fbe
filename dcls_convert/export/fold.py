"""`dcls-convert fold`: a checkpoint's model with plain convolutions, in one of the formats of the table here."""

import importlib.util
import math
from pathlib import Path

import torch

from ..checkpoints.folder import not_of_a_checkpoint, open_checkpoint
from ..checkpoints.load import load_checkpoint
from ..depthwise.geometry import size_text
from ..errors import CheckpointError, DclsConvertError, shown
from ..networks.outputs import check_equal
from ..networks.source import build_model, resolve_model
from ..networks.tracing import image_dtype
from ..options import MOST_PIXELS, OPSETS, FoldFormat
from ..output import check_output, not_a_file
from ..progress import Notify, silent
from ..surgery.fold import fold_to_dense_
from . import onnx, pt2, stock_timm
from .folded_model import BATCHES, FOLDING_BOUND, ExportFormat, Folded, Folding, run_model

FORMATS: dict[str, ExportFormat] = {
    "timm": stock_timm.FORMAT,
    "onnx": onnx.FORMAT,
    "pt2": pt2.FORMAT,
}
SEED = 0  # of the images


def fold_checkpoint(
    checkpoint: Path,
    format: FoldFormat,
    output: Path | None = None,
    *,
    opset: int | None = None,
    model: str | None = None,
    force: bool = False,
    trust_code: bool = False,
    notify: Notify = silent,
) -> Folded:
    """Fold a checkpoint's model, compare the outputs, and write it.

    Without an output, it is written into the current directory. `opset` is for ONNX: one of OPSETS.
    `model` builds the unconverted network of a checkpoint that does not name its own, such as
    "package.module:factory", whose code is imported and run.
    """
    if opset is not None and format != "onnx":
        raise DclsConvertError(f"--opset {opset} is for --format onnx, not for --format {format}")
    if opset is not None and opset not in OPSETS:
        raise DclsConvertError(f"--opset {opset}: give an integer from {OPSETS[0]} to {OPSETS[-1]}")
    row = FORMATS[format]
    output = output or Path(checkpoint.resolve().name + row.suffix)
    opened = open_checkpoint(checkpoint)
    plan = opened.plan
    if not row.is_file and output.resolve() == checkpoint.resolve():
        raise CheckpointError(
            f"output {output} is the checkpoint itself, whose positions would be lost"
        )
    if row.is_file and output.suffix != row.suffix:
        raise CheckpointError(f"output {shown(output)} must end in {row.suffix}")
    check_output(output, force=force, foreign=not_a_file if row.is_file else not_of_a_checkpoint)
    if missing := [name for name in row.packages if importlib.util.find_spec(name) is None]:
        raise DclsConvertError(f"--format {format} needs packages: pip install {' '.join(missing)}")
    if plan.input_size is None:
        raise CheckpointError(
            f"{checkpoint}: its plan states no input size, so its outputs cannot be compared"
        )
    if math.prod(plan.input_size[1:]) > MOST_PIXELS:
        stated = f"its plan states images of {size_text(plan.input_size[1:])} pixels"
        raise CheckpointError(
            f"{checkpoint}: {stated}; outputs are compared on {MOST_PIXELS:,} at most"
        )
    notify("loading")
    unconverted = None
    if model is not None:
        unconverted = build_model(resolve_model(model), trust_code=True)
    converted = load_checkpoint(opened, model=unconverted, trust_code=trust_code)
    params_before = sum(p.numel() for p in converted.parameters())
    all_images = torch.randn(
        max(BATCHES), *plan.input_size, generator=torch.Generator().manual_seed(SEED)
    )
    images = tuple(all_images[:batch].to(image_dtype(converted)) for batch in BATCHES)
    notify("folding")
    outputs = run_model(converted, images, f"{checkpoint}: its model")
    fold_to_dense_(converted)
    folded = run_model(converted, images, "the folded model")
    record = Folded(
        format=format,
        checkpoint=str(checkpoint),
        output=str(output),
        relative_error=check_equal(
            outputs, folded, bound=FOLDING_BOUND, what=f"{checkpoint}: folding"
        ),
        layers=len(plan.layers),
        params_before=params_before,
        params_after=sum(p.numel() for p in converted.parameters()),
        input_size=plan.input_size,
    )
    return row.write(
        Folding(
            model=converted,
            plan=plan,
            preprocessing=opened.preprocessing,
            opset=opset,
            images=images,
            outputs=outputs,
            folded=record,
            force=force,
            notify=notify,
        )
    )
