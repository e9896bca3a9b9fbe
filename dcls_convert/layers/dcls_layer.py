"""The DCLS layer: its arguments, its parameters, and its forward pass.

One forward pass of a 2-D layer, on a CPU:

1. `DclsLayer.forward` pads the input, if torch's convolution cannot pad in this way.
2. `_convolve_2d`: the layer looks up how to convolve (`conv_cache.py`, `depthwise/table.py`) and
   remembers it for inputs of the same shape, strides and dtype.
3. `_clamped_kernel`: in training, positions are clamped, if they may be changed; the kernel is
   constructed by the layer's interpolation (`construction.py`; bilinear ones by `bilinear.py`).
4. oneDNN's algorithm or torch's convolves.

On a GPU, for bilinear elements, block kernels construct and convolve (`depthwise/blocks.py`), or
one launch constructs the kernel (`gpu_construction.py`).

A window of 7 cells around an old kernel of 3 (x), which was padded by 1. The numbers at the top are
positions:

    grow    -3 -2 -1  0  1  2  3    padding  new_cells  an output sees    in a window of 9
    both     .  .  x  x  x  .  .    3        0, 0       -3 to 3           positions stay
    back     .  .  .  .  x  x  x    1        4, 0       -5 to 1           positions + 1: 3 becomes 4
    ahead    x  x  x  .  .  .  .    1        0, 4       -1 to 5           positions - 1

The layer adds `new_cells` to its `padding`; code outside sees `padding` alone. Under "an output
sees", cells are counted from the output's own place on the map: the old kernel stays at -1 to 1.

Axes: N batch, O output channels, I input channels per group, E kernel elements, A learnt axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

import torch
from torch import Tensor, fx, nn

from ..depthwise.eager import is_counting_flops, is_eager, may_change_in_place
from ..geometry import (
    DYNAMIC_SAME,
    Grow,
    Padding,
    Pair,
    all_new_cells,
    along_learnt_axes,
    extent,
    grow_of_axes,
    grown_padding,
    is_uneven,
    learnt_axes,
    on_every_axis,
    padded_cells,
    plain_numbers,
    position_limits,
    static_padding,
)
from .construction import construct_unchecked
from .conv_cache import ConvCache, key_of, prepare_conv
from .conv_classes import PLAIN, ConvTraits
from .conv_settings import own_settings
from .elements import POSITION_STD
from .interpolation import INTERPOLATIONS, find_interpolation
from .padding import pad
from .profiles import per_axis
from .state_dicts import CheckedLayer
from .ties import at_least_float32, is_sharded

IntOrTuple = int | Sequence[int]


class DclsLayer(CheckedLayer):
    """The parameters and the forward pass of a DCLS layer.

    `DclsConvNd` adds the conversion from and to plain convolutions.
    """

    dims: ClassVar[int]
    conv_class: ClassVar[Any]  # nn.Conv1d, Conv2d or Conv3d
    conv_function: ClassVar[Callable[..., Tensor]]

    if TYPE_CHECKING:  # to type checkers, torch's modules return Any

        def __call__(self, input: Tensor) -> Tensor:
            """Call `forward` and the hooks."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    positions: nn.Parameter
    sigma: nn.Parameter | None
    traits: ConvTraits  # what the class of the old convolution does besides convolving

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_count: int,
        dilated_kernel_size: IntOrTuple,
        stride: IntOrTuple = 1,
        padding: str | IntOrTuple = 0,
        grow: Grow | Sequence[Grow] = "both",
        dilation: IntOrTuple = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        interpolation: str = "bilinear",
        dense_axes: Sequence[int] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels: int
        self.out_channels: int
        self.groups: int
        self.kernel_count: int
        self.in_channels, self.out_channels, self.groups, self.kernel_count = plain_numbers(
            (in_channels, out_channels, groups, kernel_count)
        )
        self.dilated_kernel_size = self._one_per_axis(
            "dilated_kernel_size", dilated_kernel_size, minimum=1
        )
        self.stride = self._one_per_axis("stride", stride, minimum=1)
        self.dilation = self._one_per_axis("dilation", dilation, minimum=1)
        self.padding_mode = padding_mode
        # As in `torch.nn.Conv2d`, or another `geometry.Padding`. This is all padding of the input,
        # unless the window grows to one side: then, the layer also adds `new_cells`.
        self.padding: Padding
        if isinstance(padding, str):
            self.padding = padding
        else:
            self.padding = self._one_per_axis("padding", padding, minimum=0)
        self.interpolation = interpolation
        self.dense_axes = tuple(sorted(dense_axes))
        self.learnt_axes = learnt_axes(self.dims, self.dense_axes)  # in the order of `positions`
        # How the window grows along each axis; empty if it grows to both sides along all axes.
        self.grow: tuple[Grow, ...] = ()
        # Code outside may pad by `kernel_size`. Therefore it is the window without the new cells
        # that the layer pads by itself.
        self.kernel_size = self.dilated_kernel_size
        self._set_grow(grow)
        self.traits = PLAIN
        self._convs = ConvCache()
        self._check_arguments()
        self._set_limits()
        self._make_parameters(bias, device, dtype)
        if not self.weight.is_meta:
            self.reset_parameters()

    def _set_limits(self) -> None:
        """Set the window's learnt size and the limits of positions, which follow from it."""
        self._learnt_size = along_learnt_axes(self.dilated_kernel_size, self.dense_axes)
        limits = list(map(position_limits, self._learnt_size))
        self._lowest_position, self._highest_position = zip(*limits, strict=True)

    def _make_parameters(
        self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Register the parameters, with uninitialised values."""
        dtype = dtype or torch.get_default_dtype()
        exact_dtype = at_least_float32(dtype)

        def new_parameter(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        dense_sides = [self.dilated_kernel_size[axis] for axis in self.dense_axes]
        in_channels_per_group = self.in_channels // self.groups
        weight_shape = (self.out_channels, in_channels_per_group, *dense_sides, self.kernel_count)
        positions_shape = (len(self.learnt_axes), *weight_shape)
        self.weight = new_parameter(*weight_shape)
        self.register_parameter("bias", None)
        if bias:
            self.bias = new_parameter(self.out_channels)
        self.positions = new_parameter(*positions_shape, dtype=exact_dtype)
        self.register_parameter("sigma", None)
        if find_interpolation(self.interpolation).has_sigma:
            self.sigma = new_parameter(*positions_shape, dtype=exact_dtype)

    def _set_grow(self, grow: Grow | Sequence[Grow]) -> None:
        """Set how the window grows.

        Along axes where it grows to one side, `kernel_size` becomes 1. `DclsConvNd.on_meta`, which
        knows the old kernel, then sets `kernel_size` to the old extent.
        """
        axes: Any = [grow] * self.dims if isinstance(grow, str) else grow
        grows: tuple[Grow, ...] = ()
        if isinstance(axes, Sequence):
            grows = grow_of_axes(axes, self.dims)
        if len(grows) != self.dims or not all(map(get_args(Grow).__contains__, grows)):
            raise ValueError(
                f"grow={grow!r} must be one of {', '.join(get_args(Grow))}, or {self.dims} of them"
            )
        if set(grows) != {"both"}:
            self.grow = grows
            self.kernel_size = tuple(
                size if grow == "both" else 1
                for size, grow in zip(self.dilated_kernel_size, grows, strict=True)
            )

    @property
    def new_cells(self) -> list[Pair]:
        """The cells before and after each axis that the layer adds to its `padding`."""
        cells = all_new_cells(self.dilated_kernel_size, self.kernel_size, self.grow)
        spacings = self.on_every_axis(self.dilation)
        return [
            (before * spacing, after * spacing)
            for (before, after), spacing in zip(cells, spacings, strict=True)
        ]

    def on_every_axis(self, value: IntOrTuple) -> tuple[int, ...]:
        """Return a number for each axis; attributes set later may be one number for all axes."""
        return on_every_axis(value, self.dims)

    def _one_per_axis(self, name: str, value: IntOrTuple, minimum: int) -> tuple[int, ...]:
        sizes = on_every_axis(value, self.dims)
        are_integers = set(map(type, sizes)) == {int}
        if len(sizes) != self.dims or not are_integers or min(sizes) < minimum:
            raise ValueError(
                f"{name}={value!r} must be an integer of at least {minimum}, or {self.dims} of them"
            )
        return sizes

    def _check_arguments(self) -> None:
        leaves_a_learnt_axis = set(self.dense_axes) < set(range(self.dims))
        if not leaves_a_learnt_axis or len(set(self.dense_axes)) != len(self.dense_axes):
            raise ValueError(
                f"dense_axes={self.dense_axes} must be different axes, and leave one to be learnt"
            )
        if type(self.kernel_count) is not int or self.kernel_count < 1:
            raise ValueError(f"kernel_count={self.kernel_count!r} must be an integer of at least 1")
        padding: Any = self.padding
        if padding == DYNAMIC_SAME:
            if self.dims != 2 or self.padding_mode != "zeros" or self.grow:
                raise ValueError(f"padding={self.padding!r} is for 2-D with zeros, without grow")
            padding = 0
        # Make torch's convolution, on meta: it refuses wrong values of all other arguments.
        self.conv_class(
            self.in_channels,
            self.out_channels,
            self.dilated_kernel_size,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            padding_mode=self.padding_mode,
            device="meta",
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weights and bias as `torch.nn.Conv2d` does, and positions from N(0, 0.5 cells).

        Sigma gets its initial value.
        """
        bound = 1 / math.sqrt(self.weight[0].numel())  # kaiming_uniform_(a=sqrt(5))
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound, generator=generator)
        nn.init.normal_(self.positions, 0.0, POSITION_STD, generator=generator)
        self._reset_sigma_()
        self.clamp_positions_()

    def _reset_sigma_(self) -> None:
        if self.sigma is not None:
            initial_sigma = INTERPOLATIONS[self.interpolation].initial_sigma
            nn.init.constant_(self.sigma, cast(float, initial_sigma))

    def set_interpolation_(self, name: str) -> None:
        """Change to an interpolation without a sigma."""
        if find_interpolation(name).has_sigma:
            raise ValueError(f"interpolation={name!r} needs a sigma")
        self.interpolation = name
        self._convs.clear()
        if not self.is_tied:
            self.sigma = None

    @torch.no_grad()
    def set_window_(self, window: IntOrTuple) -> None:
        """Give the layer another window, in which its elements stay where they are on the map.

        Outputs keep their size. They keep their values if all elements lie in the new window and
        the interpolation has no sigma: elements with a sigma also spread into new cells. In a group
        of tied layers, every layer needs the new window. If the window grows to one side, positions
        count from its new centre, so older state dicts and averages of positions no longer fit.

        Args:
            window: As `dilated_kernel_size`.

        Raises:
            ValueError: A dense axis would change, outputs would shift (odd and even sides), or the
                padding is too small for the window. The layer is then unchanged.
        """
        sides = self._one_per_axis("dilated_kernel_size", window, minimum=1)
        grows = grow_of_axes(self.grow, self.dims)
        for axis, (old, new) in enumerate(zip(self.dilated_kernel_size, sides, strict=True)):
            if axis in self.dense_axes and new != old:
                raise ValueError(f"axis {axis} is dense, and keeps its {old} cells")
            if grows[axis] == "both" and (new - old) % 2:
                raise ValueError(
                    f"axis {axis}: a window of {new} instead of {old} would shift the output; use "
                    f"{new - 1} or {new + 1}"
                )
        settings = own_settings(self)
        extents = tuple(map(extent, sides, settings.dilation))
        padding = grown_padding(
            settings.padding,
            self.dilated_kernel_size,
            settings.dilation,
            extents,
            settings.stride,
            self.grow,
        )
        if not isinstance(padding, str):
            if min(map(min, static_padding(padding, extents))) < 0:
                raise ValueError(f"padding={self.padding!r} is too small for a window of {sides}")
        if not self.is_tied:
            self.clamp_positions_()
            for row, axis in enumerate(self.learnt_axes):
                self.positions[row] += self.position_shift(axis, sides[axis])
        self.padding = padding
        self.dilated_kernel_size = sides
        if not self.grow:
            self.kernel_size = sides
        self._set_limits()
        self._convs.clear()

    def position_shift(self, axis: int, side: int) -> int:
        """Return the shift of positions along an axis if the window's side changes.

        Positions count from the window's centre. If a window grows to one side, its other end
        stays, and its centre moves.
        """
        grow = grow_of_axes(self.grow, self.dims)[axis]
        if grow == "both":
            return 0
        kept_end = 1 if grow == "back" else 0
        old_limits = position_limits(self.dilated_kernel_size[axis])
        return position_limits(side)[kept_end] - old_limits[kept_end]

    def kernel(self) -> Tensor:
        """Construct the kernel (O, I, *dilated_kernel_size).

        The kernel is differentiable with respect to weight, positions and sigma. `forward` does not
        call this method, so overriding it in a subclass does not change outputs.
        """
        return self._construct(self.weight, self.positions, self.sigma)

    def _construct(self, weight: Tensor, positions: Tensor, sigma: Tensor | None) -> Tensor:
        """Construct the kernel from parameters that the caller read: reading tied ones is slow."""
        return construct_unchecked(
            self.traits.effective_weight(self, weight),
            positions,
            sigma,
            self._learnt_size,
            self.dense_axes,
            INTERPOLATIONS[self.interpolation],
        )

    def clamp_positions_(self) -> None:
        """Clamp positions to the window, and sigma to its minimum, in place.

        Source: paper, section 3 "Positions clamping".
        """
        self._clamp_elements_(self.positions, self.sigma)

    @torch.no_grad()
    def _clamp_elements_(self, positions: Tensor, sigma: Tensor | None) -> None:
        _clamp_(positions, self._lowest_position, self._highest_position)
        if sigma is not None:
            min_sigma = cast(float, INTERPOLATIONS[self.interpolation].min_sigma)
            _clamp_(sigma, (min_sigma,), (math.inf,))

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with `kernel()`: (N, in_channels, *spatial) -> (N, out_channels, *spatial)."""
        if isinstance(input, fx.Proxy) and input.tracer.root is not self:
            # Record the layer as one call, even if the tracer was not told that it is a leaf.
            tracer = cast(fx.Tracer, input.tracer)
            call = tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {})
            return cast(Tensor, call)
        padding = self.padding
        if not isinstance(padding, (str, tuple)):  # set after construction
            padding = self.padding = self.on_every_axis(padding)
        # torch's convolution functions pad only with zeros, and equally on both sides of an axis.
        if (
            self.padding_mode != "zeros"
            or padding == DYNAMIC_SAME
            or self.grow
            or is_uneven(padding)
        ):
            input = self.pad_input(input)
            padding = self.on_every_axis(0)
        if self.dims == 2:
            return self._convolve_2d(input, padding)
        return self.conv_function(
            input,
            self._clamped_kernel(self.weight, self.positions),
            self.bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
        )

    def _convolve_2d(self, input: Tensor, padding: Padding) -> Tensor:
        """Convolve by the table's algorithm; blocks take elements instead of a kernel."""
        weight: Tensor = self.weight
        positions: Tensor = self.positions
        bias = self.bias
        tensors = [input, weight, positions]
        if bias is not None:
            tensors.append(bias)
        eager = is_eager(*tensors) and not is_counting_flops()
        prepared = None
        if eager:
            key = key_of(self, input, weight, positions, bias, padding)
            prepared = self._convs.get(key)
        if prepared is None:
            prepared = prepare_conv(self, input, weight, positions, bias, padding, eager=eager)
            if eager:
                self._convs.keep(key, prepared)
        convolve, takes_elements = prepared
        if takes_elements:
            self._clamp_before_use_(positions, None)
            weight = self.traits.effective_weight(self, weight)
            return convolve(input, bias, weight, positions)
        return convolve(input, bias, self._clamped_kernel(weight, positions))

    def _clamped_kernel(self, weight: Tensor, positions: Tensor) -> Tensor:
        """Construct the kernel for a forward pass; in training, clamp positions before that."""
        sigma = self.sigma
        self._clamp_before_use_(positions, sigma)
        return self._construct(weight, positions, sigma)

    def _clamp_before_use_(self, positions: Tensor, sigma: Tensor | None) -> None:
        """In training, clamp positions in place, if that is possible.

        Otherwise, positions stay as they are. Either way, the kernel is constructed from the
        clamped values.
        """
        if self.training and may_change_in_place(positions):
            self._clamp_elements_(positions, sigma)

    def pad_input(self, input: Tensor) -> Tensor:
        """Add all padding to the input, for a convolution that does not pad."""
        extents = list(map(extent, self.kernel_size, self.on_every_axis(self.dilation)))
        stride = self.on_every_axis(self.stride)
        cells = padded_cells(self.padding, input.shape[-self.dims :], extents, stride)
        return pad(input, cells, self.new_cells, self.padding_mode)

    def extra_repr(self) -> str:
        """Return the layer's arguments, most of them only if they differ from the defaults."""
        defaults = {
            "padding": self.on_every_axis(0),
            "grow": (),
            "dilation": self.on_every_axis(1),
            "groups": 1,
            "padding_mode": "zeros",
        }
        parts = [f"{self.in_channels}, {self.out_channels}"]
        for name in ("kernel_count", "dilated_kernel_size", "stride", *defaults):
            value = getattr(self, name)
            if value != defaults.get(name):
                parts.append(f"{name}={value!r}")
        if self.dense_axes:
            parts.append(f"dense_axes={self.dense_axes}")
        if self.bias is None:
            parts.append("bias=False")
        parts.append(f"interpolation={self.interpolation}")
        if self.is_tied:
            parts.append("positions=tied")
        return ", ".join(parts)


