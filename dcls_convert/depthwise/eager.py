"""Check whether this package's fast implementations may be used.

They are hand-written autograd Functions. They are correct only for ordinary eager tensors, without
forward-mode AD, torch.func or tracing.
"""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import assume_constant_result

# Private API: torch has no public way to tell whether torch.func (vmap, grad, jvp, ...) is
# transforming this code, whether a dispatch mode intercepts its operations, or whether tensors have
# tangents. If this API is missing, assume the answer yes: plain operations are always correct.
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_dispatch_mode_count = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
# Private API: `torch.autograd.grad(..., is_grads_batched=True)` uses batches of its own kind.
_is_in_grad_batch = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)

_ORDINARY = frozenset({Tensor, nn.Parameter})


def is_eager(*tensors: Tensor) -> bool:
    """True if operations run immediately, on ordinary tensors.

    False while a graph is traced, under torch.func and forward-mode AD, and for subclasses of
    Tensor.
    """
    for tensor in tensors:
        if type(tensor) not in _ORDINARY:
            return False
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or _transforms_active()
        or _has_tangents()
    )


def may_change_in_place(tensor: Tensor) -> bool:
    """True if a layer may change this tensor, which belongs to it, in a forward pass.

    False in exports, under torch.func and forward-mode AD, and for all but parameters: FSDP1,
    DataParallel and `functional_call` give layers tensors that were computed from parameters, often
    as views, and a change could make the backward pass fail.
    """
    return (
        isinstance(tensor, nn.Parameter)
        and not _transforms_active()
        and not _has_tangents()
        and not is_exporting()
    )


def _has_tangents() -> bool:
    """True if tensors may have tangents, of forward-mode AD."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_batched(tensor: Tensor) -> bool:
    """True if the tensor may stand for a batch of tensors, as under `torch.func.vmap`."""
    return bool(_transforms_active() or _is_in_grad_batch(tensor))


def uses_cpu_implementation(tensor: Tensor) -> bool:
    """True if the CPU implementations should be used.

    This is a separate function so that tests can patch it, to run the GPU code on a CPU.
    """
    return tensor.is_cpu


def is_counting_flops() -> bool:
    """True if torch's FlopCounterMode is active.

    Callers then use F.conv2d, so that it counts one convolution.
    """
    if _dispatch_mode_count() == 0:
        return False
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = _get_current_dispatch_mode_stack()
    return any("FlopCounter" in type(mode).__name__ for mode in modes)


def is_being_compiled(*tensors: Tensor) -> bool:
    """True if `torch.compile` is tracing this code with ordinary tensors.

    False in exports, whose programs run on other machines.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        and not _torch_is_exporting()
        and _ORDINARY.issuperset(map(type, tensors))
        and not _transforms_active()
    )


def is_exporting() -> bool:
    """True if this code is traced by `torch.export`, an ONNX export or `torch.jit.trace`."""
    is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return bool(is_tracing or _torch_is_exporting())


@assume_constant_result  # type: ignore[untyped-decorator]
def _torch_is_exporting() -> bool:
    """Return torch's `is_exporting()`, evaluated outside of tracing.

    While tracing, torch 2.8 returns True under torch.compile too.
    """
    return torch.compiler.is_exporting()
