"""Measure how far the outputs of two models differ, for outputs of any structure."""

import contextlib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError
from ..layers.double_precision import in_double

MAX_DEPTH = 20  # of nested outputs; deeper nesting counts as endless
TEXTS = (str, bytes)
# Objects whose attributes are no outputs.
WITHOUT_PARTS = (*TEXTS, type, types.FunctionType, types.ModuleType, nn.Module)


class ComparisonError(DclsConvertError):
    """Outputs cannot be compared, or differ too much."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value: itself, or those nested in its parts (see `_parts`)."""
    return list(_tensors_in(value, depth=0))


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    tensor = _as_tensor(value)
    if tensor is not None:
        yield tensor
        return
    for part in (_parts(value, depth) or {}).values():
        yield from _tensors_in(part, depth + 1)


def max_relative_error(outputs: Any, others: Any) -> float:
    """Return max |a - b| / max |a| of the worst pair of tensors; inf if a is 0 and b is not.

    Raises:
        ComparisonError: The outputs cannot be compared.
    """
    errors = list(_errors("output", outputs, others))
    if not errors:
        raise ComparisonError(f"there is no tensor to compare in {_described(outputs)}")
    return max(errors)


def check_close(outputs: Any, others: Any, *, bound: float, what: str) -> float:
    """Return the `max_relative_error` of outputs if it is within the bound.

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


def relative_l2_error(outputs: Any, others: Any) -> float | None:
    """Return |a - b| / |a| in Euclidean norms, over all floating-point tensors together.

    Return None if the shapes differ, if a is 0, or if the result is not finite.
    """
    a_tensors = _floating_tensors(outputs)
    b_tensors = _floating_tensors(others)
    if [tensor.shape for tensor in a_tensors] != [tensor.shape for tensor in b_tensors]:
        return None
    squared_difference = 0.0
    squared_norm = 0.0
    for a, b in zip(a_tensors, b_tensors, strict=True):
        squared_difference += float((a - b).square().sum())
        squared_norm += float(a.square().sum())
    if not squared_norm or not math.isfinite(squared_difference / squared_norm):
        return None
    return math.sqrt(squared_difference / squared_norm)


def _floating_tensors(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors of outputs, in float64."""
    return [in_double(tensor) for tensor in tensors_in(outputs) if tensor.is_floating_point()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How close a new network's outputs for images are to the old one's.

    A number that is not defined for these outputs is None.
    """

    # Share of images for which both networks rank the same class first; scores are (N, classes).
    same_top1: float | None
    # Mean over images of KL(old || new) of the softmax of the class scores, in nats.
    kl: float | None
    output_error: float | None  # |new - old| / |old|, see `relative_l2_error`


def compare_outputs(outputs: Any, others: Any) -> Agreement:
    """Compare the old network's outputs with the new one's (`others`)."""
    same_top1: float | None = None
    kl: float | None = None
    pairs = list(zip(tensors_in(outputs), tensors_in(others), strict=True))
    if pairs and _are_class_scores([old for old, _ in pairs]):
        old_tensors, new_tensors = zip(*pairs, strict=True)
        old_scores = in_double(torch.cat(old_tensors))  # (N, classes)
        new_scores = in_double(torch.cat(new_tensors))
        same_class = old_scores.argmax(1) == new_scores.argmax(1)
        same_top1 = float(same_class.double().mean())
        divergence = nn.functional.kl_div(
            new_scores.log_softmax(1),
            old_scores.log_softmax(1),
            reduction="batchmean",
            log_target=True,
        ).item()
        if math.isfinite(divergence):
            kl = max(0.0, divergence)  # rounding can make it slightly negative
    output_error = relative_l2_error(outputs, others)
    return Agreement(same_top1=same_top1, kl=kl, output_error=output_error)


def _are_class_scores(outputs: Sequence[Tensor]) -> bool:
    """Return True if all are (N, classes), with the same number of classes, at least two."""
    class_counts = set()
    for output in outputs:
        if output.dim() != 2 or output.shape[1] < 2:
            return False
        class_counts.add(output.shape[1])
    return len(class_counts) == 1


def _errors(place: str, value: Any, other: Any, depth: int = 0) -> Iterator[float]:
    """Yield the error of each pair of tensors; `place` is "output['logits'][0]", for messages."""
    tensor = _as_tensor(value)
    other_tensor = _as_tensor(other)
    if tensor is not None and other_tensor is not None:
        yield _tensor_error(place, tensor, other_tensor)
        return
    difference = f"{place} is {_described(value)} and {_described(other)}"
    if type(value) is not type(other):
        raise ComparisonError(difference)
    parts = _parts(value, depth)
    other_parts = _parts(other, depth)
    if parts is None or other_parts is None:
        if not _are_equal(value, other):
            raise ComparisonError(f"{difference}, which cannot be compared")
        return
    if parts.keys() != other_parts.keys():
        raise ComparisonError(difference)
    for key, part in parts.items():
        yield from _errors(f"{place}{key}", part, other_parts[key], depth + 1)


def _are_equal(value: Any, other: Any) -> bool:
    """Compare values without parts. Iterators are the same only if they are one object."""
    try:
        return bool(value == other)
    except Exception:  # the class's own code
        return False


def _tensor_error(place: str, value: Tensor, other: Tensor) -> float:
    """Return max |a - b| / max |a| of two tensors; inf if a is 0 and b is not."""
    if value.shape != other.shape:
        raise ComparisonError(f"{place} has shape {tuple(value.shape)} and {tuple(other.shape)}")
    a = _in_double_precision(value)
    b = _in_double_precision(other)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ComparisonError(f"{place} has values that are not finite (NaN or infinite)")
    if not a.numel():
        return 0.0
    difference = float((a - b).abs().max())
    scale = float(a.abs().max())
    if difference == 0:
        return 0.0
    if scale == 0:
        return math.inf
    return difference / scale


def _in_double_precision(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, in complex128 or float64."""
    if tensor.is_complex():
        return tensor.detach().cpu().to(torch.complex128)
    return tensor.detach().cpu().to(torch.float64)


def _as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, or an array of NumPy as one; None for anything else."""
    if isinstance(value, Tensor):
        return value
    if type(value).__module__ == "numpy" and getattr(value, "dtype", None) is not None:
        with contextlib.suppress(TypeError):  # an array of texts or objects
            return torch.as_tensor(value)
    return None


def _parts(value: Any, depth: int) -> dict[str, Any] | None:
    """Return the parts of a value, by how they are reached from it: "['logits']", "[0]", ".boxes".

    Sequences and mappings have entries. Other objects, such as dataclasses, have fields, whether in
    a dictionary or in slots. None for what has no parts to compare, such as numbers and iterators.
    """
    if depth >= MAX_DEPTH:
        raise ComparisonError(f"outputs are nested more than {MAX_DEPTH} deep")
    if isinstance(value, WITHOUT_PARTS):
        return None
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, Sequence):
        return {f"[{index}]": part for index, part in enumerate(value)}
    fields = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        if isinstance(slots, str):
            slots = [slots]
        for name in slots:
            if hasattr(value, name):
                fields[name] = getattr(value, name)
    if not fields:
        return None
    return {f".{name}": part for name, part in fields.items()}


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Sequence | Mapping) and not isinstance(value, TEXTS):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
