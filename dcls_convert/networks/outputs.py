"""How far the outputs of two models differ, whatever the outputs' structure."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import DclsConvertError


class ComparisonError(DclsConvertError):
    """Outputs that cannot be compared, or differ too much."""


def relative_error(outputs: Any, others: Any) -> float:
    """max |a - b| / max |a| of each tensor, and of these the largest; 0 where they are equal, inf where a is 0.

    Args:
        outputs: Of one model: a tensor, or tensors in tuples, lists and dicts. Errors are relative to these.
        others: Of another model, in the same structure. Values other than tensors must be equal.

    Raises:
        ComparisonError: Another structure or shape, no tensor at all, or values that are not finite; says where.
    """
    (leaves, structure), (other_leaves, other_structure) = (
        pytree.tree_flatten_with_path(given) for given in (outputs, others)
    )
    if structure != other_structure:
        raise ComparisonError(f"outputs differ in structure: {_described(outputs)} and {_described(others)}")
    errors = [
        _error_of_tensor(_place(path), leaf, other)
        for (path, leaf), (_, other) in zip(leaves, other_leaves, strict=True)
        if not _equal_value(_place(path), leaf, other)
    ]
    if not errors:
        raise ComparisonError(f"there is no tensor to compare in {_described(outputs)}")
    return max(errors)


def check_equal(outputs: Any, others: Any, *, bound: float, what: str) -> float:
    """`relative_error`, if it is within the bound.

    Raises:
        ComparisonError: The error is larger, or the outputs cannot be compared; begins with `what`.
    """
    try:
        error = relative_error(outputs, others)
    except ComparisonError as problem:
        raise ComparisonError(f"{what}: {problem}") from problem
    if error > bound:
        raise ComparisonError(f"{what}: the outputs' relative error is {error:.1e}, allowed is {bound:.0e}")
    return error


def relative_distance(outputs: Any, others: Any) -> float:
    """|a - b| / |a| over all floating tensors of the outputs together, Euclidean norms; nan where a is 0 or not finite.

    Raises:
        ComparisonError: Another number of tensors, or other shapes.
    """
    ours, theirs = (_floating(given) for given in (outputs, others))
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        raise ComparisonError(f"outputs differ in structure: {_described(outputs)} and {_described(others)}")
    left = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
    whole = sum(float(a.square().sum()) for a in ours)
    return math.sqrt(left / whole) if whole and math.isfinite(left / whole) else math.nan


def _floating(outputs: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(outputs)
    return [leaf.double() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _error_of_tensor(place: str, tensor: Tensor, other: Tensor) -> float:
    if tensor.shape != other.shape:
        raise ComparisonError(f"{place} has shape {tuple(tensor.shape)} and {tuple(other.shape)}")
    a, b = (t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64) for t in (tensor, other))
    for values in (a, b):
        if not torch.isfinite(values).all():
            raise ComparisonError(f"{place} has values that are not finite (NaN or infinite)")
    if torch.equal(a, b):
        return 0.0
    scale = float(a.abs().max())
    return float((a - b).abs().max()) / scale if scale else math.inf


def _equal_value(place: str, value: object, other: object) -> bool:
    """True for two equal values that are no tensors; False for two tensors; else ComparisonError."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return False
    if isinstance(value, Tensor) or isinstance(other, Tensor) or type(value) is not type(other) or value != other:
        raise ComparisonError(f"{place} is {_described(value)} and {_described(other)}")
    return True


def _place(path: tuple[Any, ...]) -> str:
    return f"output{pytree.keystr(path)}"


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
