"""`dcls-convert fold`: a checkpoint's model with plain convolutions, in the format that is asked for.

The table of formats stands here. Whatever is written has first given the outputs of the checkpoint's model.
"""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import torch

from ..checkpoints.folder import not_of_a_checkpoint, read_plan
from ..checkpoints.load import load_converted
from ..depthwise.geometry import size_text
from ..errors import CheckpointError, DclsConvertError, shown
from ..networks.outputs import check_equal
from ..options import MOST_PIXELS, FoldFormat
from ..output import check_output, not_a_file
from ..progress import Notify, silent
from ..surgery.fold import fold_to_dense_
from . import onnx, pt2, stock_timm
from .job import BATCHES, FOLDING_BOUND, ExportFormat, Folded, Job, run_model

FORMATS: dict[str, ExportFormat] = {"timm": stock_timm.FORMAT, "onnx": onnx.FORMAT, "pt2": pt2.FORMAT}
SEED = 0  # of the images


def fold_checkpoint(
    checkpoint: Path,
    format: FoldFormat,
    output: Path | None = None,
    *,
    force: bool = False,
    trust_code: bool = False,
    notify: Notify = silent,
) -> Folded:
    """Fold a checkpoint's model, and write it for use without learnable positions.

    Args:
        checkpoint: Folder written by `save_converted`; not changed.
        format: "timm" (a folder that timm loads, without this package where its architecture allows), "onnx" or "pt2".
        output: Folder or file to write; `default_fold_output` without it.
        force: Replace a checkpoint folder, or a file of the same suffix, that is there.
        trust_code: As for `load_converted`.
        notify: Told what is being done.

    Raises:
        DclsConvertError: The checkpoint is damaged, outputs differ, or it cannot be written.
    """
    output = output or default_fold_output(checkpoint, format)
    plan = read_plan(checkpoint)
    _check_fold_output(checkpoint, format, output, force)
    if plan.input_size is None:
        raise CheckpointError(f"{checkpoint}: its plan states no input size, so its outputs cannot be compared")
    if math.prod(plan.input_size[1:]) > MOST_PIXELS:
        size = size_text(plan.input_size[1:])
        raise CheckpointError(
            f"{checkpoint}: its plan states images of {size} pixels; outputs are compared on {MOST_PIXELS:,} at most"
        )
    notify("loading")
    model = load_converted(checkpoint, trust_code=trust_code)
    params_before = sum(p.numel() for p in model.parameters())
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    all_images = torch.randn(max(BATCHES), *plan.input_size, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    images = tuple(all_images[:batch] for batch in BATCHES)
    notify("folding")
    wanted = run_model(model, images, f"{checkpoint}: its model")
    fold_to_dense_(model)
    outputs = run_model(model, images, "the folded model")
    error = check_equal(wanted, outputs, bound=FOLDING_BOUND, what=f"{checkpoint}: folding")
    job = Job(
        format=format,
        checkpoint=checkpoint,
        output=output,
        force=force,
        notify=notify,
        model=model,
        plan=replace(plan, folded=True),
        images=images,
        wanted=wanted,
        error=error,
        params_before=params_before,
        was_folded=plan.folded,
    )
    return FORMATS[format].write(job)


def default_fold_output(checkpoint: Path, format: FoldFormat) -> Path:
    """In the current directory: NAME-folded, NAME.onnx, NAME.pt2."""
    return Path(checkpoint.resolve().name + FORMATS[format].suffix)


def _check_fold_output(checkpoint: Path, format: FoldFormat, output: Path, force: bool) -> None:
    wanted = FORMATS[format]
    if not wanted.is_file and output.resolve() == checkpoint.resolve():
        raise CheckpointError(f"output {output} is the checkpoint itself, whose positions would be lost")
    if wanted.is_file and output.suffix != wanted.suffix:
        raise CheckpointError(f"output {shown(output)} must end in {wanted.suffix}")
    check_output(output, force=force, foreign=not_a_file if wanted.is_file else not_of_a_checkpoint)
    missing = [name for name in wanted.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise DclsConvertError(f"--format {format} needs {', '.join(missing)}: pip install 'dcls-convert[export]'")
