"""Measure how much the outputs of two models differ, for outputs of any structure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..depthwise.devices import in_double
from ..errors import DclsConvertError
from .agreement import Agreement


class ComparisonError(DclsConvertError):
    """Outputs cannot be compared, or differ too much."""


def relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return |a - b| / |a| in Euclidean norms, over all pairs (a, b) of tensors together.

    The error is infinite if a is 0 and b is not, or if a value is not finite.
    """
    difference = 0.0
    norm = 0.0
    for a, b in pairs:
        a = _precise(a)
        b = _precise(b).to(a.device)
        difference = math.hypot(difference, float((a - b).norm()))
        norm = math.hypot(norm, float(a.norm()))
    if difference == 0:
        return 0.0
    if norm == 0 or not math.isfinite(difference):
        return math.inf
    return difference / norm


def _precise(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to(torch.complex128) if tensor.is_complex() else in_double(tensor)


def max_relative_error(outputs: Any, others: Any) -> float:
    """Return the largest `relative_error` of any tensor in the outputs.

    Raises:
        ComparisonError: The outputs cannot be compared.
    """
    errors: list[float] = []
    for place, a, b in _pairs(outputs, others):
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ComparisonError(f"{place} has values that are not finite (NaN or infinite)")
        errors.append(relative_error([(a, b)]))
    if not errors:
        raise ComparisonError(f"there is no tensor to compare in a {type(outputs).__name__}")
    return max(errors)


def check_close(outputs: Any, others: Any, *, bound: float, what: str) -> float:
    """Check that the `max_relative_error` of outputs is within the bound, and return the error.

    Raises:
        ComparisonError: The error is larger, or the outputs cannot be compared. The message begins
            with `what`.
    """
    try:
        error = max_relative_error(outputs, others)
    except ComparisonError as problem:
        raise ComparisonError(f"{what}: {problem}") from problem
    if error > bound:
        raise ComparisonError(
            f"{what}: the outputs' relative error is {error:.1e}; at most {bound:.0e} is allowed"
        )
    return error


def compare_outputs(outputs: Any, others: Any, *, num_classes: int | None = None) -> Agreement:
    """Compare the old network's outputs with the new one's (`others`).

    Args:
        outputs: The old network's outputs for one batch, or a list of its outputs per batch.
        others: The new network's outputs, in the same form.
        num_classes: Number of classes that the network ranks: 0 for a network that is no
            classifier, None if the number is not known.
    """
    old_tensors = tensors_in(outputs)
    new_tensors = tensors_in(others)
    if [old.shape for old in old_tensors] != [new.shape for new in new_tensors]:
        return Agreement()
    pairs = []
    for old, new in zip(old_tensors, new_tensors, strict=True):
        if old.is_floating_point() and old.numel():
            pairs.append((old, new))
    if not pairs:
        return Agreement()
    error = relative_error(pairs)
    output_error = error if math.isfinite(error) else None
    width = _common_width(old_tensors)
    if width is None or num_classes not in (None, width):
        return Agreement(output_error=output_error)
    old_scores = in_double(torch.cat(old_tensors))  # (N, width)
    new_scores = in_double(torch.cat(new_tensors))
    same = float((old_scores.argmax(1) == new_scores.argmax(1)).double().mean())
    if num_classes is None:
        return Agreement(same_largest=same, output_error=output_error)
    divergence = nn.functional.kl_div(
        new_scores.log_softmax(1),
        old_scores.log_softmax(1),
        reduction="batchmean",
        log_target=True,
    ).item()
    kl: float | None = None
    if math.isfinite(divergence):
        kl = max(0.0, divergence)  # rounding can make it slightly negative
    return Agreement(same_top1=same, kl=kl, output_error=output_error)


def _common_width(outputs: Sequence[Tensor]) -> int | None:
    """Return C if all outputs are (N, C) with the same C, at least two; else None."""
    widths = set()
    for output in outputs:
        if output.dim() != 2 or output.shape[1] < 2:
            return None
        widths.add(output.shape[1])
    return widths.pop() if len(widths) == 1 else None


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value: the value itself, or the tensors nested in it."""
    return [leaf for leaf in _leaves(value).values() if isinstance(leaf, Tensor)]


def comparable(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the outputs as real numbers, without outputs that torch cannot compare."""
    found = []
    for tensor in outputs:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            continue
        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        elif not tensor.is_floating_point():
            tensor = tensor.double()
        elif tensor.itemsize == 1:
            tensor = tensor.float()
        found.append(tensor)
    return found


def finite_share(outputs: Iterable[Tensor]) -> float:
    """Return the share of finite numbers in all outputs together; 0 if there are no numbers."""
    numbers = 0
    finite = 0
    for tensor in comparable(outputs):
        numbers += tensor.numel()
        finite += int(tensor.isfinite().sum())
    return finite / numbers if numbers else 0.0


def _pairs(outputs: Any, others: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the tensors at the same place in both outputs, and the place for messages.

    Raises:
        ComparisonError: Places, shapes, or values other than tensors differ.
    """
    leaves = _leaves(outputs)
    other_leaves = _leaves(others)
    unpaired = leaves.keys() ^ other_leaves.keys()
    if unpaired:
        raise ComparisonError(f"{min(unpaired)} is in only one of the outputs")
    for place, a in leaves.items():
        b = other_leaves[place]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape:
                raise ComparisonError(f"{place} has shape {tuple(a.shape)} and {tuple(b.shape)}")
            yield place, a, b
        elif not _are_equal(a, b):
            types = f"a {type(a).__name__} and a {type(b).__name__}"
            raise ComparisonError(f"{place} is {types}, which cannot be compared")


def _are_equal(value: Any, other: Any) -> bool:
    """Compare values without parts. Iterators are equal only if they are the same object."""
    try:
        return bool(value == other)
    except Exception:  # the class's own code
        return False


def _leaves(value: Any, place: str = "output") -> dict[str, Any]:
    """Return the innermost values, which have no parts, by place: "output['logits'][0]".

    torch opens lists, tuples and dicts. Other sequences and mappings are opened here, as are
    objects with fields, such as dataclasses.

    Raises:
        ComparisonError: The value contains itself.
    """
    leaves: dict[str, Any] = {}
    try:
        for path, leaf in tree_flatten_with_path(value)[0]:
            leaf_place = place + keystr(path)
            parts = _parts(leaf)
            leaves |= {leaf_place: leaf} if parts is None else _leaves(parts, leaf_place)
    except RecursionError as error:
        raise ComparisonError("outputs are nested too deep, or contain themselves") from error
    return leaves


def _parts(value: Any) -> list[Any] | dict[str, Any] | None:
    """Return the entries or fields of a value; None if the value has no parts."""
    if isinstance(value, Tensor | str | bytes | type | nn.Module):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    fields: Any = object.__getstate__(value)  # in a dictionary, in slots, or in both
    if isinstance(fields, tuple):
        fields = (fields[0] or {}) | fields[1]
    return fields or None
