"""Convolution classes: what each does besides convolving, and why an object cannot be replaced."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..geometry import DYNAMIC_SAME, Padding
from .conv_settings import ConvSettings, own_settings, why_contradictory
from .own_forward import padding_seen

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
AnyConv = Conv | ConvTranspose

CONV_CLASSES: dict[int, type[Conv]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
# Returns the methods that decide what a convolution of a class computes.
_computing_methods = attrgetter("forward", "_conv_forward", "__call__")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvTraits:
    """What the forward of a convolution class does besides convolving: see `register_conv`."""

    transform_weight: Callable[[nn.Module, Tensor], Tensor] | None = None
    parameters: tuple[str, ...] = ()
    same_padding: Callable[[nn.Module], bool] | bool = False
    adapt: Callable[[nn.Module, nn.Module], None] | None = None
    # All padding, as seen in a run of forward (`own_forward.py`). None for registered classes, and
    # for classes that have the forward of their base.
    padding: Padding | None = None

    def effective_weight(self, conv: nn.Module, weight: Tensor) -> Tensor:
        """Return the kernel that the convolution uses if its parameter is `weight`."""
        if self.transform_weight is None:
            return weight
        return self.transform_weight(conv, weight)


PLAIN = ConvTraits()
_KNOWN_CLASSES: dict[type[nn.Module], ConvTraits] = dict.fromkeys(CONV_CLASSES.values(), PLAIN)


def register_conv(
    cls: type[nn.Module],
    *,
    weight: Callable[[nn.Module, Tensor], Tensor] | None = None,
    parameters: Collection[str] = (),
    same_padding: Callable[[nn.Module], bool] | bool = False,
    adapt: Callable[[nn.Module, nn.Module], None] | None = None,
) -> None:
    """Declare what the forward of your own convolution class does, so that it can be converted.

    A class without a `forward` of its own needs no registration: it is treated as its base. A class
    whose `forward` only pads with zeros, and then convolves as its base does, needs none either.
    timm's `Conv2dSame`, `StdConv2d`, `StdConv2dSame`, `ScaledStdConv2d` and `ScaledStdConv2dSame`
    are known. Folding a converted layer gives a plain convolution with the transformed kernel.

    Args:
        cls: A subclass of `torch.nn.Conv1d`, `Conv2d` or `Conv3d`.
        weight: `weight(conv, tensor)` returns the kernel that the convolution uses if its parameter
            is `tensor`, in the same shape (out, in/groups, ...). After conversion it is called with
            the DCLS layer and its elements, before the kernel is constructed. So it must not
            depend on the number of cells. The layer has the old convolution's attributes.
        parameters: Names of further parameters that `weight` needs; the layer takes them over.
        same_padding: Whether `forward` pads its input by TensorFlow's SAME rule, or a function that
            returns this for a convolution. For 2-D only.
        adapt: `adapt(conv, layer)` sets attributes of the new layer that depend on the number of
            cells.

    Raises:
        TypeError: `cls` is not a subclass of these classes.

    Example:
        A convolution that removes the mean of each filter::

            class CentredConv(nn.Conv2d):
                def forward(self, input):
                    return self._conv_forward(input, centred(self, self.weight), self.bias)

            def centred(conv, weight):
                return weight - weight.mean(dim=tuple(range(1, weight.dim())), keepdim=True)

            dcls_convert.register_conv(CentredConv, weight=centred)
    """
    if not issubclass(cls, tuple(CONV_CLASSES.values())):
        raise TypeError(f"{cls.__name__} is not a subclass of torch.nn.Conv1d, Conv2d or Conv3d")
    _KNOWN_CLASSES[cls] = ConvTraits(
        transform_weight=weight,
        parameters=tuple(parameters),
        same_padding=same_padding,
        adapt=adapt,
    )


def find_traits(conv: nn.Module) -> ConvTraits | None:
    """Return what the convolution's class does; None if that is not known."""
    for cls in type(conv).__mro__:
        traits = _KNOWN_CLASSES.get(cls)
        if traits is not None and _computing_methods(type(conv)) == _computing_methods(cls):
            return traits
    padding = None
    if type(conv).__call__ is nn.Module.__call__:
        padding = padding_seen(conv)
    return None if padding is None else ConvTraits(padding=padding)


