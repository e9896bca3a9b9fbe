"""What memory operations take, as numbers of numbers."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Sizes(TorchDispatchMode):
    """Collects the memory that is taken inside, beside that of the given tensors."""

    def __init__(self, given):
        super().__init__()
        self.given, self.kept = {tensor.untyped_storage().data_ptr() for tensor in given}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return result

    @property
    def pieces(self):
        """How many numbers each piece of memory holds; tensors that share one count once."""
        return [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in self.kept.values()]
