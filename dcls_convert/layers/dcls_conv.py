"""The DCLS layers: convolutions whose kernel is constructed from a few weighted elements with learnable positions.

Axes: N batch, O output channels, I input channels per group, E kernel elements, A learnt axes.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..depthwise.choice import conv2d
from ..depthwise.geometry import (
    DYNAMIC_SAME,
    Padding,
    check_window,
    extent,
    grown_padding,
    is_uneven,
    padded_cells,
)
from .bilinear import per_axis
from .construction import construct_kernel
from .conv_classes import PLAIN, Conv, ConvForm, find_form, padding_of, why_not_replaceable
from .elements import POSITION_STD, largest_elements
from .interpolation import find_interpolation, learnt_axes, position_limits
from .ties import Tied

IntOrTuple = int | Sequence[int]


class DclsConvNd(Tied):
    """What the DCLS layers of 1, 2 and 3 dimensions share.

    Parameters of a layer: `weight` (O, I, E), `positions` (A, O, I, E) in cells from the kernel centre, `sigma` (as
    positions; triangle and Gaussian only) and `bias` (O). A dense axis of D cells stands before E: (O, I, D, E).

    Args:
        in_channels, out_channels, stride, padding, dilation, groups, bias, padding_mode, device, dtype: As in
            `torch.nn.Conv2d`; `dilation` spaces the cells of the dilated kernel itself and is 1 in practice.
            `padding="dynamic_same"` is TensorFlow's rule, which depends on the input's size (2-D only).
        kernel_count: Weighted elements in one kernel (with dense axes, in each of their cells).
        dilated_kernel_size: Window in which elements may move, in cells.
        interpolation: "bilinear", "triangle" or "gaussian", see `construct_kernel`.
        dense_axes: Spatial axes along which nothing is learnt: all their cells are weighted, as in an ordinary kernel.

    Raises:
        ValueError: Arguments outside what is allowed; checked here, not at the first forward.

    Source: arXiv:2112.03740. Positions start from N(0, 0.5 cells), weights as in `torch.nn.Conv2d`.
    """

    dims: ClassVar[int]
    conv_class: ClassVar[type[Conv]]
    conv_function: ClassVar[Callable[..., Tensor]]

    weight: nn.Parameter
    bias: nn.Parameter | None
    positions: nn.Parameter
    sigma: nn.Parameter | None
    padding: Padding
    form: ConvForm  # what the class of the old convolution does to its weight

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_count: int,
        dilated_kernel_size: IntOrTuple,
        stride: IntOrTuple = 1,
        padding: str | IntOrTuple = 0,
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
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_count = kernel_count
        self.dilated_kernel_size = self._per_axis(
            "dilated_kernel_size", dilated_kernel_size, least=1
        )
        self.stride = self._per_axis("stride", stride, least=1)
        self.padding = (
            padding if isinstance(padding, str) else self._per_axis("padding", padding, least=0)
        )
        self.dilation = self._per_axis("dilation", dilation, least=1)
        self.padding_mode = padding_mode
        self.interpolation = interpolation
        self.dense_axes = tuple(sorted(dense_axes))
        self.learnt_axes = learnt_axes(self.dims, self.dense_axes)  # in the order of `positions`
        self.kernel_size = (
            self.dilated_kernel_size
        )  # of the constructed kernel, as convolutions name it
        self.form = PLAIN
        self._check()
        dense = [self.dilated_kernel_size[axis] for axis in self.dense_axes]
        shape = (out_channels, in_channels // groups, *dense, kernel_count)
        coordinates = (len(self.learnt_axes), *shape)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(shape, **factory))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_channels, **factory)) if bias else None
        )
        self.positions = nn.Parameter(torch.empty(coordinates, **factory))
        has_sigma = find_interpolation(interpolation).has_sigma
        self.register_parameter(
            "sigma", nn.Parameter(torch.empty(coordinates, **factory)) if has_sigma else None
        )
        self.reset_parameters()

    def _per_axis(self, name: str, value: IntOrTuple, least: int) -> tuple[int, ...]:
        sizes = tuple(value) if isinstance(value, Sequence) else (value,) * self.dims
        if len(sizes) != self.dims or not all(
            type(size) is int and size >= least for size in sizes
        ):
            raise ValueError(
                f"{name}={value!r} must be an integer of at least {least}, or {self.dims} of them"
            )
        return sizes

    def _check(self) -> None:
        if not set(self.dense_axes) < set(range(self.dims)) or len(set(self.dense_axes)) != len(
            self.dense_axes
        ):
            raise ValueError(
                f"dense_axes={self.dense_axes} must be different axes, and leave one to be learnt"
            )
        if type(self.kernel_count) is not int or self.kernel_count < 1:
            raise ValueError(f"kernel_count={self.kernel_count!r} must be an integer of at least 1")
        if self.padding == DYNAMIC_SAME and (self.dims != 2 or self.padding_mode != "zeros"):
            raise ValueError(f"padding={self.padding!r} is for 2-D with zeros")
        padding = 0 if self.padding == DYNAMIC_SAME else self.padding
        geometry = (self.dilated_kernel_size, self.stride, padding, self.dilation, self.groups)
        make: Any = self.conv_class  # which refuses what no convolution can have
        make(
            self.in_channels,
            self.out_channels,
            *geometry,
            padding_mode=self.padding_mode,
            device="meta",
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Weights and bias as `torch.nn.Conv2d` draws them, positions from N(0, 0.5), sigma at its initial value."""
        bound = 1 / math.sqrt(self.weight[0].numel())  # kaiming_uniform_(a=sqrt(5))
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound, generator=generator)
        nn.init.normal_(self.positions, 0.0, POSITION_STD, generator=generator)
        self._reset_sigma_()
        self.clamp_positions_()

    def _reset_sigma_(self) -> None:
        if self.sigma is not None:
            nn.init.constant_(
                self.sigma, cast(float, find_interpolation(self.interpolation).initial_sigma)
            )

    def kernel(self) -> Tensor:
        """The constructed kernel, (O, I, *dilated_kernel_size), differentiable in weight, positions and sigma."""
        return construct_kernel(
            self.form.effective_weight(self, self.weight),
            self.positions,
            self.dilated_kernel_size,
            interpolation=self.interpolation,
            sigma=self.sigma,
            dense_axes=self.dense_axes,
        )

    @torch.no_grad()
    def clamp_positions_(self) -> None:
        """Bring positions back into the window (paper, section 3 "Positions clamping"), sigma above its least."""
        limits = [position_limits(self.dilated_kernel_size[axis]) for axis in self.learnt_axes]
        _clamp_(self.positions, *zip(*limits, strict=True))
        if self.sigma is not None:
            _clamp_(
                self.sigma,
                [cast(float, find_interpolation(self.interpolation).min_sigma)],
                [math.inf],
            )

    def forward(self, input: Tensor) -> Tensor:
        """(N, in_channels, *spatial) -> (N, out_channels, *spatial): the convolution with `kernel()`."""
        if isinstance(input, fx.Proxy) and input.tracer.root is not self:
            # One call in a graph of torch.fx, also of tracers that were not told that the layer is a leaf.
            tracer = cast(fx.Tracer, input.tracer)
            output = tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {})
            return cast(Tensor, output)
        # An exported program changes no parameters. torch 2.8 reports is_exporting() under compile; exclude dynamo.
        exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        if self.training and not exporting:
            self.clamp_positions_()
        padding = self.padding
        if (
            self.padding_mode != "zeros" or padding == DYNAMIC_SAME or is_uneven(padding)
        ):  # the convolution cannot
            input, padding = self.padded(input), (0,) * self.dims
        return self.conv_function(
            input, self.kernel(), self.bias, self.stride, padding, self.dilation, self.groups
        )

    def padded(self, input: Tensor) -> Tensor:
        """The input with all its padding, so that a convolution without any gives the layer's output."""
        extents = list(map(extent, self.kernel_size, self.dilation))
        sides = padded_cells(self.padding, input.shape[-self.dims :], extents, self.stride)
        widths = [cells for axis in reversed(sides) for cells in axis]
        return F.pad(
            input, widths, mode="constant" if self.padding_mode == "zeros" else self.padding_mode
        )

    def state_dict(self, *args: Any, **settings: Any) -> Any:
        """As any module's, which is how models save their layers; the positions are clamped before."""
        if not self.positions.is_meta:
            self.clamp_positions_()
        return super().state_dict(*args, **settings)

    @classmethod
    def from_conv(
        cls,
        conv: Conv,
        *,
        kernel_count: int,
        dilated_kernel_size: IntOrTuple,
        interpolation: str = "bilinear",
        dense_axes: Sequence[int] = (),
    ) -> Self:
        """The DCLS layer in place of `conv`: same stride, groups, bias, padding mode, dtype, device, hooks, sizes.

        Its elements are the `kernel_count` cells of the old kernel with the largest weights, at their old places. With
        an element for every cell, bilinear interpolation gives the same layer. The bias is the same parameter.

        Raises:
            ValueError: Window and old kernel of different parity, or a window smaller than the kernel: the output
                size would change. Or a convolution that cannot be replaced without loss, with the reason.
        """
        if reason := why_not_replaceable(conv) or (
            None if isinstance(conv, cls.conv_class) else "other dimension"
        ):
            raise ValueError(f"{type(conv).__name__} cannot become a {cls.__name__}: {reason}")
        layer = cls.like(conv, kernel_count, dilated_kernel_size, interpolation, dense_axes)
        check_window(conv.kernel_size, conv.dilation, layer.dilated_kernel_size, layer.dense_axes)
        weight, positions = largest_elements(
            [conv.weight.detach()],
            effective=[layer.form.effective_weight(conv, conv.weight.detach())],
            kernel_count=kernel_count,
            dilation=conv.dilation,
            size=layer.dilated_kernel_size,
            dense_axes=layer.dense_axes,
        )
        with torch.no_grad():
            layer.weight.copy_(weight[0])
            layer.positions.copy_(positions)
        return layer

    @classmethod
    def like(
        cls,
        conv: Conv,
        kernel_count: int,
        dilated_kernel_size: IntOrTuple,
        interpolation: str,
        dense_axes: Sequence[int],
    ) -> Self:
        """As `from_conv`, for a window that fits; weights and positions are left uninitialised."""
        options: dict[str, Any] = {
            name: getattr(conv, name) for name in ("stride", "groups", "padding_mode")
        }
        options |= {
            "kernel_count": kernel_count,
            "dilated_kernel_size": dilated_kernel_size,
            "dense_axes": dense_axes,
        }
        options |= {"interpolation": interpolation, "bias": False, "dtype": conv.weight.dtype}
        layer = cls(
            conv.in_channels, conv.out_channels, **options, device="meta"
        )  # draws from no generator
        shapes = conv.kernel_size, conv.dilation, layer.dilated_kernel_size
        layer.padding = grown_padding(padding_of(conv), *shapes, conv.stride)
        layer.to_empty(device=conv.weight.device)
        layer._reset_sigma_()
        layer.bias = cast(nn.Parameter | None, conv.bias)
        layer.form = find_form(conv) or PLAIN
        for name in layer.form.parameters:
            layer.register_parameter(name, getattr(conv, name))
        _carry_over(conv, layer)
        if layer.form.adapt is not None:
            layer.form.adapt(conv, layer)
        return layer

    def fuse(self, kernel: Tensor | None = None) -> Conv:
        """The plain convolution with the constructed kernel, or a given one: same outputs, positions no longer learnt.

        `timm.utils.reparameterize_model` calls it. On the CPU, a plain depthwise convolution with a wide window is slow
        for contiguous maps; `model.to(memory_format=torch.channels_last)`, with images of that format, helps.
        """
        for hook in self._forward_pre_hooks.values():
            _compute_parameter_(self, hook)
        kernel = self.kernel().detach().contiguous() if kernel is None else kernel.detach()
        padding = self.padding
        if is_uneven(padding):
            # Zeros around the kernel instead: as many cells on both sides of the input give the same outputs.
            most = tuple(max(sides) for sides in padding)
            missing = [
                most[axis] - cells for axis in reversed(range(self.dims)) for cells in padding[axis]
            ]
            kernel, padding = F.pad(kernel, missing), most
        make: Callable[..., Conv] = self.conv_class
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("stride", "dilation", "groups")
        }
        if padding == DYNAMIC_SAME:
            from timm.layers.conv2d_same import Conv2dSame as make
        else:
            options |= {"padding": padding, "padding_mode": self.padding_mode}
        size = tuple(kernel.shape[2:])
        conv = make(
            self.in_channels, self.out_channels, size, **options, bias=False, device="meta"
        )  # as above
        conv.weight = nn.Parameter(kernel, requires_grad=self.weight.requires_grad)
        bias = self.bias
        if bias is not None and not isinstance(bias, nn.Parameter):  # pruned or parametrised
            bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        conv.bias = bias
        _carry_over(self, conv)
        return conv

    def extra_repr(self) -> str:
        shown = (
            "kernel_count",
            "dilated_kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
            "padding_mode",
        )
        usual = {
            "padding": (0,) * self.dims,
            "dilation": (1,) * self.dims,
            "groups": 1,
            "padding_mode": "zeros",
        }
        parts = [f"{self.in_channels}, {self.out_channels}"]
        parts += [
            f"{name}={getattr(self, name)!r}"
            for name in shown
            if getattr(self, name) != usual.get(name)
        ]
        parts += [f"dense_axes={self.dense_axes}"] * bool(self.dense_axes) + ["bias=False"] * (
            self.bias is None
        )
        return ", ".join(
            [*parts, f"interpolation={self.interpolation}"] + ["positions=tied"] * self.is_tied
        )


