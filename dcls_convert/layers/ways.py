"""How a layer convolves an input: it looks this up in `depthwise/table.py`, and remembers it."""

import functools
from typing import Any, cast

import torch
from torch import Tensor

from ..depthwise import table
from ..depthwise.devices import AUTOCAST_DEVICES, float32_precision
from ..depthwise.eager import may_change_in_place
from ..geometry import Padding, Pair, extent, on_every_axis, static_padding

MAX_WAYS = 100  # kept by a layer; with images of all sizes, they would grow without end

# How to convolve, and whether that takes elements instead of a kernel.
FoundWay = tuple[table.Convolve, bool]


class Ways(dict[tuple[object, ...], FoundWay]):
    """How a layer convolves inputs of each kind that it has seen. A copy or a pickle is empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Ways, ()

    def keep(self, key: tuple[object, ...], found: FoundWay) -> None:
        """Remember a way, and forget all others if there are many."""
        if len(self) >= MAX_WAYS:
            self.clear()
        self[key] = found


def key_of(
    input: Tensor, weight: Tensor, positions: Tensor, bias: Tensor | None
) -> tuple[object, ...]:
    """Return a key that is equal for inputs that one way, and its plan, can convolve.

    The settings of the layer are not a part of it.
    """
    device = input.device
    kind = device.type
    dtype = input.dtype
    if kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return (
        input.shape,
        input.stride(),
        input.dtype,
        device,
        dtype,
        kind == "cuda" and dtype == torch.float32 and float32_precision(),
        weight.dtype,
        weight.device,
        positions.dtype,
        positions.device,
        positions.is_contiguous(),
        type(positions),
        bias is not None and (bias.dtype, bias.device),
    )


def prepare_way(
    layer: Any,
    input: Tensor,
    weight: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    padding: Padding,
    *,
    eager: bool,
) -> FoundWay:
    """Return how a 2-D layer convolves inputs like this one, with parameters like these.

    The padding must be one that torch's function supports.
    """
    dtype = table.computed_dtype(input, weight, bias)
    dilation = on_every_axis(layer.dilation, 2)
    if isinstance(padding, str):  # "same" or "valid"
        sides = static_padding(padding, list(map(extent, layer.dilated_kernel_size, dilation)))
        if all(before == after for before, after in sides):
            padding = tuple(before for before, _ in sides)
    case = table.Case(
        device=input.device,
        dtype=dtype or input.dtype,
        input_shape=tuple(input.shape),
        kernel_shape=(
            layer.out_channels,
            layer.in_channels // layer.groups,
            *layer.dilated_kernel_size,
        ),
        stride=cast(Pair, on_every_axis(layer.stride, 2)),
        padding=cast(Any, padding),
        dilation=cast(Pair, dilation),
        groups=layer.groups,
    )
    way = table.TORCH
    if dtype is not None:
        learnt = [weight, positions] if bias is None else [weight, positions, bias]
        way = table.find_way(case, input, *learnt, eager=eager)
    takes_elements = (
        way.name == "blocks"
        and layer.interpolation == "bilinear"
        and not layer.dense_axes
        and min(layer.dilated_kernel_size) > 1
        and positions.device == input.device
        and positions.is_contiguous()  # so that a kernel can clamp them in place
        and table.BLOCKS_DTYPES >= {weight.dtype, positions.dtype}
    )
    if not takes_elements:
        return way.prepare(case, input, bias), False
    from ..depthwise.blocks import convolve_by_plan  # needs Triton
    from .gpu_construction import ElementPlan

    plan = ElementPlan(
        input,
        case.window,
        case.stride,
        case.dtype,
        has_bias=bias is not None,
        output_dtype=layer.output_dtype,
        elements=layer.kernel_count,
        # A compiled program could lose what a kernel changes in a parameter.
        clamps=(
            layer.training and not torch.compiler.is_compiling() and may_change_in_place(positions)
        ),
    )
    return functools.partial(convolve_by_plan, plan), True