def _clamp_(tensor: Tensor, low: Sequence[float], high: Sequence[float]) -> None:
    """Clamp `tensor[i]` to [low[i], high[i]], in place. A single limit applies to all."""
    if torch.compiler.is_compiling():
        # Use an operator that declares that it changes its argument: inductor (torch 2.15) drops
        # plain clamps of a parameter if the model has several layers. Pass a flat view: inductor
        # may change the memory layout of tensors with four axes, and would then clamp a copy.
        _clamp_in_graph(tensor.flatten(1), list(low), list(high))
    elif len(set(zip(low, high, strict=True))) == 1:
        tensor.clamp_(low[0], high[0])
    elif is_sharded(tensor):  # perhaps along its first axis
        from torch.distributed.tensor import distribute_tensor

        mesh = cast(Any, tensor).device_mesh
        lowest, highest = [
            distribute_tensor(per_axis(limits, tensor), mesh, src_data_rank=None)
            for limits in (low, high)
        ]
        tensor.copy_(tensor.maximum(lowest).minimum(highest))
    else:
        for coordinate, lowest_value, highest_value in zip(tensor, low, high, strict=True):
            coordinate.clamp_(lowest_value, highest_value)


@torch.library.custom_op("dcls_convert::clamp_", mutates_args=("tensor",))
def _clamp_in_graph(tensor: Tensor, low: list[float], high: list[float]) -> None:
    _clamp_(tensor, low, high)
