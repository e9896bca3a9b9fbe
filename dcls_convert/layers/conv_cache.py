"""Look up in `depthwise/table.py` how a layer convolves an input, and remember the answer."""

import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..depthwise import table
from ..depthwise.devices import float32_precision
from ..geometry import Padding, Pair, extent, on_every_axis, static_padding

MAX_CONVS = 100  # kept by a layer; bounds memory where every image has another size


class PreparedConv(NamedTuple):
    """How a layer convolves inputs of one shape, strides, dtype and device."""

    convolve: table.Convolve
    takes_elements: bool  # True if `convolve` takes weight and positions, instead of a kernel


class ConvCache(dict[tuple[object, ...], PreparedConv]):
    """The prepared convolutions of a layer, by `key_of`. A copy or a pickle is empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ConvCache, ()

    def keep(self, key: tuple[object, ...], conv: PreparedConv) -> None:
        """Remember a convolution, and forget the oldest one if there are `MAX_CONVS`."""
        if len(self) >= MAX_CONVS:
            self.pop(next(iter(self)), None)  # None: another thread may have removed it
        self[key] = conv


def key_of(
    layer: Any,
    input: Tensor,
    weight: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    padding: Padding,
) -> tuple[object, ...]:
    """Return a key for a call; calls with equal keys share one prepared convolution."""
    dtype = table.computed_dtype(input, weight, bias)
    return (
        padding,
        layer.stride,
        layer.dilation,
        input.shape,
        input.stride(),
        input.dtype,
        input.device,
        dtype,
        dtype is torch.float32 and input.is_cuda and float32_precision(),
        weight.dtype,
        positions.dtype,
        positions.device,
        bias is not None and bias.dtype,
    )


def prepare_conv(
    layer: Any,
    input: Tensor,
    weight: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    padding: Padding,
    *,
    eager: bool,
) -> PreparedConv:
    """Prepare the convolution of a 2-D layer, for inputs and parameters like the given ones.

    torch's convolution function must support the padding.
    """
    dtype = table.computed_dtype(input, weight, bias)
    spec = _spec_of(layer, input, dtype or input.dtype, padding)
    algorithm = table.TORCH
    if dtype is not None:
        learnt = [weight, positions] if bias is None else [weight, positions, bias]
        algorithm = table.find_algorithm(spec, input, *learnt, eager=eager)
    takes_elements = (
        algorithm.name == "blocks"
        and layer.interpolation == "bilinear"
        and not layer.dense_axes
        and min(layer.dilated_kernel_size) > 1
        and positions.device == input.device
        and table.BLOCKS_DTYPES >= {weight.dtype, positions.dtype}
    )
    if takes_elements:
        convolve = _plan_of_elements(layer, spec, input, positions, bias)
    else:
        convolve = algorithm.prepare(spec, input, bias)
    return PreparedConv(convolve, takes_elements)


def _spec_of(layer: Any, input: Tensor, dtype: torch.dtype, padding: Padding) -> table.ConvSpec:
    """Return the layer's convolution of this input in plain values."""
    dilation = on_every_axis(layer.dilation, 2)
    if isinstance(padding, str):  # "same" or "valid"
        paddings = static_padding(padding, list(map(extent, layer.dilated_kernel_size, dilation)))
        if all(before == after for before, after in paddings):
            padding = tuple(before for before, _ in paddings)
    in_channels_per_group = layer.in_channels // layer.groups
    return table.ConvSpec(
        device=input.device,
        dtype=dtype,
        input_shape=tuple(input.shape),
        kernel_shape=(layer.out_channels, in_channels_per_group, *layer.dilated_kernel_size),
        stride=cast(Pair, on_every_axis(layer.stride, 2)),
        padding=cast(Any, padding),
        dilation=cast(Pair, dilation),
        groups=layer.groups,
    )


def _plan_of_elements(
    layer: Any,
    spec: table.ConvSpec,
    input: Tensor,
    positions: Tensor,
    bias: Tensor | None,
) -> table.Convolve:
    """Return the function that convolves in blocks, with weight and positions."""
    from ..depthwise.block_plan import BlockPlan  # needs Triton
    from ..depthwise.blocks import convolve_by_plan
    from .gpu_construction import construct_by_torch

    plan = BlockPlan(
        input,
        spec.window,
        spec.stride,
        spec.dtype,
        elements=layer.kernel_count,
        positions_dtype=positions.dtype,
        has_bias=bias is not None,
        window_by_torch=functools.partial(construct_by_torch, size=spec.window),
    )
    return functools.partial(convolve_by_plan, plan)
