"""The convolution classes that can be replaced, and what each does besides convolving."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError
from ..geometry import DYNAMIC_SAME, Padding
from ..text import one_line

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
AnyConv = Conv | ConvTranspose
ConstantPad = nn.ConstantPad1d | nn.ConstantPad2d | nn.ConstantPad3d

CONV_CLASSES: dict[int, type[Conv]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
# Returns the methods that decide what a convolution of a class computes.
_computing_methods = attrgetter("forward", "_conv_forward", "__call__")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvTraits:
    """What the forward of a convolution class does besides convolving.

    The fields are the arguments of `register_conv`, which explains them; `transform_weight` is
    called `weight` there, and `methods` is not an argument.
    """

    transform_weight: Callable[[nn.Module, Tensor], Tensor] | None = None
    parameters: tuple[str, ...] = ()
    same_padding: Callable[[nn.Module], bool] | bool = False
    padding_module: str | None = None
    adapt: Callable[[nn.Module, nn.Module], None] | None = None
    methods: tuple[Any, ...] = ()  # the class's `_computing_methods` when it was registered

    def effective_weight(self, conv: nn.Module, weight: Tensor) -> Tensor:
        """Return the kernel that the convolution uses if its parameter is `weight`."""
        if self.transform_weight is None:
            return weight
        return self.transform_weight(conv, weight)


PLAIN = ConvTraits()
_REGISTERED_TRAITS: dict[type[nn.Module], ConvTraits] = {}


def register_conv(
    cls: type[nn.Module],
    *,
    weight: Callable[[nn.Module, Tensor], Tensor] | None = None,
    parameters: Collection[str] = (),
    same_padding: Callable[[nn.Module], bool] | bool = False,
    padding_module: str | None = None,
    adapt: Callable[[nn.Module, nn.Module], None] | None = None,
) -> None:
    """Declare what the forward of your own convolution class does, so that it can be converted.

    A class without a `forward` of its own needs no registration: it is treated as its base. timm's
    `Conv2dSame`, `StdConv2d`, `StdConv2dSame`, `ScaledStdConv2d` and `ScaledStdConv2dSame` are
    known. Folding a converted layer gives a plain convolution with the transformed kernel.

    Args:
        cls: A subclass of `torch.nn.Conv1d`, `Conv2d` or `Conv3d`.
        weight: `weight(conv, tensor)` returns the kernel that the convolution uses if its parameter
            is `tensor`, in the same shape (out, in/groups, ...). After conversion it is called with
            the DCLS layer and its elements, before the kernel is constructed. So it must not
            depend on the number of cells. The layer has the old convolution's attributes.
        parameters: Names of the parameters that `weight` needs besides weight and bias. The layer
            takes them over.
        same_padding: Whether `forward` pads its input by TensorFlow's SAME rule, or a function that
            returns this for a convolution. For 2-D only.
        padding_module: Name of the submodule with which `forward` pads its input: an
            `nn.ZeroPad1d/2d/3d`, a constant padding of 0, or an `nn.Identity`. The layer itself
            adds the same padding, and what its window needs in addition.
        adapt: `adapt(conv, layer)` sets attributes of the new layer that depend on the number of
            cells.

    Raises:
        TypeError: `cls` is not such a subclass, or has the forward of its base.

    Example:
        A convolution that removes the mean of each filter::

            class CentredConv(nn.Conv2d):
                def forward(self, input):
                    return self._conv_forward(input, centred(self, self.weight), self.bias)

            def centred(conv, weight):
                return weight - weight.mean(dim=tuple(range(1, weight.dim())), keepdim=True)

            dcls_convert.register_conv(CentredConv, weight=centred)
    """
    base: type[Conv] | None = None
    for conv_class in CONV_CLASSES.values():
        if issubclass(cls, conv_class):
            base = conv_class
    if base is None:
        raise TypeError(f"{cls.__name__} is not a subclass of torch.nn.Conv1d, Conv2d or Conv3d")
    if cls.forward is base.forward:
        raise TypeError(
            f"{cls.__name__} has the forward of {base.__name__}, and is treated as such already"
        )
    _REGISTERED_TRAITS[cls] = ConvTraits(
        transform_weight=weight,
        parameters=tuple(parameters),
        same_padding=same_padding,
        padding_module=padding_module,
        adapt=adapt,
        methods=_computing_methods(cls),
    )


def find_traits(conv: nn.Module) -> ConvTraits | None:
    """Return what the convolution's class does; None if that is not known."""
    if find_replaced_method(conv) is not None:
        return None
    plain_traits = [(base, PLAIN) for base in CONV_CLASSES.values()]
    all_traits: list[tuple[type[nn.Module], ConvTraits]] = [
        *plain_traits,
        *_REGISTERED_TRAITS.items(),
    ]
    for known_class, traits in reversed(all_traits):  # the last one registered wins
        if isinstance(conv, known_class):
            methods = traits.methods or _computing_methods(known_class)
            if _computing_methods(type(conv)) == methods:
                return traits
    return None


