"""Decide whether a convolution can be replaced, and give the reason if it cannot."""

from typing import cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from .conv_classes import (
    CONV_CLASSES,
    Conv,
    ConvTraits,
    ConvTranspose,
    find_traits,
    zeros_around,
)


def why_not_replaceable(conv: nn.Module) -> str | None:
    """Return why this object cannot be replaced, whatever the rules say; None if it can be."""
    class_name = type(conv).__name__
    if isinstance(conv, ConvTranspose):
        return "transposed convolution"
    if not isinstance(conv, tuple(CONV_CLASSES.values())):
        return f"{class_name} is not a convolution of torch.nn"
    for method in ("forward", "_conv_forward"):
        if method in vars(conv):
            return f"{class_name} has a {method} of its own, set on this very object"
    if parametrize.is_parametrized(conv):
        names = ", ".join(conv.parametrizations)  # type: ignore[arg-type]
        return f"its {names} is parametrised (torch.nn.utils.parametrize)"
    if isinstance(conv.weight, nn.parameter.UninitializedParameter):
        return "lazy convolution that has not seen an input yet"
    reason = _why_weight_unusual(cast(Conv, conv).weight)
    if reason is not None:
        return reason
    members = {*dict(conv.named_children()), *dict(conv.named_buffers(recurse=False))}
    padding_modules = _padding_modules(conv)
    traits = find_traits(conv)
    if traits is None:
        reason = f"{class_name} has a forward of its own that is not known here"
        if members <= padding_modules:
            reason += " (register_conv teaches it)"
        return reason
    reason = _why_parameters_unknown(conv, traits)
    if reason is not None:
        return reason
    lost = members - (padding_modules & {traits.padding_module})
    if lost:
        names = ", ".join(sorted(lost))
        return f"{class_name} holds {names}, which would be lost; first remove what is not needed"
    if traits.padding_module is None:
        return None
    pads_itself = conv.padding_mode != "zeros" or conv.padding == "same"
    if traits.padding_module not in padding_modules or pads_itself:
        return f"{class_name} does not pad by {traits.padding_module} alone"
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


def _padding_modules(conv: nn.Module) -> set[str]:
    """Return the names of the submodules that add zeros around their input."""
    dims = len(cast(Conv, conv).kernel_size)
    names: set[str] = set()
    for name, module in conv.named_children():
        if zeros_around(module, dims) is not None:
            names.add(name)
    return names


def _why_parameters_unknown(conv: nn.Module, traits: ConvTraits) -> str | None:
    """Return a reason if the parameters are not weight, bias and those that the traits name."""
    parameters = set(dict(conv.named_parameters(recurse=False, remove_duplicate=False)))
    expected: set[str] = set()
    for name in ("weight", "bias", *traits.parameters):
        # None, such as `bias` with bias=False.
        is_none = hasattr(conv, name) and getattr(conv, name) is None
        if not is_none:
            expected.add(name)
    if parameters == expected:
        return None
    unknown = ", ".join(sorted(parameters - expected))
    missing = ", ".join(sorted(expected - parameters))
    if not missing:
        return f"it has parameters that are not known here ({unknown})"
    if not unknown:
        return f"it lacks the parameters {missing}"
    return f"it has the parameters {unknown} in place of {missing}"
