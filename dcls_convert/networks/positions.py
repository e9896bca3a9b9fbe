"""The positions and sigmas of a model, found through the layers that use them: names alone do not tell."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from ..layers.dcls_conv import DclsConvNd
from ..layers.ties import POSITION_PARAMETERS

# Where DDP and DataParallel, EMA copies, `torch.compile` and FSDP1 keep the model that they wrap.
WRAPPED_AT = ("module", "_orig_mod", "_fsdp_wrapped_module")
HOOK = "no_weight_decay"  # the method that timm asks for the names of parameters


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionParameter:
    """One positions or sigma tensor of a model, used by a tie group or by one layer."""

    name: str  # in `named_parameters`; below its first layer where the tensor is registered outside the model
    kind: str  # "positions" or "sigma"
    tensor: Tensor  # (A, *C, E); the parameter itself
    layers: dict[str, DclsConvNd]  # by name, in the model's order

    @property
    def learnt_size(self) -> tuple[int, ...]:
        """Cells of the window along the learnt axes."""
        first = next(iter(self.layers.values()))
        return tuple(first.dilated_kernel_size[axis] for axis in first.learnt_axes)


def position_parameters(model: nn.Module, *kinds: str) -> tuple[PositionParameter, ...]:
    """Every positions and sigma tensor of the model once, or those of some kinds alone, in the order of the layers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, PositionParameter] = {}
    for layer_name, layer in model.named_modules():
        for kind in (kinds or POSITION_PARAMETERS) if isinstance(layer, DclsConvNd) else ():
            if (tensor := getattr(layer, kind)) is not None:
                name = names.get(id(tensor), f"{layer_name}.{kind}".lstrip("."))
                one = PositionParameter(name=name, kind=kind, tensor=tensor, layers={})
                found.setdefault(id(tensor), one).layers[layer_name] = layer
    return tuple(found.values())


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that only call it: DDP, `torch.compile`, EMA copies, FSDP1."""
    while len(inside := list(model.named_children())) == 1 and not list(
        model.parameters(recurse=False)
    ):
        ((name, inner),) = inside
        if name not in WRAPPED_AT:
            break
        model = inner
    return model


def whole(tensor: Tensor) -> Tensor:
    """A parameter, gathered where FSDP2 spreads it over ranks; differentiable. All ranks must call it."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def clamp_positions_(model: nn.Module) -> None:
    """Bring all positions back into their windows, and sigmas above their least.

    The layers do so themselves whenever they are used in training, and when they are saved. Call this after every step
    to follow the paper to the letter, so that positions are inside at any time; and under FSDP2, where the layers clamp
    the gathered copies of their parameters only.
    """
    for layer in model.modules():
        if isinstance(layer, DclsConvNd):
            layer.clamp_positions_()


def no_weight_decay(model: nn.Module) -> set[str]:
    """The names of all positions and sigmas in `model.named_parameters()`.

    Weight decay would draw the elements to the centre of the kernel (paper, section 3 "Weight decay"), and sigmas to
    zero. The method `no_weight_decay()` of a converted model, which timm asks, names them too.
    """
    own = {id(one.tensor) for one in position_parameters(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def spare_from_decay_(model: nn.Module) -> None:
    """Let `model.no_weight_decay()` name positions and sigmas too, so that timm's optimizers do not decay them."""
    if not isinstance(
        model, fx.GraphModule
    ):  # whose copies and pickles keep no attributes of this kind
        vars(model)[HOOK] = partial(_spared_from_decay, model)


def drop_spare_from_decay_(model: nn.Module) -> None:
    """Undo `spare_from_decay_`, in all of the model."""
    for module in model.modules():
        if getattr(vars(module).get(HOOK), "func", None) is _spared_from_decay:
            del vars(module)[HOOK]


def _spared_from_decay(model: nn.Module) -> set[str]:
    """`no_weight_decay` of one model: what the model's class says, and its positions and sigmas."""
    own: Any = getattr(type(model), HOOK, lambda _: ())
    return {*own(model), *no_weight_decay(model)}
