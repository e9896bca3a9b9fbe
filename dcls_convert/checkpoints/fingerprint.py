"""Summarise a model's output for one seeded random image in a few numbers.

The numbers are enough to detect a different model.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from ..networks.input_tensors import Inputs, pixel_count
from ..networks.inputs import random_arguments
from ..networks.model_outputs import relative_error, tensors_in
from ..networks.running import (
    eval_mode,
    full_precision,
    ignored_warnings,
    image_dtype,
    run_batch,
    seeded,
)
from ..networks.wrappers import COMPILED
from ..options import MAX_PIXELS
from ..records import STRICT, Record
from ..text import one_line

FINGERPRINT_SEED = 0
SAMPLES = 16  # values stored per output
SIGNIFICANT_DIGITS = 6  # float32 has seven
# Largest differences that rounding can cause, as fractions of the stored norm.
TOLERANCES = {
    "float64": 1e-3,
    "float32": 1e-3,
    "float16": 1e-2,  # 11 bits of mantissa, and implementations sum in different orders
    "bfloat16": 5e-2,  # 8 bits
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFingerprint:
    """Summary of one floating-point tensor of the output; None for numbers that are not finite."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    shape: tuple[int, ...]
    norm: float | None
    # Sampled at evenly spaced indices of the flattened tensor, including the first and the last.
    values: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint(Record):
    """The output for one seeded random input, such as an image of normal random numbers."""

    __pydantic_config__ = STRICT

    dtype: Literal["float64", "float32", "float16", "bfloat16"]  # of the inputs
    seed: Literal[0] = 0  # FINGERPRINT_SEED
    # The output's floating-point tensors, in their order; None if the model did not run.
    outputs: tuple[OutputFingerprint, ...] | None
    reason: str | None  # why there are no outputs


def take_fingerprint(model: nn.Module, inputs: Inputs | None) -> Fingerprint:
    """Run the model on seeded random inputs and summarise its outputs, or say why there are none.

    The model's state and the process's settings do not change.

    Args:
        model: The model to run.
        inputs: What forward takes; None if not known.
    """
    dtype: Any = str(image_dtype(model)).removeprefix("torch.")
    if inputs is None:
        return Fingerprint(dtype=dtype, outputs=None, reason="the plan has no input size")
    if pixel_count(inputs) > MAX_PIXELS:
        reason = f"images of more than {MAX_PIXELS:,} pixels are not run"
        return Fingerprint(dtype=dtype, outputs=None, reason=reason)
    try:
        tensors = [
            tensor for tensor in tensors_in(_run(model, inputs)) if tensor.is_floating_point()
        ]
        outputs = [_output_fingerprint(tensor) for tensor in tensors]
    except Exception as error:  # the model's own code may raise anything
        reason = f"{type(error).__name__}: {one_line(error)[:120]}"
        return Fingerprint(dtype=dtype, outputs=None, reason=reason)
    if not outputs:
        reason = "no floating-point tensors were found in its outputs"
        return Fingerprint(dtype=dtype, outputs=None, reason=reason)
    return Fingerprint(dtype=dtype, outputs=tuple(outputs), reason=None)


def _run(model: nn.Module, inputs: Inputs) -> Any:
    """Return the model's output in eval mode."""
    # If the caller turns warnings into errors, one from the model would change the fingerprint.
    with (
        ignored_warnings,
        eval_mode(model),
        full_precision(),
        seeded(FINGERPRINT_SEED),
        _without_compilation(model),
    ):
        arguments = random_arguments(inputs, seed=FINGERPRINT_SEED)
        return run_batch(model, *arguments.args, **arguments.kwargs)


def _without_compilation(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Run compiled parts of a model as they were before: one image is not worth a compilation."""
    stance: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if any(map(_is_compiled, model.modules())):
        stance = torch.compiler.set_stance("force_eager")  # takes effect here, ends with the block
    return stance


def _is_compiled(module: nn.Module) -> bool:
    return COMPILED in module._modules or vars(module).get("_compiled_call_impl") is not None


def fingerprint_deviation(current: Fingerprint, stored: Fingerprint) -> float:
    """Return the largest `relative_error` of an output, by its norm and sampled values.

    Return infinity if the outputs differ in number or shape, or in which values are finite.
    """
    if current.outputs is None or stored.outputs is None:
        return math.inf
    if [output.shape for output in current.outputs] != [output.shape for output in stored.outputs]:
        return math.inf
    largest = 0.0
    for new_output, old_output in zip(current.outputs, stored.outputs, strict=True):
        new = _numbers(new_output)
        old = _numbers(old_output)
        if not torch.equal(new.isnan(), old.isnan()):
            return math.inf
        largest = max(largest, relative_error([(old.nan_to_num(), new.nan_to_num())]))
    return largest


def _numbers(output: OutputFingerprint) -> Tensor:
    """Return the norm and the values as a vector, with NaN for numbers that are not finite."""
    numbers = [math.nan if x is None else x for x in (output.norm, *output.values)]
    return torch.tensor(numbers, dtype=torch.float64)


def _output_fingerprint(output: Tensor) -> OutputFingerprint:
    flat = output.detach().flatten()
    count = min(SAMPLES, flat.numel())
    last = flat.numel() - 1
    indices = [sample * last // max(count - 1, 1) for sample in range(count)]
    values = flat[torch.tensor(indices, dtype=torch.long, device=flat.device)].double().tolist()
    return OutputFingerprint(
        shape=tuple(output.shape),
        norm=_rounded(flat.double().norm().item()),
        values=tuple(map(_rounded, values)),
    )


def _rounded(value: float) -> float | None:
    """Round to SIGNIFICANT_DIGITS; return None if the value is not finite."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
