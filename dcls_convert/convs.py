"""Which convolution objects can be replaced without losing anything of them. Imports nothing of the package."""

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

CONV_CLASSES: dict[int, type[_ConvNd]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def why_not_replaceable(conv: nn.Module) -> str | None:
    """Why this object cannot be replaced, whatever the rules say; None where it can."""
    kind = type(conv).__name__
    if isinstance(conv, _ConvTransposeNd):
        return "transposed convolution"
    base = next((base for base in CONV_CLASSES.values() if isinstance(conv, base)), None)
    if base is None:
        return f"{kind} is no convolution of torch.nn"
    if parametrize.is_parametrized(conv):
        return f"its {', '.join(conv.parametrizations)} is parametrised (torch.nn.utils.parametrize)"  # type: ignore[arg-type]
    if set(conv._parameters) != {"weight", "bias"}:
        return f"its weight is computed from other parameters ({', '.join(sorted(conv._parameters))})"
    if isinstance(conv.weight, nn.parameter.UninitializedParameter):
        return "lazy convolution that has not seen an input yet"
    if any(getattr(type(conv), name) is not getattr(base, name) for name in ("forward", "_conv_forward", "__call__")):
        return f"{kind} has a forward of its own that is not known here"
    if conv._modules or conv._buffers:
        return f"{kind} holds {', '.join([*conv._modules, *conv._buffers])}, which would be lost"
    return None
