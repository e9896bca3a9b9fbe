"""When the fast implementations of this package may be used.

They are autograd Functions written by hand: right only for ordinary eager tensors, without
forward-mode AD, torch.func or tracing.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import assume_constant_result

# Private API: torch has nothing public that tells whether torch.func (vmap, grad, jvp, ...) is
# transforming this code, or whether a mode sees its operations. If it is missing, assume so: plain
# operations are right everywhere.
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_dispatch_mode_count = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def is_eager(*tensors: Tensor) -> bool:
    """Whether operations run at once, on ordinary tensors.

    False while a graph is traced, under torch.func, and for dual tensors and subclasses of Tensor.
    """
    if torch.compiler.is_compiling() or _is_jit_tracing():
        return False
    unpack: Callable[[Tensor], forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual
    return _are_ordinary(tensors) and all(unpack(tensor).tangent is None for tensor in tensors)


def _is_jit_tracing() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _are_ordinary(tensors: Sequence[Tensor]) -> bool:
    return (
        all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        and not _transforms_active()
    )


def on_cpu(tensor: Tensor) -> bool:
    """Whether to use the implementations for CPUs.

    A function of its own because tests patch it, to run the code for GPUs on a CPU.
    """
    return tensor.is_cpu


def is_counting_flops() -> bool:
    """Whether torch's FlopCounterMode is active.

    Then use F.conv2d, so that it counts one convolution.
    """
    if _dispatch_mode_count() == 0:
        return False
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = _get_current_dispatch_mode_stack()
    return any("FlopCounter" in type(mode).__name__ for mode in modes)


def is_compiled(*tensors: Tensor) -> bool:
    """Whether `torch.compile` traces this code with ordinary tensors.

    False in exports, whose programs are for other machines.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        and not _torch_is_exporting()
        and _are_ordinary(tensors)
    )


def is_exporting() -> bool:
    """Whether this code is traced for other programs: `torch.export`, ONNX, `torch.jit.trace`."""
    return _is_jit_tracing() or bool(_torch_is_exporting())


@assume_constant_result  # type: ignore[untyped-decorator]
def _torch_is_exporting() -> bool:
    """What torch says outside of tracing; inside, torch 2.8 says yes under torch.compile too."""
    return torch.compiler.is_exporting()
