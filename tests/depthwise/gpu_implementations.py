"""The implementations of kernel construction for GPUs, run on the CPU, and a watch on what GPUs
must not be asked for.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcls_convert.layers import bilinear, interpolation

IMPLEMENTATIONS = ("eager", "compiled")

HOST = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "lift_fresh",
    "index",
    "_unique2",
}
UNORDERED = {
    "scatter",
    "scatter_add",
    "scatter_add_",
    "index_put",
    "index_put_",
    "index_add",
    "index_add_",
}
ROUNDED = {"mm", "bmm", "addmm", "baddbmm"}  # to 11 bits, where TF32 is allowed


@contextmanager
def as_on_a_gpu(implementation):
    """Inside, kernels are constructed by this implementation; None is the CPU's own."""
    with pytest.MonkeyPatch.context() as patch:
        if implementation:
            for module in (bilinear, interpolation):
                patch.setattr(module, "on_cpu", lambda _: False)
        if implementation == "compiled":
            patch.setattr(bilinear, "is_eager", lambda *_: False)
        yield


class Watch(TorchDispatchMode):
    """Fails at operations that copy from the host or wait for it, that add in any order, or that
    TF32 may round.
    """

    def __init__(self, refused=HOST | UNORDERED | ROUNDED):
        super().__init__()
        self.refused = refused

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert str(func).split(".")[1] not in self.refused, func
        return func(*args, **(kwargs or {}))


class Written(TorchDispatchMode):
    """Keeps the memory, of so many bytes each, that operations write."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.kept = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            memory = result.untyped_storage()
            if memory.nbytes() == self.size:
                self.kept[memory.data_ptr()] = memory
        return result
