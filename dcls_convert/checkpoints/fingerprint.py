"""A model's output for one seeded random image, in a few numbers: enough to notice that it is another model."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import one_line
from ..networks.outputs import tensors_in
from ..networks.running import evaluating, full_precision, seeded
from ..networks.tracing import image_dtype
from ..options import MOST_PIXELS
from ..records import Record

SEED = 0
SAMPLES = 16  # values of each output
DIGITS = 6  # significant; float32 has seven
TOLERANCES = {  # of the stored norm
    "float64": 1e-3,
    "float32": 1e-3,
    "float16": 1e-2,  # 11 bits of mantissa, and kernels that sum in other orders
    "bfloat16": 5e-2,  # 8 bits
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputPrint:
    """One floating-point tensor of the output. None stands for a number that is not finite."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    shape: tuple[int, ...]
    norm: float | None
    values: tuple[
        float | None, ...
    ]  # at evenly spaced places of the flattened tensor, the first and last included


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint(Record):
    """The output for one image of normal random numbers, batch 1."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    dtype: Literal["float64", "float32", "float16", "bfloat16"]  # of the image
    seed: Literal[0] = 0  # SEED
    # In the order of the output's leaves; None where the model did not run.
    outputs: tuple[OutputPrint, ...] | None
    reason: str | None  # why there are no outputs


def take_fingerprint(model: nn.Module, input_size: Sequence[int] | None) -> Fingerprint:
    """The outputs for a seeded random image, or why there are none. Model and process stay as they were."""
    dtype = image_dtype(model)
    name: Any = str(dtype).removeprefix("torch.")
    if input_size is None:
        return Fingerprint(dtype=name, outputs=None, reason="the plan has no input size")
    if math.prod(input_size[1:]) > MOST_PIXELS:
        return Fingerprint(
            dtype=name,
            outputs=None,
            reason=f"images of more than {MOST_PIXELS:,} pixels are not run",
        )
    device = next(
        (tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu")
    )
    image = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(SEED), device="cpu")
    try:
        # Warnings are about the model; turned into errors they would change what is written.
        with (
            warnings.catch_warnings(action="ignore"),
            evaluating(model),
            full_precision(),
            seeded(SEED),
        ):
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            output = functional_call(model, buffers, (image.to(device, dtype),))
        outputs = tuple(
            _output_print(tensor) for tensor in tensors_in(output) if tensor.is_floating_point()
        )
    except Exception as error:  # the model's own code may raise anything
        return Fingerprint(
            dtype=name, outputs=None, reason=f"{type(error).__name__}: {one_line(error)[:120]}"
        )
    return Fingerprint(dtype=name, outputs=outputs, reason=None)


def deviation(taken: Fingerprint, stored: Fingerprint) -> float:
    """The largest difference, as a share of its output's norm; infinite where number, shapes or finiteness differ."""
    if taken.outputs is None or stored.outputs is None or len(taken.outputs) != len(stored.outputs):
        return math.inf
    largest = 0.0
    for new, old in zip(taken.outputs, stored.outputs, strict=True):
        ours = (new.norm, *new.values)
        theirs = (old.norm, *old.values)
        if new.shape != old.shape or [each is None for each in ours] != [
            each is None for each in theirs
        ]:
            return math.inf
        for one, other in zip(ours, theirs, strict=True):
            if one is not None and other is not None and one != other:
                largest = max(largest, abs(one - other) / old.norm if old.norm else math.inf)
    return largest


def _output_print(output: Tensor) -> OutputPrint:
    flat = output.detach().flatten()
    last = flat.numel() - 1
    count = min(SAMPLES, flat.numel())
    places = [index * last // max(count - 1, 1) for index in range(count)]
    values = flat[torch.tensor(places, dtype=torch.long, device=flat.device)].double().tolist()
    norm = flat.double().norm().item()
    return OutputPrint(
        shape=tuple(output.shape), norm=_rounded(norm), values=tuple(map(_rounded, values))
    )


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
