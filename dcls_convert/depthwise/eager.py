"""When the fast forms of this package may be used: they have a first derivative in closed form, and nothing else."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import assume_constant_result
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Private: torch has nothing public that tells whether torch.func (vmap, grad, jvp, ...) is transforming this code, or a
# mode sees its operations. Where these are missing, assume so: the plain forms are right everywhere.
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def is_eager(*tensors: Tensor) -> bool:
    """Whether operations run at once: no graph is traced, no torch.func; no dual tensors, no subclasses of Tensor."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    unpack: Callable[[Tensor], forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual
    return _are_ordinary(tensors) and all(unpack(tensor).tangent is None for tensor in tensors)


def _are_ordinary(tensors: Sequence[Tensor]) -> bool:
    return (
        all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        and not _transforms_active()
    )


def on_cpu(tensor: Tensor) -> bool:
    """Whether to take the forms for CPUs, which add in a loop, or those for GPUs, which do so in parallel."""
    return tensor.is_cpu


def is_watched() -> bool:
    """Whether a mode of torch's sees all operations: it counts or caches them, for one."""
    return _dispatch_modes() > 0


def is_counted() -> bool:
    """Whether torch's FlopCounterMode counts all operations: it is to count the convolution."""
    modes = _get_current_dispatch_mode_stack() if is_watched() else []
    return any("FlopCounter" in type(mode).__name__ for mode in modes)


def is_compiled(*tensors: Tensor) -> bool:
    """Whether `torch.compile` traces this code, as `is_eager` has it; not in exports, which are for other machines."""
    return torch.compiler.is_dynamo_compiling() and not _is_exporting() and _are_ordinary(tensors)


def is_exported() -> bool:
    """Whether this code is traced for other programs: by `torch.export`, for ONNX, or by `torch.jit.trace`."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return bool(_is_exporting())


@assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    """As torch says outside of tracing; inside, torch 2.8 says yes under torch.compile too."""
    return torch.compiler.is_exporting()


def is_channels_last(maps: Tensor) -> bool:
    """Whether maps (N, C, H, W), or slices of them, have that memory format and no other."""
    # Asked one by one: for torch.compile, both at once would be a symbol, and no argument for functions of constants.
    if maps.stride(1) != 1:
        return False
    return not maps.is_contiguous()