class DclsConv1d(DclsConvNd):
    __doc__ = DclsConvNd.__doc__
    dims, conv_class, conv_function = 1, nn.Conv1d, staticmethod(F.conv1d)


class DclsConv2d(DclsConvNd):
    __doc__ = DclsConvNd.__doc__
    dims, conv_class, conv_function = 2, nn.Conv2d, staticmethod(conv2d)


class DclsConv3d(DclsConvNd):
    __doc__ = DclsConvNd.__doc__
    dims, conv_class, conv_function = 3, nn.Conv3d, staticmethod(F.conv3d)


DCLS_LAYERS: dict[int, type[DclsConvNd]] = {1: DclsConv1d, 2: DclsConv2d, 3: DclsConv3d}


def _carry_over(old: nn.Module, new: nn.Module) -> None:
    """Give `new` the mode, trainability and hooks of `old`, and all attributes that users added."""
    new.train(old.training)
    for name, parameter in new.named_parameters(recurse=False):
        if parameter is not getattr(old, name, None):
            parameter.requires_grad_(bool(old.weight.requires_grad))
    computed = {hook for hook in old._forward_pre_hooks.values() if isinstance(hook, _COMPUTING)}
    known = (_OWN_ATTRIBUTES | vars(new).keys() | new._parameters.keys()) - _HOOK_REGISTRIES
    vars(new).update({name: value for name, value in vars(old).items() if name not in known})
    if computed:  # what they compute from is not there any more
        others = {key: hook for key, hook in old._forward_pre_hooks.items() if hook not in computed}
        new._forward_pre_hooks = OrderedDict(others)


