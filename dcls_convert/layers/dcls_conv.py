"""The DCLS layers: convolutions whose kernels are constructed from a few weighted elements.

The positions of the elements are learnt. Layers are made from convolutions, and become
convolutions again.

Axes: N batch, O output channels, I input channels per group, E kernel elements, A learnt axes.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..geometry import (
    DYNAMIC_SAME,
    Grow,
    check_window,
    extent,
    grown_padding,
    is_uneven,
    static_padding,
)
from .conv_classes import Conv, ConvTraits, find_traits, settings_of, why_not_replaceable
from .conv_settings import ConvSettings
from .dcls_layer import DclsLayer, IntOrTuple
from .elements import largest_elements
from .padded_conv import padded_conv

# Hooks that compute a parameter from others before each forward pass.
_COMPUTING_HOOKS = (BasePruningMethod, WeightNorm, SpectralNorm)
# Attributes in which a module keeps its forward and backward hooks, and the kind of its backward
# hooks. State dict hooks are not among them. A new module takes over the dictionaries themselves,
# because the handles that users keep for `handle.remove()` refer to them.
_HOOK_REGISTRIES = {"_is_full_backward_hook"}
_HOOK_REGISTRIES |= {
    name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_"))
}


@functools.cache
def _standard_attributes() -> frozenset[str]:
    """Return the standard attributes of convolutions and DCLS layers; users added all others.

    Layers of 1 and 3 dimensions have the same standard attributes.
    """
    conv = nn.Conv2d(1, 1, 1, device="meta")
    layer = DclsConv2d(1, 1, kernel_count=1, dilated_kernel_size=1, device="meta")
    return frozenset(vars(conv).keys() | vars(layer).keys())


class DclsConvNd(DclsLayer):
    """A convolution whose kernel is constructed from weighted elements at learnt positions.

    Parameters of a layer: `weight` (O, I, E), `positions` (A, O, I, E) in cells from the kernel
    centre, `sigma` (shaped like positions; only if the interpolation has one) and `bias` (O). A
    dense axis of D cells comes before E: (O, I, D, E).

    Args:
        in_channels, out_channels, stride, padding, dilation, groups, bias, padding_mode, device,
            dtype: As in `torch.nn.Conv2d`; `dilation` spaces the cells of the dilated kernel itself
            and is 1 in practice. `padding="dynamic_same"` is TensorFlow's SAME padding, which
            depends on the input's size (2-D only).
        grow: "back" if the window lies before the output's own cell, as in a causal network;
            "ahead" if it lies behind that cell. The layer then adds the window's cells to
            `padding`. With "both", the input gets only `padding`, as in `torch.nn.Conv2d`. One
            value for all axes, or one for each.
        kernel_count: Weighted elements in one kernel (with dense axes, in each of their cells).
        dilated_kernel_size: Window in which elements may move, in cells.
        interpolation: How an element spreads over the cells: one of `options.INTERPOLATION_NAMES`.
        dense_axes: Spatial axes along which nothing is learnt: all their cells are weighted, as in
            an ordinary kernel.

    Raises:
        ValueError: An argument is not allowed. All are checked here, not at the first forward.

    Source: arXiv:2112.03740. Positions are initialised from N(0, 0.5 cells), weights as in
    `torch.nn.Conv2d`.
    """

    @classmethod
    def from_conv(
        cls,
        conv: Conv,
        *,
        kernel_count: int,
        dilated_kernel_size: IntOrTuple,
        interpolation: str = "bilinear",
        dense_axes: Sequence[int] = (),
        grow: Grow | Sequence[Grow] = "both",
    ) -> Self:
        """Make the DCLS layer that replaces `conv`.

        The layer has the same stride, groups, bias, padding mode, dtype, device, hooks and output
        size. If the window grows "back" or "ahead" along an axis, all its new cells lie before or
        behind the old kernel, and the layer adds them to the padding of `conv`. Its attributes
        `padding` and `kernel_size` (for a dilated kernel, the extent) then stay as in `conv`,
        because code outside may pad or cut the map by them.
        The elements are the `kernel_count` cells of the old kernel with the largest weights, at
        their old positions. With an element for every cell, a layer with bilinear interpolation
        computes the same function. The bias is the same parameter.

        Raises:
            ValueError: The window does not fit the old kernel: it is smaller, or it grows to both
                sides and one is odd and the other even, which would change the output. Or the
                convolution cannot be replaced without loss. The message gives the reason.
        """
        reason = why_not_replaceable(conv)
        if reason is None and not isinstance(conv, cls.conv_class):
            reason = "other dimension"
        if reason is not None:
            raise ValueError(f"{type(conv).__name__} cannot become a {cls.__name__}: {reason}")
        layer = cls.from_conv_without_values(
            conv, kernel_count, dilated_kernel_size, interpolation, dense_axes, grow
        )
        kernel = conv.weight.detach()
        weights, positions = largest_elements(
            [kernel],
            effective=[layer.traits.effective_weight(conv, kernel)],
            kernel_count=kernel_count,
            dilation=settings_of(conv).dilation,
            size=layer.dilated_kernel_size,
            dense_axes=layer.dense_axes,
            grow=layer.grow,
        )
        with torch.no_grad():
            layer.weight.copy_(weights[0])
            layer.positions.copy_(positions)
        return layer

    @classmethod
    @torch.inference_mode(False)  # tensors made in that mode cannot be trained
    def from_conv_without_values(
        cls,
        conv: Conv,
        kernel_count: int,
        dilated_kernel_size: IntOrTuple,
        interpolation: str,
        dense_axes: Sequence[int],
        grow: Grow | Sequence[Grow] = "both",
    ) -> Self:
        """Make the layer that replaces `conv`, with uninitialised weights and positions.

        Sigma has its initial value. See `from_conv` for what the layer keeps of `conv`, and for
        errors.
        """
        layer = cls.on_meta(
            settings_of(conv),
            kernel_count,
            dilated_kernel_size,
            interpolation,
            dense_axes,
            grow,
            dtype=conv.weight.dtype,
        )
        layer.traits = cast(ConvTraits, find_traits(conv))
        layer.to_empty(device=conv.weight.device)
        layer._reset_sigma_()
        layer.bias = cast(nn.Parameter | None, conv.bias)
        for name in layer.traits.parameters:
            layer.register_parameter(name, getattr(conv, name))
        _carry_over_(conv, layer, exclude=_standard_attributes())
        if layer.traits.adapt is not None:
            layer.traits.adapt(conv, layer)
        return layer

    @classmethod
    def on_meta(
        cls,
        settings: ConvSettings,
        kernel_count: int,
        dilated_kernel_size: IntOrTuple,
        interpolation: str,
        dense_axes: Sequence[int],
        grow: Grow | Sequence[Grow] = "both",
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Make the layer for a convolution with these settings, on meta, without bias."""
        layer = cls(
            settings.in_channels,
            settings.out_channels,
            kernel_count=kernel_count,
            dilated_kernel_size=dilated_kernel_size,
            stride=settings.stride,
            grow=grow,
            groups=settings.groups,
            bias=False,
            padding_mode=settings.padding_mode,
            interpolation=interpolation,
            dense_axes=dense_axes,
            device="meta",  # so that initialisation draws no random numbers
            dtype=dtype,
        )
        window = layer.dilated_kernel_size
        check_window(settings.kernel_size, settings.dilation, window, layer.dense_axes, layer.grow)
        layer.padding = grown_padding(
            settings.padding,
            settings.kernel_size,
            settings.dilation,
            window,
            settings.stride,
            layer.grow,
        )
        if layer.grow:
            layer.kernel_size = settings.extents
        return layer

    def fuse(self) -> Conv:
        """Make the plain convolution with the constructed kernel.

        The convolution gives the same outputs, but positions are no longer learnt.
        `timm.utils.reparameterize_model` calls this method. On the CPU, a plain depthwise
        convolution with a wide window is slow for contiguous maps. There,
        `model.to(memory_format=torch.channels_last)` helps, with images in the same format.
        If the window grows to one side, the result is a subclass of the plain convolution, which
        pads by itself (`padded_conv.py`).
        """
        # Pruning, weight norm and spectral norm recompute the weight in forward pre-hooks. Run them
        # now, or the kernel would be constructed from a stale weight.
        for hook in self._forward_pre_hooks.values():
            _compute_parameter_(self, hook)
        return self._plain_conv(self.kernel().contiguous().detach())

    def plain_conv_without_values(self) -> Conv:
        """Make the convolution that `fuse` returns, but with an uninitialised kernel."""
        shape = (*self.weight.shape[:2], *self.dilated_kernel_size)
        return self._plain_conv(self.weight.new_empty(shape))

    def _plain_conv(self, kernel: Tensor) -> Conv:
        """Make the plain convolution with this kernel, and with everything else of the layer."""
        make: Callable[..., Conv] = functools.partial(
            self.conv_class, padding=self.padding, padding_mode=self.padding_mode
        )
        if self.padding == DYNAMIC_SAME:
            from timm.layers.conv2d_same import Conv2dSame

            make = Conv2dSame  # pads by itself, with zeros
        elif self.grow or is_uneven(self.padding):
            extents = list(map(extent, self.kernel_size, self.on_every_axis(self.dilation)))
            make = functools.partial(
                padded_conv,
                self.conv_class,
                padding=static_padding(self.padding, extents),
                new=self.new_cells,
                padding_mode=self.padding_mode,
            )
        conv = make(
            self.in_channels,
            self.out_channels,
            self.dilated_kernel_size,
            stride=self.stride,
            dilation=self.dilation,
            groups=self.groups,
            bias=False,
            device="meta",  # so that initialisation draws no random numbers
        )
        if self.grow:  # code outside may pad by these, as it did for the old convolution
            conv.kernel_size = self.kernel_size
            conv.padding = self.padding  # type: ignore[assignment]
        conv.weight = nn.Parameter(kernel, requires_grad=self.weight.requires_grad)
        old_bias: Tensor | None = self.bias
        bias = old_bias
        if bias is not None and not isinstance(bias, nn.Parameter):  # pruned or parametrised
            bias = nn.Parameter(bias.detach())
        conv.bias = bias
        _carry_over_(self, conv, exclude=_standard_attributes())
        if bias is not None and old_bias is not None:
            # `_carry_over_` has given a new bias the weight's `requires_grad`.
            bias.requires_grad_(old_bias.requires_grad)
        return conv


