"""The positions and sigmas of a model.

They are found through the layers that use them: a parameter's name does not say what it is.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from ..layers.dcls_conv import DclsConvNd
from ..layers.ties import POSITION_PARAMETERS

# Method of a model that timm's optimizers call for the names of parameters without weight decay.
NO_WEIGHT_DECAY = "no_weight_decay"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionParameter:
    """One positions or sigma tensor of a model, used by a tie group or by one layer."""

    # As in `named_parameters`; for a tensor registered outside the model: first layer's name, kind.
    name: str
    kind: str  # "positions" or "sigma"
    tensor: Tensor  # (A, *C, E); the parameter itself
    layers: dict[str, DclsConvNd]  # by name, in the model's order

    @property
    def learnt_size(self) -> tuple[int, ...]:
        """Cells of the window along the learnt axes."""
        first = next(iter(self.layers.values()))
        return tuple(first.dilated_kernel_size[axis] for axis in first.learnt_axes)


def position_parameters(model: nn.Module, *kinds: str) -> tuple[PositionParameter, ...]:
    """Every positions and sigma tensor of the model once, in the order of the layers.

    `kinds` ("positions", "sigma") restricts them.
    """
    wanted_kinds = kinds or POSITION_PARAMETERS
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, PositionParameter] = {}  # by the id of the tensor
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, DclsConvNd):
            continue
        for kind in wanted_kinds:
            tensor = getattr(layer, kind)
            if tensor is None:
                continue
            if id(tensor) not in found:
                name = names.get(id(tensor), f"{layer_name}.{kind}".lstrip("."))
                found[id(tensor)] = PositionParameter(
                    name=name, kind=kind, tensor=tensor, layers={}
                )
            found[id(tensor)].layers[layer_name] = layer
    return tuple(found.values())


def no_weight_decay(model: nn.Module) -> set[str]:
    """The names of all positions and sigmas in `model.named_parameters()`.

    Weight decay would draw the elements to the centre of the kernel (paper, section 3 "Weight
    decay"), and sigmas to zero. The method `no_weight_decay()` of a converted model, which timm
    calls, names them too.
    """
    tensors = {id(parameter.tensor) for parameter in position_parameters(model)}
    names: set[str] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) in tensors:
            names.add(name)
    return names


def exclude_from_weight_decay_(model: nn.Module) -> None:
    """Let `model.no_weight_decay()` name positions and sigmas too.

    timm's optimizers then do not decay them.
    """
    # Copies and pickles of a GraphModule lose an attribute of this kind.
    if not isinstance(model, fx.GraphModule):
        vars(model)[NO_WEIGHT_DECAY] = partial(_excluded_from_weight_decay, model)


def undo_exclusion_from_weight_decay_(model: nn.Module) -> None:
    """Undo `exclude_from_weight_decay_`, in all of the model."""
    for module in model.modules():
        if getattr(vars(module).get(NO_WEIGHT_DECAY), "func", None) is _excluded_from_weight_decay:
            del vars(module)[NO_WEIGHT_DECAY]


def _excluded_from_weight_decay(model: nn.Module) -> set[str]:
    """`no_weight_decay` of one model: the names from its class, and its positions and sigmas."""
    names_of_class: Any = getattr(type(model), NO_WEIGHT_DECAY, lambda _: ())
    return {*names_of_class(model), *no_weight_decay(model)}
