"""Summarise a model's output for one seeded random image in a few numbers.

The numbers are enough to detect a different model. A parameter that is nearly zero, such as a new
layer scale, hides the layers whose output it scales. So the model runs a second time, with larger
values in place of such parameters.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..options import MAX_PIXELS
from ..records import Record
from ..running.arguments import random_arguments
from ..running.compare_outputs import relative_error, tensors_in
from ..running.input_spec import InputSpec, pixel_count
from ..running.library_code import is_library_code
from ..running.model_state import image_dtype
from ..running.run import running, without_small_parameters
from ..text import one_line

SAMPLES = 16  # values stored per output
Outputs = tuple[tuple[float, ...], ...]
# Largest differences that rounding can cause, as fractions of the stored norm.
TOLERANCES = {
    "float64": 1e-3,
    "float32": 1e-3,
    "float16": 1e-2,  # 11 bits of mantissa, and implementations sum in different orders
    "bfloat16": 5e-2,  # 8 bits
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint(Record):
    """The output for one seeded random input, such as an image of normal random numbers."""

    dtype: Literal["float64", "float32", "float16", "bfloat16"]  # of the inputs
    # For each floating-point output tensor, in order: its norm, then values at evenly spaced
    # indices of the flattened tensor, including the first and the last. NaN and infinity count as
    # 0. None if nothing can be compared.
    outputs: Outputs | None
    reason: str | None  # why there are no outputs
    unmuted: Outputs | None = None  # with small parameters made larger, if there are any


NOT_CHECKED = Fingerprint(dtype="float32", outputs=None, reason="saved with check=False")


def take_fingerprint(model: nn.Module, inputs: InputSpec | None, *, seed: int = 0) -> Fingerprint:
    """Run the model on seeded random inputs and summarise its outputs, or say why there are none.

    The model's state and the process's settings do not change.

    Args:
        model: The model to run.
        inputs: The arguments of forward; None if unknown.
        seed: Seed of the inputs; stored outputs have seed 0.
    """
    dtype: Any = str(image_dtype(model)).removeprefix("torch.")
    outputs: Outputs = ()
    unmuted: Outputs = ()
    reason = None
    if inputs is None:
        reason = "the plan has no input size"
    elif pixel_count(inputs) > MAX_PIXELS:
        reason = f"images of more than {MAX_PIXELS:,} pixels are not run"
    else:
        try:
            outputs = _summaries(_run(model, inputs, seed))
            with without_small_parameters(model) as has_small:
                if has_small:
                    unmuted = _summaries(_run(model, inputs, seed))
            if outputs and not is_library_code(model):
                first = Fingerprint(dtype=dtype, outputs=outputs, reason=None)
                again = replace(first, outputs=_summaries(_run(model, inputs, seed)))
                if fingerprint_deviation(again, first) > TOLERANCES[dtype]:
                    reason = "its outputs differ from run to run"
        except Exception as error:  # the model's own code may raise anything
            reason = f"{type(error).__name__}: {one_line(error)[:120]}"
    if not outputs and reason is None:
        reason = "its outputs have no finite floating-point numbers"
    if reason is not None:
        return Fingerprint(dtype=dtype, outputs=None, reason=reason)
    return Fingerprint(dtype=dtype, outputs=outputs, reason=None, unmuted=unmuted or None)


def _run(model: nn.Module, inputs: InputSpec, seed: int) -> list[Tensor]:
    arguments = random_arguments(inputs, seed=seed)
    with running(model) as run:
        return tensors_in(run(*arguments.args, **arguments.kwargs))


def set_precision_(model: nn.Module, stored: Fingerprint, state: Mapping[str, Tensor]) -> None:
    """Convert the model to the dtypes in which the stored outputs were computed.

    Args:
        model: The model, in the dtypes of its library.
        stored: The stored fingerprint, with the dtype of the inputs.
        state: The stored tensors.
    """
    if str(image_dtype(model)) != f"torch.{stored.dtype}":
        model.to(getattr(torch, stored.dtype))  # also buffers that are not stored
    for name, tensor in model.state_dict(keep_vars=True).items():
        other = state.get(name)
        if other is not None and tensor.is_floating_point() and other.is_floating_point():
            tensor.data = tensor.data.to(other.dtype)


def fingerprint_deviation(current: Fingerprint, stored: Fingerprint) -> float:
    """Return the largest `relative_error` of an output; infinity if outputs are not comparable."""
    new_outputs = current.outputs or ()
    old_outputs = stored.outputs or ()
    if stored.unmuted is not None:
        new_outputs += current.unmuted or ()
        old_outputs += stored.unmuted
    if not old_outputs or list(map(len, new_outputs)) != list(map(len, old_outputs)):
        return math.inf
    errors = []
    for new, old in zip(new_outputs, old_outputs, strict=True):
        pair = (torch.tensor(old, dtype=torch.float64), torch.tensor(new, dtype=torch.float64))
        errors.append(relative_error([pair]))
    return max(errors)


def _summaries(outputs: Iterable[Tensor]) -> Outputs:
    """Summarise the floating-point tensors that have a finite value."""
    floats = [output for output in outputs if output.is_floating_point()]
    return tuple(_summary(output) for output in floats if output.isfinite().any())


def _summary(output: Tensor) -> tuple[float, ...]:
    """Return the norm and samples of a tensor that is not empty."""
    flat = output.detach().flatten().double().nan_to_num(posinf=0, neginf=0)
    indices = torch.linspace(0, len(flat) - 1, min(SAMPLES, len(flat)), dtype=torch.float64)
    return (flat.norm().item(), *flat[indices.long()].tolist())
