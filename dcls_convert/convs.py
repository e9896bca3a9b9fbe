"""Which convolution objects can be replaced, and what must be carried over. Imports nothing of the package."""

from collections.abc import Collection

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

CONV_CLASSES: dict[int, type[_ConvNd]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

# The registries of a module's forward and backward hooks. The new layer takes the very dictionaries over: a handle
# that the user kept for `handle.remove()` points to them.
_HOOK_REGISTRIES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def why_not_replaceable(conv: nn.Module) -> str | None:
    """Why this object cannot be replaced, whatever the rules say; None where it can."""
    kind = type(conv).__name__
    if isinstance(conv, _ConvTransposeNd):
        return "transposed convolution"
    base = next((base for base in CONV_CLASSES.values() if isinstance(conv, base)), None)
    if base is None:
        return f"{kind} is no convolution of torch.nn"
    if "forward" in vars(conv):
        return f"{kind} has a forward of its own, set on this very object"
    if parametrize.is_parametrized(conv):
        return f"its {', '.join(conv.parametrizations)} is parametrised (torch.nn.utils.parametrize)"  # type: ignore[arg-type]
    if isinstance(conv.weight, nn.parameter.UninitializedParameter):
        return "lazy convolution that has not seen an input yet"
    if any(getattr(type(conv), name) is not getattr(base, name) for name in ("forward", "_conv_forward", "__call__")):
        return f"{kind} has a forward of its own that is not known here"
    if set(conv._parameters) != {"weight", "bias"}:
        return f"its weight is computed from other parameters ({', '.join(sorted(conv._parameters))})"
    if conv._modules or conv._buffers:
        return f"{kind} holds {', '.join([*conv._modules, *conv._buffers])}, which would be lost"
    return None


def carry_over(old: nn.Module, new: nn.Module, *, known: Collection[str]) -> None:
    """Give `new` the mode, trainability and hooks of `old`, and whatever else someone hung on it.

    Args:
        old, new: A convolution and the layer that takes its place, or the other way round.
        known: Names of the attributes with which the two describe themselves.
    """
    new.train(old.training)
    for name, parameter in new._parameters.items():
        if parameter is not None and name != "bias":  # the bias is the old one itself
            parameter.requires_grad_(bool(old.weight.requires_grad))
    for name in _HOOK_REGISTRIES:
        new.__dict__[name] = old.__dict__[name]
    more = {name: value for name, value in old.__dict__.items() if name not in known and name not in new.__dict__}
    new.__dict__.update(more)