def find_replaced_method(conv: nn.Module) -> str | None:
    """Return the name of a method of torch's class that other code replaced in it; or None."""
    for base in CONV_CLASSES.values():
        if not isinstance(conv, base):
            continue
        for name in ("forward", "_conv_forward"):
            if not _is_of_torch(getattr(base, name)):
                return f"torch.nn.{base.__name__}.{name}"
        if base.__call__ is not nn.Module.__call__:
            return f"torch.nn.{base.__name__}.__call__"
    return None


def make_conv(conv_class: Callable[..., Conv], *args: Any, **kwargs: Any) -> Conv:
    """Make a convolution of torch's or timm's class.

    Raises:
        DclsConvertError: Other code replaced the constructor of torch's class by one that does not
            take these arguments.
    """
    try:
        return conv_class(*args, **kwargs)
    except TypeError as error:
        for base in CONV_CLASSES.values():
            if not _is_of_torch(base.__init__):
                raise DclsConvertError(
                    f"other code replaced torch.nn.{base.__name__}.__init__, and it does not take "
                    f"torch's arguments: {one_line(error)}"
                ) from error
        raise


def _is_of_torch(method: object) -> bool:
    """True if a method is a function of torch's module of convolutions, and no replacement."""
    # Not a comparison with a function kept at import: it may have been replaced before.
    return getattr(method, "__globals__", None) is vars(nn.modules.conv)


def traits_of(conv: nn.Module) -> ConvTraits:
    """Return what the convolution's class does; `why_not_replaceable` must have accepted it."""
    traits = find_traits(conv)
    assert traits is not None
    return traits


def padding_of(conv: AnyConv) -> Padding:
    """Return the whole padding of a replaceable convolution: its own and what `forward` adds."""
    traits = traits_of(conv)
    same_padding = traits.same_padding
    if callable(same_padding):
        same_padding = same_padding(conv)
    if same_padding:
        return DYNAMIC_SAME
    if isinstance(conv.padding, str):
        return conv.padding
    if traits.padding_module is None:
        return tuple(map(int, conv.padding))
    outside = zeros_around(getattr(conv, traits.padding_module), len(conv.padding))
    assert outside is not None
    sides: list[tuple[int, int]] = []  # cells before and after each axis
    for (before, after), own in zip(outside, conv.padding, strict=True):
        sides.append((int(before + own), int(after + own)))
    if any(before != after for before, after in sides):
        return tuple(sides)
    return tuple(before for before, _ in sides)


def zeros_around(module: nn.Module | None, dims: int) -> tuple[tuple[int, int], ...] | None:
    """Return how many zeros a padding module adds before and after each axis.

    None if it does anything else.
    """
    if isinstance(module, nn.Identity):
        return tuple((0, 0) for _ in range(dims))
    if not isinstance(module, ConstantPad) or module.value or len(module.padding) != 2 * dims:
        return None
    last_axis_first = list(zip(module.padding[::2], module.padding[1::2], strict=True))
    return tuple(last_axis_first[::-1])


def register_timm_convs() -> None:
    """Register timm's convolution classes, all of which have a forward of their own."""
    from timm.layers.conv2d_same import Conv2dSame
    from timm.layers.std_conv import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame

    register_conv(Conv2dSame, same_padding=True)
    register_conv(StdConv2d, weight=standardised)
    # timm sets `same_pad` if `forward` pads, because the padding depends on the input size.
    register_conv(StdConv2dSame, weight=standardised, same_padding=attrgetter("same_pad"))
    register_conv(
        ScaledStdConv2d,
        weight=scaled_standardised,
        parameters=["gain"],
        adapt=rescale_for_fan_in_,
    )
    register_conv(
        ScaledStdConv2dSame,
        weight=scaled_standardised,
        parameters=["gain"],
        same_padding=attrgetter("same_pad"),
        adapt=rescale_for_fan_in_,
    )


def standardised(conv: Any, weight: Tensor) -> Tensor:
    """Scale filters (O, I, ...) to mean 0 and variance 1 each; same shape.

    Weight standardisation, arXiv:1903.10520.
    """
    filter_axes = tuple(range(1, weight.dim()))
    variance, mean = torch.var_mean(weight, dim=filter_axes, correction=0, keepdim=True)
    return (weight - mean) * torch.rsqrt(variance + conv.eps)


def scaled_standardised(conv: Any, weight: Tensor) -> Tensor:
    """Return `standardised` filters times a learnt gain and 1/sqrt(fan-in); same shape.

    Scaled weight standardisation, arXiv:2101.08692.
    """
    gain = (conv.gain * conv.scale).reshape(-1, *[1] * (weight.dim() - 1))
    return cast(Tensor, standardised(conv, weight) * gain)


def rescale_for_fan_in_(conv: Any, layer: Any) -> None:
    """Adapt timm's factor 1/sqrt(fan-in) to a layer, whose fan-in counts elements, not cells."""
    layer.scale = conv.scale * math.sqrt(conv.weight[0].numel() / layer.weight[0].numel())