class DclsConv1d(DclsConvNd):
    __doc__ = DclsConvNd.__doc__
    dims = 1
    conv_class = nn.Conv1d
    conv_function = staticmethod(F.conv1d)


class DclsConv2d(DclsConvNd):
    __doc__ = DclsConvNd.__doc__
    dims = 2
    conv_class = nn.Conv2d
    conv_function = staticmethod(F.conv2d)


class DclsConv3d(DclsConvNd):
    __doc__ = DclsConvNd.__doc__
    dims = 3
    conv_class = nn.Conv3d
    conv_function = staticmethod(F.conv3d)


DCLS_LAYERS: dict[int, type[DclsConvNd]] = {1: DclsConv1d, 2: DclsConv2d, 3: DclsConv3d}


def _carry_over_(old: nn.Module, new: nn.Module, *, exclude: Collection[str]) -> None:
    """Give `new` the mode, trainability and hooks of `old`, and all attributes that users added.

    Users added all attributes except `exclude`, the standard attributes.
    """
    new.train(old.training)
    for name, parameter in new.named_parameters(recurse=False):
        if parameter is not getattr(old, name, None):
            parameter.requires_grad_(bool(old.weight.requires_grad))
    weight = new.weight
    if type(old.weight) is type(weight) is nn.Parameter:
        vars(weight).update(vars(old.weight))  # attributes of users, such as a rate
    own_names = {*exclude, *vars(new), *new._parameters} - _HOOK_REGISTRIES
    for name, value in vars(old).items():
        # Leave out names that the new class has: an attribute would hide its method or property.
        if name not in own_names and not hasattr(type(new), name):
            vars(new)[name] = value
    # Leave out hooks that compute a parameter: `new` lacks the tensors that they compute it from.
    other_hooks: OrderedDict[int, Any] = OrderedDict()
    for key, hook in old._forward_pre_hooks.items():
        if not isinstance(hook, _COMPUTING_HOOKS):
            other_hooks[key] = hook
    if len(other_hooks) < len(old._forward_pre_hooks):
        new._forward_pre_hooks = other_hooks


def _compute_parameter_(layer: nn.Module, hook: Any) -> None:
    """Run a hook now if it is pruning, weight norm or spectral norm, which compute a parameter."""
    if isinstance(hook, SpectralNorm):
        weight = hook.compute_weight(layer, do_power_iteration=False)
        setattr(layer, hook.name, weight)
    elif isinstance(hook, _COMPUTING_HOOKS):
        hook(layer, ())
