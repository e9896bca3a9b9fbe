"""Layers that replace convolutions while a network is measured: see `measure`."""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..geometry import DYNAMIC_SAME, Grow, ceil_div, grow_of_axes
from ..layers.conv_classes import Conv, settings_of
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd

# Values that overwrite weights. Any change of a weight by other code alters at least one of them.
POISON = (math.nan, 3e4, -3e4)
STAND_IN_GROWTH = 2  # cells more in a stand-in's window than in the old kernel, along an axis


class StandIn:
    """A DCLS layer that computes the same function as the convolution that it replaces.

    Both weights are overwritten with arbitrary values, so that any code reading them shows.
    """

    def __init__(self, conv: Conv, grow: Grow = "both") -> None:
        """Overwrite the values in the convolution's weight; the caller restores them."""
        self.conv = conv
        self.calls = 0
        self.layer = _stand_in_layer(conv, grow)
        self.weights = (conv.weight, self.layer.weight)
        private = copy.copy(conv)
        values = conv.weight.detach().clone()
        vars(private)["_parameters"] = {**conv._parameters, "weight": nn.Parameter(values)}

        def forward(input: Tensor) -> Tensor:
            self.calls += 1
            output: Tensor = type(conv).forward(private, input)  # type: ignore[arg-type]
            return output

        self.layer.forward = forward  # type: ignore[method-assign]
        for weight in self.weights:
            # Write to `data`, because autograd does not notice this if it has saved the weight.
            weight.data.copy_(_poison_like(weight))

    def is_changed(self) -> bool:
        """True if other code has changed the weight of the convolution or of the layer."""
        for weight in self.weights:
            if not torch.equal(weight.nan_to_num(0), _poison_like(weight).nan_to_num(0)):
                return True
        return False


def _poison_like(weight: Tensor) -> Tensor:
    poison = torch.tensor(POISON, dtype=weight.dtype, device=weight.device)
    times = ceil_div(weight.numel(), len(POISON))
    return poison.repeat(times)[: weight.numel()].view(weight.shape)


@contextlib.contextmanager
def swapped_in(model: nn.Module, new: Mapping[Conv, nn.Module]) -> Iterator[None]:
    """Replace convolutions by other modules inside the block, under all their names."""
    by_old: dict[nn.Module | None, nn.Module] = dict(new.items())
    places = []
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child in by_old:
                places.append((parent._modules, name, child))
    try:
        for children, name, child in places:
            children[name] = by_old[child]
        yield
    finally:
        for children, name, child in places:
            children[name] = child


def with_window(
    conv: Conv, window: Sequence[int], axes: Sequence[int], grow: Sequence[Grow] = ()
) -> nn.Module:
    """Make a plain convolution like `conv`, with random values in all cells of a window.

    Args:
        conv: The old convolution.
        window: Size of the window.
        axes: Axes along which the new kernel has the window's size. Along other axes, it has the
            old kernel's size.
        grow: How the window grows along each axis; empty means to both sides.
    """
    settings = settings_of(conv)
    sizes = list(settings.extents)
    for axis in axes:
        sizes[axis] = window[axis]
    layer = _layer_without_values(conv, sizes, grow=grow)
    if layer.padding != DYNAMIC_SAME:
        # Keep the attributes of `conv`, for code that reads them.
        layer.grow = grow_of_axes(grow, layer.dims)
        layer.kernel_size = settings.extents
        layer.padding = settings.padding
    plain = layer.plain_conv_without_values()
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(plain.weight.shape, generator=generator, device="cpu")
    # Scale the values to the old kernel's norm, so that deep networks do not overflow.
    plain.weight.data.copy_(values * float(conv.weight.detach().norm()) / values.norm())
    return plain


def _stand_in_layer(conv: Conv, grow: Grow) -> DclsConvNd:
    """Make a layer whose window is larger along all axes on which the old kernel has cells.

    The last axis of the layer's weight is one longer than the old weight's, so that code that reads
    the shape sees a difference.
    """
    sizes = list(settings_of(conv).extents)
    grown_axes = [axis for axis, size in enumerate(sizes) if size > 1] or [len(sizes) - 1]
    for axis in grown_axes:
        sizes[axis] += STAND_IN_GROWTH
    dense_axes = [axis for axis in range(len(sizes)) if axis not in grown_axes]
    return _layer_without_values(conv, sizes, dense_axes, [grow] * len(sizes))


def _layer_without_values(
    conv: Conv,
    window: Sequence[int],
    dense_axes: Sequence[int] = (),
    grow: Sequence[Grow] = (),
) -> DclsConvNd:
    return DCLS_LAYERS[len(window)].from_conv_without_values(
        conv,
        kernel_count=conv.weight.shape[-1] + 1,
        dilated_kernel_size=tuple(window),
        interpolation="bilinear",
        dense_axes=dense_axes,
        grow=grow,
    )
