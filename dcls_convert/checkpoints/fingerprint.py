"""Summarise a model's output for one seeded random image in a few numbers.

The numbers are enough to detect a different model.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
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

SEED = 0
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
    """Summary of one floating-point tensor of the output, in which NaN and infinity count as 0."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    shape: tuple[int, ...]
    norm: float
    # Sampled at evenly spaced indices of the flattened tensor, including the first and the last.
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint(Record):
    """The output for one seeded random input, such as an image of normal random numbers."""

    __pydantic_config__ = STRICT

    dtype: Literal["float64", "float32", "float16", "bfloat16"]  # of the inputs
    # The output's floating-point tensors, in their order; None if the model did not run.
    outputs: tuple[OutputFingerprint, ...] | None
    reason: str | None  # why there are no outputs


NOT_CHECKED = Fingerprint(dtype="float32", outputs=None, reason="saved with check=False")


def take_fingerprint(model: nn.Module, inputs: Inputs | None) -> Fingerprint:
    """Run the model on seeded random inputs and summarise its outputs, or say why there are none.

    The model's state and the process's settings do not change.

    Args:
        model: The model to run.
        inputs: What forward takes; None if not known.
    """
    dtype: Any = str(image_dtype(model)).removeprefix("torch.")
    outputs: tuple[OutputFingerprint, ...] = ()
    reason = None
    if inputs is None:
        reason = "the plan has no input size"
    elif pixel_count(inputs) > MAX_PIXELS:
        reason = f"images of more than {MAX_PIXELS:,} pixels are not run"
    else:
        try:
            tensors = tensors_in(_run(model, inputs))
            outputs = tuple(_summary(tensor) for tensor in tensors if tensor.is_floating_point())
        except Exception as error:  # the model's own code may raise anything
            reason = f"{type(error).__name__}: {one_line(error)[:120]}"
    if not outputs and reason is None:
        reason = "no floating-point tensors were found in its outputs"
    return Fingerprint(dtype=dtype, outputs=outputs or None, reason=reason)


def _run(model: nn.Module, inputs: Inputs) -> Any:
    """Return the model's output in eval mode."""
    # If the caller turns warnings into errors, one from the model would change the fingerprint.
    with ignored_warnings, eval_mode(model), full_precision(), seeded(SEED), _uncompiled(model):
        arguments = random_arguments(inputs, seed=SEED)
        return run_batch(model, *arguments.args, **arguments.kwargs)


@contextlib.contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Run compiled parts of a model as they were before: one image is not worth a compilation."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if COMPILED in module._modules or vars(module).get("_compiled_call_impl") is not None:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                break
        yield


def set_precision_(model: nn.Module, stored: Fingerprint, state: Mapping[str, Tensor]) -> None:
    """Give the model the dtypes with which stored outputs were computed.

    Args:
        model: The model, in the dtypes of its library.
        stored: States the dtype of images.
        state: The stored tensors.
    """
    if str(image_dtype(model)) != f"torch.{stored.dtype}":
        model.to(getattr(torch, stored.dtype))  # also buffers that are not stored
    for name, tensor in model.state_dict(keep_vars=True).items():
        other = state.get(name)
        if other is not None and tensor.is_floating_point() and other.is_floating_point():
            tensor.data = tensor.data.to(other.dtype)


def fingerprint_deviation(current: Fingerprint, stored: Fingerprint) -> float:
    """Return the largest `relative_error` of an output, by its norm and sampled values.

    Return infinity if the outputs differ in number or shape.
    """
    if current.outputs is None or stored.outputs is None:
        return math.inf
    if [output.shape for output in current.outputs] != [output.shape for output in stored.outputs]:
        return math.inf
    errors = []
    for new, old in zip(current.outputs, stored.outputs, strict=True):
        errors.append(relative_error([(_numbers(old), _numbers(new))]))
    return max(errors)


def _numbers(output: OutputFingerprint) -> Tensor:
    return torch.tensor((output.norm, *output.values), dtype=torch.float64)


def _summary(output: Tensor) -> OutputFingerprint:
    flat = output.detach().flatten().double().nan_to_num(posinf=0, neginf=0)
    count = min(SAMPLES, flat.numel())
    last = flat.numel() - 1
    indices = [sample * last // max(count - 1, 1) for sample in range(count)]
    values = flat[torch.tensor(indices, dtype=torch.long, device=flat.device)].tolist()
    return OutputFingerprint(
        shape=tuple(output.shape),
        norm=_rounded(flat.norm().item()),
        values=tuple(map(_rounded, values)),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
