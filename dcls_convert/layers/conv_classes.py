"""Which convolutions can be replaced, what their forward does beside convolving, and what a replacement keeps."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..depthwise.geometry import DYNAMIC_SAME, Padding

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
AnyConv = Conv | ConvTranspose
ConstantPad = nn.ConstantPad1d | nn.ConstantPad2d | nn.ConstantPad3d

CONV_CLASSES: dict[int, type[Conv]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_CALLED = (
    "forward",
    "_conv_forward",
    "__call__",
)  # the methods that decide what a convolution computes


@dataclass(frozen=True, slots=True)
class ConvForm:
    """What the forward of a subclass of convolution does beside convolving; see `register_conv`."""

    weight: Callable[[nn.Module, Tensor], Tensor] | None = None
    parameters: tuple[str, ...] = ()
    same_padding: Callable[[nn.Module], bool] | bool = False
    padding_module: str | None = None
    adapt: Callable[[nn.Module, nn.Module], None] | None = None

    def effective_weight(self, conv: nn.Module, weight: Tensor) -> Tensor:
        """The kernel that is convolved where the parameter is `weight`."""
        return weight if self.weight is None else self.weight(conv, weight)


PLAIN = ConvForm()
_FORMS: dict[type[nn.Module], ConvForm] = {}


def register_conv(
    cls: type[nn.Module],
    *,
    weight: Callable[[nn.Module, Tensor], Tensor] | None = None,
    parameters: Collection[str] = (),
    same_padding: Callable[[nn.Module], bool] | bool = False,
    padding_module: str | None = None,
    adapt: Callable[[nn.Module, nn.Module], None] | None = None,
) -> None:
    """Say what the forward of a convolution class of your own does, so that its objects can be converted.

    A class without a `forward` of its own needs no registration: it is treated as its base. timm's `Conv2dSame`,
    `StdConv2d`, `StdConv2dSame`, `ScaledStdConv2d` and `ScaledStdConv2dSame` are known. Folding a converted layer gives
    a plain convolution with the transformed kernel.

    Args:
        cls: A subclass of `torch.nn.Conv1d`, `Conv2d` or `Conv3d`.
        weight: `weight(conv, tensor)` gives the kernel that is convolved for the parameter `tensor`, of the same shape
            (out, in/groups, ...). After conversion it is called with the DCLS layer and its elements, before the kernel
            is constructed. So it must not depend on the number of cells. The layer has the old convolution's
            attributes.
        parameters: Names of the parameters that `weight` needs beside weight and bias; the layer takes them over.
        same_padding: Whether `forward` pads its input by TensorFlow's SAME rule; or a function of the convolution. For
            2-D only.
        padding_module: Name of the submodule by which `forward` pads its input: an `nn.ZeroPad1d/2d/3d`, a constant
            padding of 0, or an `nn.Identity`. The layer pads the same cells by itself, and those that its window needs.
        adapt: `adapt(conv, layer)` sets attributes of the new layer that depend on the number of cells.

    Raises:
        TypeError: `cls` is no such subclass, or has the forward of its base.

    Example:
        A convolution that removes the mean of each filter::

            class CentredConv(nn.Conv2d):
                def forward(self, input):
                    return self._conv_forward(input, centred(self, self.weight), self.bias)

            def centred(conv, weight):
                return weight - weight.mean(dim=tuple(range(1, weight.dim())), keepdim=True)

            dcls_convert.register_conv(CentredConv, weight=centred)
    """
    base = next((base for base in CONV_CLASSES.values() if issubclass(cls, base)), None)
    if base is None:
        raise TypeError(f"{cls.__name__} is no subclass of torch.nn.Conv1d, Conv2d or Conv3d")
    if cls.forward is base.forward:
        raise TypeError(
            f"{cls.__name__} has the forward of {base.__name__}, and is treated as such already"
        )
    _FORMS[cls] = ConvForm(weight, tuple(parameters), same_padding, padding_module, adapt)


def find_form(conv: nn.Module) -> ConvForm | None:
    """What is known about the class of this convolution; None for a forward of its own that is not registered."""
    kind, forms = type(conv), [*((base, PLAIN) for base in CONV_CLASSES.values()), *_FORMS.items()]
    for known, form in reversed(forms):
        if issubclass(kind, known) and all(
            getattr(kind, name) is getattr(known, name) for name in _CALLED
        ):
            return form
    return None


def padding_of(conv: AnyConv) -> Padding:
    """All padding of a convolution that can be replaced: its own, and what its class adds in `forward`."""
    form = find_form(conv) or PLAIN
    if form.same_padding(conv) if callable(form.same_padding) else form.same_padding:
        return DYNAMIC_SAME
    if isinstance(conv.padding, str):
        return conv.padding
    if form.padding_module is None:
        return tuple(conv.padding)
    outside = _zeros_around(getattr(conv, form.padding_module), len(conv.padding)) or ()
    sides = tuple(
        (before + own, after + own)
        for (before, after), own in zip(outside, conv.padding, strict=True)
    )
    return (
        sides
        if any(before != after for before, after in sides)
        else tuple(before for before, _ in sides)
    )


def _zeros_around(module: nn.Module | None, dims: int) -> tuple[tuple[int, int], ...] | None:
    """The zeros that a padding module adds before and after each axis; None where it does something else."""
    if isinstance(module, nn.Identity):
        return ((0, 0),) * dims
    if not isinstance(module, ConstantPad) or module.value or len(module.padding) != 2 * dims:
        return None
    last_axis_first = list(zip(module.padding[::2], module.padding[1::2], strict=True))
    return tuple(last_axis_first[::-1])


def why_not_replaceable(conv: nn.Module) -> str | None:
    """Why this object cannot be replaced, whatever the rules say; None where it can."""
    kind = type(conv).__name__
    if isinstance(conv, ConvTranspose):
        return "transposed convolution"
    if not isinstance(conv, tuple(CONV_CLASSES.values())):
        return f"{kind} is no convolution of torch.nn"
    if "forward" in vars(conv):
        return f"{kind} has a forward of its own, set on this very object"
    if parametrize.is_parametrized(conv):
        return (
            f"its {', '.join(conv.parametrizations)} is parametrised (torch.nn.utils.parametrize)"  # type: ignore[arg-type]
        )
    if isinstance(conv.weight, nn.parameter.UninitializedParameter):
        return "lazy convolution that has not seen an input yet"
    form = find_form(conv)
    dims = len(cast(Conv, conv).kernel_size)
    held = {name for name, _ in [*conv.named_children(), *conv.named_buffers(recurse=False)]}
    paddings = {name for name, module in conv.named_children() if _zeros_around(module, dims)}
    if form is None:
        teachable = "" if held - paddings else " (register_conv teaches it)"
        return f"{kind} has a forward of its own that is not known here{teachable}"
    parameters = {name for name, _ in conv.named_parameters(recurse=False, remove_duplicate=False)}
    if parameters != {
        name
        for name in ("weight", "bias", *form.parameters)
        if getattr(conv, name, ...) is not None
    }:
        return f"its weight is computed from other parameters ({', '.join(sorted(parameters))})"
    if lost := held - (paddings & {form.padding_module}):
        return f"{kind} holds {', '.join(sorted(lost))}, which would be lost"
    if form.padding_module is not None and (
        not paddings or conv.padding_mode != "zeros" or conv.padding == "same"
    ):
        return f"{kind} does not pad by {form.padding_module} alone"
    return None


def register_timm_convs() -> None:
    from timm.layers.conv2d_same import Conv2dSame
    from timm.layers.std_conv import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame

    register_conv(Conv2dSame, same_padding=True)
    register_conv(StdConv2d, weight=standardised)
    # Their padding is done in the forward where it depends on the input's size.
    register_conv(StdConv2dSame, weight=standardised, same_padding=attrgetter("same_pad"))
    scaled: dict[str, Any] = {
        "weight": scaled_standardised,
        "parameters": ["gain"],
        "adapt": rescale_for_fan_in_,
    }
    register_conv(ScaledStdConv2d, **scaled)
    register_conv(ScaledStdConv2dSame, same_padding=attrgetter("same_pad"), **scaled)


def standardised(conv: Any, weight: Tensor) -> Tensor:
    """Filters (O, I, ...), each with mean 0 and variance 1; same shape. Weight standardisation, arXiv:1903.10520."""
    over = tuple(range(1, weight.dim()))
    variance, mean = torch.var_mean(weight, dim=over, correction=0, keepdim=True)
    return (weight - mean) * torch.rsqrt(variance + conv.eps)


def scaled_standardised(conv: Any, weight: Tensor) -> Tensor:
    """`standardised` times a learnt gain and 1/sqrt(fan-in). Scaled weight standardisation, arXiv:2101.08692."""
    gain = (conv.gain * conv.scale).reshape(-1, *[1] * (weight.dim() - 1))
    return cast(Tensor, standardised(conv, weight) * gain)


def rescale_for_fan_in_(conv: Any, layer: Any) -> None:
    """Adapt timm's factor 1/sqrt(fan-in): a kernel had its cells as fan-in, the layer has its elements."""
    layer.scale = conv.scale * math.sqrt(conv.weight[0].numel() / layer.weight[0].numel())
