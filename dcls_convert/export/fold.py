"""Fold a checkpoint's model into plain convolutions, and write it in one of EXPORT_FORMATS."""

import importlib.util
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.folder import Checkpoint, open_checkpoint, reason_not_a_checkpoint
from ..checkpoints.load import load_checkpoint
from ..errors import CheckpointError, DclsConvertError, ModelError
from ..networks.building import build_model
from ..networks.input_tensors import Inputs, image_inputs, inputs_text, pixel_count, with_batch
from ..networks.inputs import Arguments, input_names, random_arguments
from ..networks.model_outputs import check_close
from ..networks.running import image_dtype
from ..networks.source import resolve_model
from ..options import MAX_PIXELS, OPSETS
from ..output import check_output, reason_not_a_file
from ..placing.fold import fold_to_dense_
from ..progress import Notify, ignore_messages
from ..text import join_with_and, shortened
from .folded_model import (
    BATCHES,
    FOLDING_BOUND,
    ExportReport,
    FoldedModel,
    run_model,
    with_flat_outputs,
)
from .formats import EXPORT_FORMATS, ExportFormat

IMAGES_SEED = 0  # for the random inputs on which outputs are compared
FOLD_IN_PYTHON = "in Python, fold_to_dense_(model) folds it without comparing them"


def fold_checkpoint(
    folder: Path,
    format: str = "timm",
    output: Path | None = None,
    *,
    opset: int | None = None,
    input_size: Sequence[int] | None = None,
    model: str | None = None,
    force: bool = False,
    trust_code: bool = False,
    notify: Notify = ignore_messages,
) -> ExportReport:
    """Fold a checkpoint's model, check that its outputs stay the same, and write it.

    Args:
        folder: The checkpoint folder.
        format: A name in EXPORT_FORMATS.
        output: Folder or file to write; without it, the folder's name with the format's suffix, in
            the current directory.
        opset: Opset of an ONNX model, one of OPSETS.
        input_size: Size of the image on which outputs are compared and for which the network is
            exported; None for the inputs of the plan.
        model: The unconverted network, such as "package.module:factory", if the checkpoint does not
            name it. Its code is imported and run.
        force: Replace an earlier output.
        trust_code: Import and run the code that the folder names as its model.
        notify: Called with what is being done.

    Raises:
        DclsConvertError: The model cannot be folded or written, or its outputs would change.
    """
    if format not in EXPORT_FORMATS:
        known = ", ".join(EXPORT_FORMATS)
        raise DclsConvertError(f"format {shortened(format)!r} must be one of {known}")
    export_format = EXPORT_FORMATS[format]
    _check_opset(format, opset)
    checkpoint = open_checkpoint(folder)
    if output is None:
        output = Path(folder.resolve().name + export_format.suffix)
    _check_output(export_format, checkpoint.folder, output, force=force)
    _check_packages(format)
    inputs = _check_inputs(checkpoint, input_size)

    notify("loading")
    unconverted = None
    if model is not None:
        unconverted = build_model(resolve_model(model), trust_code=True)
    network = load_checkpoint(checkpoint, model=unconverted, trust_code=trust_code).eval()

    notify("folding")
    params_before = _parameter_count(network)
    batches = _random_batches(inputs, image_dtype(network))
    try:
        outputs = run_model(network, batches, f"{folder}: its model")
    except ModelError as problem:
        raise ModelError(f"{problem}; {FOLD_IN_PYTHON}") from problem
    error = _fold_(network, batches, outputs, f"{folder}: folding")
    folded = FoldedModel(
        model=network,
        checkpoint=checkpoint,
        inputs=inputs,
        input_names=input_names(network, inputs),
        batches=batches,
        outputs=outputs,
        one_output=isinstance(outputs[0], Tensor),
        relative_error=error,
        params_before=params_before,
        params_after=_parameter_count(network),
        format=format,
        output=output,
        opset=opset,
        force=force,
        notify=notify,
    )
    if export_format.flat_outputs:
        folded = with_flat_outputs(folded)
    write: Any = pkgutil.resolve_name(export_format.writer)
    report: ExportReport = write(folded)
    return report


def _check_opset(format: str, opset: int | None) -> None:
    """Refuse an opset that is not supported, or that is given for a format without opsets."""
    if opset is None:
        return
    if not EXPORT_FORMATS[format].has_opset:
        with_opset = [name for name, row in EXPORT_FORMATS.items() if row.has_opset]
        raise DclsConvertError(f"an opset is for format {', '.join(with_opset)}, not for {format}")
    if opset not in OPSETS:
        raise DclsConvertError(f"opset {opset}: give an integer from {OPSETS[0]} to {OPSETS[-1]}")


def _check_packages(format: str) -> None:
    """Refuse a format whose packages are not installed."""
    missing = []
    for name in EXPORT_FORMATS[format].packages:
        if importlib.util.find_spec(name) is None:
            missing.append(name)
    if missing:
        raise DclsConvertError(
            f"format {format} needs {join_with_and(missing)}: pip install 'dcls-convert[export]'"
        )


def _check_inputs(checkpoint: Checkpoint, input_size: Sequence[int] | None) -> Inputs:
    """Return the inputs. Raise if there are none, or if they are too large to compare outputs."""
    inputs = checkpoint.plan.inputs
    if input_size is not None:
        inputs = image_inputs(input_size)
    if inputs is None:
        raise CheckpointError(
            f"{checkpoint.folder}: its plan states no inputs, so its outputs cannot be compared; "
            f"give an input size, or convert it with example_inputs in Python; {FOLD_IN_PYTHON}"
        )
    if pixel_count(inputs) > MAX_PIXELS:
        raise CheckpointError(
            f"{checkpoint.folder}: outputs are compared on {MAX_PIXELS:,} pixels at most, not on "
            f"{inputs_text(inputs)}"
        )
    return inputs


def _check_output(export_format: ExportFormat, folder: Path, output: Path, *, force: bool) -> None:
    """Refuse an output that is the checkpoint, has another suffix, or must not be replaced."""
    if export_format.is_file:
        if output.suffix != export_format.suffix:
            raise CheckpointError(f"output {shortened(output)} must end in {export_format.suffix}")
        check_output(output, force=force, reason_to_keep=reason_not_a_file)
        return
    if output.resolve() == folder.resolve():
        raise CheckpointError(
            f"output {output} is the checkpoint itself, whose positions would be lost"
        )
    check_output(output, force=force, reason_to_keep=reason_not_a_checkpoint)


def _random_batches(inputs: Inputs, dtype: torch.dtype) -> tuple[Arguments, ...]:
    """Return random inputs for each batch size of BATCHES."""
    batches = []
    for batch in BATCHES:
        arguments = random_arguments(with_batch(inputs, batch), seed=IMAGES_SEED)
        batches.append(arguments.to(dtype))
    return tuple(batches)


def _fold_(
    network: nn.Module, batches: tuple[Arguments, ...], outputs: tuple[Any, ...], subject: str
) -> float:
    """Fold the network, check that its outputs stay the same, and return their relative error."""
    fold_to_dense_(network)
    folded_outputs = run_model(network, batches, "the folded model")
    return check_close(outputs, folded_outputs, bound=FOLDING_BOUND, what=subject)


def _parameter_count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
