"""The positions and sigmas of a model."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import DclsConvertError, check_argument
from ..geometry import Grow, along_learnt_axes, grow_of_axes, old_centre, position_limits
from .dcls_conv import DclsConvNd
from .interpolation import POSITION_PARAMETERS
from .ties import at_least_float32, is_flattened

# Method of a model that timm's optimizers call for the names of parameters without weight decay.
NO_WEIGHT_DECAY = "no_weight_decay"
FLATTENED = (
    "FSDP1 has flattened the positions: make parameter groups before you wrap the model; clamp and "
    "record positions inside `with FSDP.summon_full_params(model):`; a repulsive loss needs FSDP2"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionParameter:
    """One positions or sigma tensor of a model, used by a tie group or by one layer."""

    attribute: str  # of its layers: "positions" or "sigma"
    tensor: Tensor  # (A, *C, E); the parameter itself
    layers: dict[str, DclsConvNd]  # by name, in the model's order

    @property
    def name(self) -> str:
        """The tensor's name in `named_parameters`.

        A part of the network without the first layer has no parameter of this name.
        """
        return f"{next(iter(self.layers))}.{self.attribute}".lstrip(".")

    @property
    def learnt_size(self) -> tuple[int, ...]:
        """Cells of the window along the learnt axes."""
        first = next(iter(self.layers.values()))
        return along_learnt_axes(first.dilated_kernel_size, first.dense_axes)

    @property
    def learnt_grow(self) -> list[Grow]:
        """How the window grows along each learnt axis."""
        first = next(iter(self.layers.values()))
        grows = grow_of_axes(first.grow, first.dims)
        return [grows[axis] for axis in first.learnt_axes]

    @property
    def old_centre(self) -> list[float]:
        """`geometry.old_centre` along each learnt axis."""
        first = next(iter(self.layers.values()))
        centre = []
        for axis, grow in zip(first.learnt_axes, self.learnt_grow, strict=True):
            low, high = position_limits(first.dilated_kernel_size[axis])
            before, after = first.new_cells[axis]
            centre.append(old_centre((low + before, high - after), grow))
        return centre


def position_parameters(model: nn.Module, *attributes: str) -> tuple[PositionParameter, ...]:
    """Return every positions and sigma tensor of the model once, in the order of the layers.

    If `attributes` ("positions", "sigma") are given, return only these.

    Raises:
        DclsConvertError: FSDP1 has flattened the positions.
    """
    parameters: dict[int, PositionParameter] = {}  # by the id of the tensor
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, DclsConvNd):
            continue
        for attribute in attributes or POSITION_PARAMETERS:
            tensor = getattr(layer, attribute)
            if tensor is None:
                continue
            if is_flattened(tensor):
                raise DclsConvertError(FLATTENED)
            parameter = PositionParameter(attribute=attribute, tensor=tensor, layers={})
            parameters.setdefault(id(tensor), parameter).layers[layer_name] = layer
    return tuple(parameters.values())


def describe_imprecise(parameters: Iterable[PositionParameter]) -> str | None:
    """Say which trained positions and sigmas are below float32, the effect, and the remedy."""
    imprecise = []
    for parameter in parameters:
        dtype = parameter.tensor.dtype
        if parameter.tensor.requires_grad and dtype != at_least_float32(dtype):
            imprecise.append(parameter)
    if not imprecise:
        return None
    first = imprecise[0]
    others = f" and {len(imprecise) - 1} more" if len(imprecise) > 1 else ""
    network_dtype = next(iter(first.layers.values())).weight.dtype
    return (
        f"{first.name}{others} in {first.tensor.dtype}, in which usual steps are rounded away far "
        f"from the centre; model.to({network_dtype}) gives positions float32 again, and keeps the "
        "network's dtype"
    )


def clamp_positions_(model: nn.Module) -> None:
    """Clamp all positions to their windows, and all sigmas to at least their minimum.

    Layers clamp their own parameters in each training forward pass, and `save_converted` clamps all
    parameters of the model. To follow the paper to the letter, call this function after every step:
    positions are then always inside their windows. The call is needed where layers cannot clamp
    their parameters: under FSDP2, FSDP1 (inside `FSDP.summon_full_params(model)`),
    `nn.DataParallel` and `torch.func`.

    Raises:
        DclsConvertError: FSDP1 has flattened the positions.
    """
    check_argument("model", model, nn.Module)
    for parameter in position_parameters(model, "positions"):
        next(iter(parameter.layers.values())).clamp_positions_()


def no_weight_decay(model: nn.Module) -> set[str]:
    """Return the names of all positions and sigmas in `model.named_parameters()`.

    Weight decay would pull the elements to the centre of the kernel (paper, section 3 "Weight
    decay"), and sigmas to zero. timm calls the method `no_weight_decay()` of a converted model,
    which returns these names, too.
    """
    check_argument("model", model, nn.Module)
    return {parameter.name for parameter in position_parameters(model)}


def exclude_from_weight_decay_(model: nn.Module) -> None:
    """Make `model.no_weight_decay()` also return positions and sigmas, by their present names.

    timm's optimizers then do not decay them.
    """
    names_of_class: Any = getattr(type(model), NO_WEIGHT_DECAY, lambda _: ())
    names = set(names_of_class(model))
    names.update(parameter.name for parameter in position_parameters(model))
    # Not a lambda, which could not be pickled with the model.
    vars(model)[NO_WEIGHT_DECAY] = partial(_copied, names)


def undo_exclusion_from_weight_decay_(model: nn.Module) -> None:
    """Undo `exclude_from_weight_decay_` for the model and all its modules."""
    for module in model.modules():
        if getattr(vars(module).get(NO_WEIGHT_DECAY), "func", None) is _copied:
            del vars(module)[NO_WEIGHT_DECAY]


def _copied(names: set[str]) -> set[str]:
    return set(names)
