"""How far the outputs of two models differ, whatever the outputs' structure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError

CONTAINERS = (tuple, list, dict)


class ComparisonError(DclsConvertError):
    """Outputs that cannot be compared, or differ too much."""


def tensors_in(value: Any) -> list[Tensor]:
    """The value, or the tensors in its tuples, lists and dicts."""
    if isinstance(value, CONTAINERS):
        return [tensor for part in _entries(value).values() for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def relative_error(outputs: Any, others: Any) -> float:
    """max |a - b| / max |a|, of the worst tensor; inf where a is 0. ComparisonError for what cannot be compared."""
    errors = list(_errors("output", outputs, others))
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
        raise ComparisonError(
            f"{what}: the outputs' relative error is {error:.1e}, allowed is {bound:.0e}"
        )
    return error


def relative_distance(outputs: Any, others: Any) -> float | None:
    """|a - b| / |a| over all floating tensors together, Euclidean norms; None for other shapes, or where a is 0."""
    ours, theirs = (
        [t.double() for t in tensors_in(side) if t.is_floating_point()]
        for side in (outputs, others)
    )
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return None
    left = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
    whole = sum(float(a.square().sum()) for a in ours)
    return math.sqrt(left / whole) if whole and math.isfinite(left / whole) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How close outputs for images are to others; None what is not defined for them."""

    same_top1: (
        float | None
    )  # share of images whose largest class score (N, classes) is that of the same class
    kl: (
        float | None
    )  # mean over images of KL(old || new) of the softmax of the class scores, in nats
    output_error: float | None  # |new - old| / |old|, as `relative_distance`


def agreement(outputs: Any, others: Any) -> Agreement:
    """Of the old network's outputs with those of the new one."""
    top1 = kl = None
    pairs = list(zip(tensors_in(outputs), tensors_in(others), strict=True))
    if pairs and all(one.dim() == 2 and one.shape[1] > 1 for one, _ in pairs):
        old, new = (torch.cat(side).double() for side in zip(*pairs, strict=True))
        top1 = float((old.argmax(1) == new.argmax(1)).double().mean())
        one, other = old.log_softmax(1), new.log_softmax(1)
        kl = max(
            0.0, float(nn.functional.kl_div(other, one, reduction="batchmean", log_target=True))
        )
    return Agreement(same_top1=top1, kl=kl, output_error=relative_distance(outputs, others))


def _errors(place: str, value: Any, other: Any) -> Iterator[float]:
    """The error of each tensor, at its place, such as "output['logits'][0]"."""
    alike = type(value) is type(other)
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if value.shape != other.shape:
            raise ComparisonError(
                f"{place} has shape {tuple(value.shape)} and {tuple(other.shape)}"
            )
        a, b = (
            t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64)
            for t in (value, other)
        )
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ComparisonError(f"{place} has values that are not finite (NaN or infinite)")
        difference, scale = (float(t.abs().max()) if t.numel() else 0.0 for t in (a - b, a))
        yield difference / scale if scale else math.inf if difference else 0.0
    elif (
        isinstance(value, CONTAINERS) and alike and _entries(value).keys() == _entries(other).keys()
    ):
        for key, part in _entries(value).items():
            yield from _errors(f"{place}[{key!r}]", part, _entries(other)[key])
    elif isinstance(value, CONTAINERS) or not alike or value != other:
        raise ComparisonError(f"{place} is {_described(value)} and {_described(other)}")


def _entries(container: Any) -> dict[Any, Any]:
    return dict(container if isinstance(container, dict) else enumerate(container))


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, CONTAINERS):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
