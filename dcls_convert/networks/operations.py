"""What ran in a network, and where the cells of its output come from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..geometry import extent
from .map_reach import (
    Source,
    Sources,
    sources_by_size,
    sources_of_index,
    sources_of_pad,
    sources_of_permutation,
    sources_of_roll,
)

PERMUTING = frozenset(
    {"permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT"}
)
# Functions that compute cells from windows of the same map.
CONVOLVING = frozenset({"conv1d", "conv2d", "conv3d"})
POOLING = frozenset(f"{kind}_pool{dims}d" for kind in ("max", "avg") for dims in (1, 2, 3))
# Functions that mix the cells along one axis alone, which is their second argument.
ALONG_AN_AXIS = frozenset({"softmax", "cumsum", "cumprod"})
# Functions that take the shape of a map; their values do not depend on its cells.
CONSTANT = ("zeros", "ones", "empty", "full", "rand", "new_")
# Functions that compute cells from all of their maps' cells along some axis, whichever argument.
PRODUCTS = (
    *("matmul", "bmm", "baddbmm", "mm", "addmm", "einsum", "tensordot"),
    *("scaled_dot", "multi_head"),
)
# Functions that compute cells from others of the same map. Where they take a map, its reach ends.
MIXING = (
    *("flip", "rot90", "cumsum", "cumprod", "sort", "gather", "index", "scatter", "unfold", "fold"),
    *("softmax", "fft", "conv", "max_pool", "avg_pool", "lp_pool", "adaptive", "interpolate"),
    *("upsample", "grid_sample", "lstm", "gru", "rnn"),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """What ran in a network: a function with its arguments, or a convolution."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def name(self) -> str:
        """Name of the function, or of the attribute that it gets."""
        attribute = getattr(self.run, "__self__", None)
        name = getattr(self.run, "__name__", "")
        if name == "__get__":
            name = getattr(attribute, "__name__", "")
        return str(name)

    def argument(self, index: int, *names: str) -> Any:
        """Return an argument by its index, or by one of its names; None if it is not given."""
        if index < len(self.args):
            return self.args[index]
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return None

    @property
    def takes_only_shape(self) -> bool:
        """True if the values do not depend on the cells of a map: zeros, or a map times 0."""
        factor = self.argument(1, "other")
        is_zeroed = self.name == "mul" and isinstance(factor, int | float) and factor == 0
        return is_zeroed or self.name.startswith(CONSTANT)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def sources_of(operation: Operation, input: Tensor, output: Tensor, *, only_map: bool) -> Sources:
    """Return where the axes of an operation's output come from, in one of its inputs.

    `only_map` is True if no other input is a map, such as a factor that is a weight.
    """
    name = operation.name
    if name == "matmul" and only_map:
        return _sources_of_product(operation, input, output)
    mixed: Sources = [None] * output.dim()
    if name.startswith(PRODUCTS):
        return mixed
    sources: Sources | None
    if input is not operation.argument(0, "input"):  # such as the indices of `map[indices]`
        name = ""
    if name in ("pad", "constant_pad_nd"):
        sources = sources_of_pad(input.dim(), operation.argument(1, "pad"))
    elif name == "roll":
        shifts = operation.argument(1, "shifts")
        sources = sources_of_roll(input.shape, shifts, operation.argument(2, "dims", "axis"))
    elif name == "__getitem__":
        sources = sources_of_index(input.shape, operation.args[1])
    elif name == "narrow":
        sources = _unmoved(input.dim())
        axis = operation.argument(1, "dim") % input.dim()
        sources[axis] = Source(axis, -(operation.argument(2, "start") % input.shape[axis]))
    elif name in PERMUTING:
        options = {key: value for key, value in operation.kwargs.items() if key != "input"}

        def permute(tensor: Tensor) -> Any:
            return operation.run(tensor, *operation.args[1:], **options)

        sources = sources_of_permutation(permute, input.dim())
    elif name in POOLING or (name in CONVOLVING and only_map):
        sources = _sources_of_windows(operation, input)
    elif name in ALONG_AN_AXIS:
        sources = _unmoved(input.dim())
        axis = operation.argument(1, "dim")
        sources[-1 if axis is None else axis] = None
    elif name.startswith(MIXING):
        sources = mixed
    else:
        sources = sources_by_size(input.shape, output.shape)
    if sources is None or len(sources) != output.dim():
        return mixed
    return sources


def _unmoved(dims: int) -> Sources:
    """Return the sources of a map that is taken as it is."""
    return [Source(axis) for axis in range(dims)]


def _sources_of_product(operation: Operation, input: Tensor, output: Tensor) -> Sources:
    """Return the sources of a map's product with a matrix: all axes but the one summed over."""
    if min(operation.args[0].dim(), operation.args[1].dim()) < 2 or input.dim() != output.dim():
        return [None] * output.dim()
    sources = _unmoved(input.dim())
    sources[-1 if input is operation.args[0] else -2] = None
    return sources


def _sources_of_windows(operation: Operation, input: Tensor) -> Sources:
    """Return the sources of a pooling, or of a convolution that is not a module."""
    dilation: Any = 1
    if operation.name in POOLING:
        kernel = operation.argument(1, "kernel_size")
        stride = operation.argument(2, "stride") or kernel
        padding = operation.argument(3, "padding") or 0
        if operation.name.startswith("max"):
            dilation = operation.argument(4, "dilation") or 1
    else:
        kernel = tuple(operation.argument(1, "weight").shape[2:])
        stride = operation.argument(3, "stride") or 1
        padding = operation.argument(4, "padding") or 0
        dilation = operation.argument(5, "dilation") or 1
    dims = int(operation.name[-2])
    extents = list(map(extent, _each(kernel, dims), _each(dilation, dims)))
    befores = _each(padding, dims)
    if isinstance(padding, str):
        befores = [(cells - 1) // 2 if padding == "same" else 0 for cells in extents]
    sources = _unmoved(input.dim() - dims)
    for before, step, cells in zip(befores, _each(stride, dims), extents, strict=True):
        # Windows that leave cells out may be one of several such parts of a map, as in NASNet.
        is_whole = step <= cells
        sources.append(Source(len(sources), before, step, cells) if is_whole else None)
    sources[-dims - 1] = None
    return sources


def _each(value: Any, dims: int) -> Sequence[Any]:
    """Return a number for each axis, as torch reads such arguments."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * dims if len(values) == 1 else values
