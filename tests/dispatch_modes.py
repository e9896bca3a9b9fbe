"""Torch modes that see every operation: one records what is allocated, one refuses some."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS_FOR_HOST = {
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


class RefuseOperations(TorchDispatchMode):
    """Fail at operations that copy from the host or wait for it, that add in an undefined order,
    or that TF32 may round.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert str(func).split(".")[1] not in WAITS_FOR_HOST | UNORDERED | ROUNDED, func
        return func(*args, **(kwargs or {}))


class AllocatedMemory(TorchDispatchMode):
    """Record all memory that operations allocate, other than that of the `given` tensors."""

    def __init__(self, given=()):
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        # Address of the memory -> tensor, which is kept alive so that no address is reused.
        self.kept = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                address = tensor.untyped_storage().data_ptr()
                if address not in self.given:
                    self.kept[address] = tensor
        return result

    def numbers(self):
        """Return how many numbers each piece of memory holds; shared memory counts once."""
        return [
            tensor.untyped_storage().nbytes() // tensor.element_size()
            for tensor in self.kept.values()
        ]
