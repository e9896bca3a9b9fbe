"""How far the outputs of two models differ, whatever the outputs' structure."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import DclsConvertError

CONTAINERS = (tuple, list, dict)


class ComparisonError(DclsConvertError):
    """Outputs that cannot be compared, or differ too much."""


def parts(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The value and all in its tuples, lists and dicts, each with its place, such as "['logits'][0]"."""
    yield place, value
    if isinstance(value, CONTAINERS):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from parts(inner, f"{place}[{key!r}]")


def tensors_in(value: Any) -> list[Tensor]:
    """The value, or the tensors in its tuples, lists and dicts."""
    return [part for _, part in parts(value) if isinstance(part, Tensor)]


def relative_error(outputs: Any, others: Any) -> float:
    """max |a - b| / max |a| of each tensor, and of these the largest; 0 where they are equal, inf where a is 0.

    ComparisonError, with the place, for other structures, shapes and values than tensors, and for what is not finite.
    """
    ours, theirs = list(parts(outputs, "output")), list(parts(others, "output"))
    structures = [
        [(place, type(part) if isinstance(part, CONTAINERS) else None) for place, part in side]
        for side in (ours, theirs)
    ]
    if structures[0] != structures[1]:
        raise ComparisonError(f"outputs differ in structure: {_described(outputs)} and {_described(others)}")
    errors: list[float] = []
    for (place, part), (_, other) in zip(ours, theirs, strict=True):
        if isinstance(part, Tensor) and isinstance(other, Tensor):
            errors.append(_error_of(place, part, other))
        elif not isinstance(part, CONTAINERS) and (type(part) is not type(other) or part != other):
            raise ComparisonError(f"{place} is {_described(part)} and {_described(other)}")
    if not errors:
        raise ComparisonError(f"there is no tensor to compare in {_described(outputs)}")
    return max(errors)


def check_equal(outputs: Any, others: Any, *, bound: float, what: str) -> float:
    """`relative_error`, within the bound; else a ComparisonError that begins with `what`."""
    try:
        error = relative_error(outputs, others)
    except ComparisonError as problem:
        raise ComparisonError(f"{what}: {problem}") from problem
    if error > bound:
        raise ComparisonError(f"{what}: the outputs' relative error is {error:.1e}, allowed is {bound:.0e}")
    return error


def relative_distance(outputs: Any, others: Any) -> float | None:
    """|a - b| / |a| over all floating tensors of the outputs together, Euclidean norms.

    None where there is no such number: other shapes, such as other detections; or a is 0 or not finite.
    """
    ours, theirs = ([t.double() for t in tensors_in(side) if t.is_floating_point()] for side in (outputs, others))
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return None
    left = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
    whole = sum(float(a.square().sum()) for a in ours)
    return math.sqrt(left / whole) if whole and math.isfinite(left / whole) else None


def same_top1(outputs: Any, others: Any) -> float | None:
    """The share of images whose largest class score (N, classes) is that of the same class; None without classes."""
    pairs = list(zip(tensors_in(outputs), tensors_in(others), strict=True))
    if not pairs or not all(one.dim() == 2 and one.shape[1] > 1 for one, _ in pairs):
        return None
    same = torch.cat([one.argmax(1) == other.argmax(1) for one, other in pairs])
    return float(same.double().mean())


def _error_of(place: str, tensor: Tensor, other: Tensor) -> float:
    if tensor.shape != other.shape:
        raise ComparisonError(f"{place} has shape {tuple(tensor.shape)} and {tuple(other.shape)}")
    a, b = (t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64) for t in (tensor, other))
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ComparisonError(f"{place} has values that are not finite (NaN or infinite)")
    if torch.equal(a, b):
        return 0.0
    scale = float(a.abs().max())
    return float((a - b).abs().max()) / scale if scale else math.inf


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, CONTAINERS):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