def _compute_parameter_(layer: nn.Module, hook: Any) -> None:
    """Set the parameter that a hook of torch's computes before each forward pass, from what it is now."""
    if isinstance(hook, SpectralNorm):
        weight = hook.compute_weight(layer, do_power_iteration=False)
        setattr(layer, hook.name, weight)
    elif isinstance(hook, _COMPUTING):
        hook(layer, ())


def _clamp_(tensor: Tensor, low: Sequence[float], high: Sequence[float]) -> None:
    """Bring `tensor[i]` into [low[i], high[i]], in place; one limit alone is for all."""
    if torch.compiler.is_compiling():
        # By an operator that declares its change: inductor (torch 2.15) drops plain clamps of a parameter where the
        # model has several layers. On a flat view: inductor may lay out tensors of four axes anew, and clamp a copy.
        _clamp_in_graph(tensor.flatten(1), list(low), list(high))
    elif len(set(zip(low, high, strict=True))) == 1:
        tensor.clamp_(low[0], high[0])
    else:
        limits = [per_axis(side, tensor) for side in (low, high)]
        if hasattr(
            tensor, "device_mesh"
        ):  # FSDP2 may have spread its first axis over ranks; the limits are the same
            from torch.distributed.tensor import DTensor, Replicate

            mesh = tensor.device_mesh
            limits = [
                DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim, run_check=False)
                for one in limits
            ]
        tensor.copy_(tensor.maximum(limits[0]).minimum(limits[1]))


@torch.library.custom_op("dcls_convert::clamp_", mutates_args=("tensor",))
def _clamp_in_graph(tensor: Tensor, low: list[float], high: list[float]) -> None:
    _clamp_(tensor, low, high)


# Hooks that compute a parameter from others before each forward pass.
_COMPUTING = (BasePruningMethod, WeightNorm, SpectralNorm)
# Taken over are the dictionaries of hooks themselves: a handle that the user kept for `handle.remove()` points to them.
_HOOK_REGISTRIES = {name for name in vars(nn.Module()) if "ward_" in name and "hook" in name}
# Attributes that convolutions and DCLS layers have by their class; `_carry_over` leaves them out.
_OWN_ATTRIBUTES = frozenset(
    nn.Conv2d(1, 1, 1, device="meta").__dict__.keys()
    | DclsConv2d(1, 1, kernel_count=1, dilated_kernel_size=1, device="meta").__dict__.keys()
)