def settings_of(conv: AnyConv) -> ConvSettings:
    """Return the settings of a convolution, with all padding that `forward` adds.

    `why_not_replaceable` must have accepted the convolution.
    """
    traits = find_traits(conv)
    assert traits is not None
    settings = own_settings(conv, traits)
    if traits.padding is not None:
        return replace(settings, padding=traits.padding)
    same_padding = traits.same_padding
    if callable(same_padding):
        same_padding = same_padding(conv)
    return replace(settings, padding=DYNAMIC_SAME) if same_padding else settings


def has_own_forward(module: nn.Module, method: str = "forward") -> bool:
    """True if a method other than the class's was set on the object itself.

    accelerate sets the class's own method on the object, which does not count.
    """
    found = vars(module).get(method)
    function = getattr(found, "__func__", found)
    return found is not None and function is not getattr(type(module), method)


def why_not_replaceable(conv: nn.Module) -> str | None:
    """Return why this object cannot be replaced, whatever the rules say; None if it can be."""
    class_name = type(conv).__name__
    if isinstance(conv, ConvTranspose):
        return "transposed convolution"
    if not isinstance(conv, tuple(CONV_CLASSES.values())):
        return f"{class_name} is not a convolution of torch.nn"
    for method in ("forward", "_conv_forward"):
        if has_own_forward(conv, method):
            return f"{class_name} has a {method} of its own, set on this very object"
    if parametrize.is_parametrized(conv):
        names = ", ".join(conv.parametrizations)  # type: ignore[arg-type]
        return (
            f"its {names} is parametrised (torch.nn.utils.parametrize); first call "
            "remove_parametrizations"
        )
    if isinstance(conv.weight, nn.parameter.UninitializedParameter):
        return "lazy convolution that has not seen an input yet"
    reason = _why_weight_unusual(cast(Conv, conv).weight)
    if reason is not None:
        return reason
    reason = why_contradictory(conv)
    if reason is not None:
        return reason
    traits = find_traits(conv)
    if traits is None:
        reason = _why_parameters_unknown(conv, PLAIN)
        if reason is not None:
            return reason
        return (
            f"{class_name} has a forward of its own that is not known here "
            "(declare it with dcls_convert.register_conv)"
        )
    reason = _why_parameters_unknown(conv, traits)
    if reason is not None:
        return reason
    members = {*dict(conv.named_children()), *dict(conv.named_buffers(recurse=False))}
    # If the padding was seen in a run (`traits.padding`), the modules inside were part of the run.
    if members and traits.padding is None:
        names = ", ".join(sorted(members))
        return f"{class_name} holds {names}, which would be lost; first remove what is not needed"
    return None


def _why_weight_unusual(weight: Tensor) -> str | None:
    """Return a reason if the weight is not a plain tensor of floating-point numbers."""
    if type(weight) not in (nn.Parameter, Tensor):
        return (
            f"its weight is a {type(weight).__name__}, not a plain tensor; "
            "convert before the weights are quantised or sharded"
        )
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"its weight is of {weight.dtype}; give it 16-bit floats or longer ones first"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "its weight has hooks, which would be lost; convert first, then register them"
    return None


def _why_parameters_unknown(conv: nn.Module, traits: ConvTraits) -> str | None:
    """Return a reason if parameters are unexpected or missing.

    Expected are weight, bias, and the parameters that the traits name.
    """
    parameters = set(dict(conv.named_parameters(recurse=False, remove_duplicate=False)))
    expected: set[str] = set()
    for name in ("weight", "bias", *traits.parameters):
        # None, such as `bias` with bias=False.
        is_none = hasattr(conv, name) and getattr(conv, name) is None
        if not is_none:
            expected.add(name)
    if parameters == expected:
        return None
    if {"weight_g", "weight_v"} <= parameters:
        return "its weight is computed by weight norm; first call torch.nn.utils.remove_weight_norm"
    parts: list[str] = []
    for problem, names in (
        ("unexpected", parameters - expected),
        ("missing", expected - parameters),
    ):
        if names:
            parts.append(f"{problem} {', '.join(sorted(names))}")
    return f"its parameters are not those expected: {'; '.join(parts)}"


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
