"""Gradients by torch's operations: where those of kernels would have to be differentiated again."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .eager import is_batched


def needs_torch(grad_output: Tensor | None, *grad_saved: Tensor | None) -> bool:
    """True if kernels cannot compute a backward pass.

    Then its gradients must be differentiable, or are batched, or there are gradients of saved
    outputs, as when gradients are differentiated. (A compiled program has zeros for the latter.)
    """
    if torch.compiler.is_compiling():
        return False
    if grad_output is None or torch.is_grad_enabled() or is_batched(grad_output):
        return True
    return any(gradient is not None for gradient in grad_saved)


def gradients_by_torch(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `function(*inputs)`, differentiable if gradients are enabled.

    Inputs that need no gradient get None.
    """
    with torch.enable_grad():
        output = function(*inputs)
    if not output.requires_grad:  # only the bias is learnt
        return tuple(None for _ in inputs)
    found = torch.autograd.grad(
        output,
        [tensor for tensor in inputs if tensor.requires_grad],
        grad_output,
        create_graph=torch.is_grad_enabled(),
    )
    gradients = iter(found)
    return tuple(next(gradients) if tensor.requires_grad else None for tensor in inputs)


def add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Add two gradients; None is 0."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
