"""Elements and positions that were trained with the authors' own package (DCLS, on PyPI as `dcls`),
in our layers.

Upstream spellings (P, SIG, "max") stand in this file alone. Layers are named as in the model to
convert.

Axes: O output channels, I input channels per group, E kernel elements, A spatial axes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..depthwise.geometry import size_text
from ..errors import CheckpointError
from ..fitting.groups import make_layers
from ..layers.conv_classes import PLAIN, find_form
from ..layers.interpolation import find_interpolation
from ..networks.weights import load_weights_, not_finite
from ..options import AuthorsVersion
from ..planning.plan import ConversionPlan, LayerCounts, LayerPlan
from .place import put_layers_

# The entries of one of their layers, beside its bias: (O, I, E), (A, O, I, E) in the version's
# order of axes, and as these, less the least value and of either sign.
_WEIGHT, _POSITIONS, _SIGMA = "weight", "P", "SIG"
_AXES = {
    1: (0,),
    2: (0, 1),
    3: (0, 2, 1),
}  # dims -> the axes of P[0], P[1], ... in version v0; else they are reversed
# All versions but v0 add this to the sum by which an element's spread is divided. DCLS 0.1.1,
# ConstructKernel1d to 3d.
_NORMALISER = 1e-7
RELEASED_VERSION: AuthorsVersion = (
    "v0"  # of the checkpoints that they published; a file without SIG does not say
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthorsWeights:
    """A state dict with layers of the authors' package, sorted."""

    where: str  # what messages call it
    layers: dict[str, dict[str, Tensor]]  # by name and entry
    rest: dict[str, Tensor]  # every other entry

    @property
    def kernel_counts(self) -> LayerCounts:
        counts = {name: layer[_WEIGHT].shape[-1] for name, layer in self.layers.items()}
        return LayerCounts(source=self.where, counts=counts)

    @property
    def has_sigma(self) -> bool:
        return any(_SIGMA in layer for layer in self.layers.values())


def sort_weights(state: Mapping[str, Tensor], where: str) -> AuthorsWeights | None:
    """The authors' layers in a state dict, and its other entries; None without such layers (no P
    beside a weight).
    """
    marked = [
        name.removesuffix(f".{_POSITIONS}") for name in state if name.endswith(f".{_POSITIONS}")
    ]
    if not any(f"{name}.{_WEIGHT}" in state for name in marked):
        return None
    rest = dict(state)
    layers: dict[str, dict[str, Tensor]] = {}
    for name in marked:
        if f"{name}.{_WEIGHT}" not in state:
            raise CheckpointError(f"{where}: has {name}.{_POSITIONS}, but no {name}.{_WEIGHT}")
        entries = [entry for entry in (_WEIGHT, _POSITIONS, _SIGMA) if f"{name}.{entry}" in state]
        layers[name] = {entry: rest.pop(f"{name}.{entry}") for entry in entries}
        shape = layers[name][_WEIGHT].shape
        for entry, tensor in layers[name].items():
            fits = (
                len(shape) == 3
                and min(shape) > 0
                and tensor.shape[1:] == shape
                and tensor.shape[0] in _AXES
            )
            if entry != _WEIGHT and not fits:
                raise CheckpointError(
                    f"{where}: {name}.{entry} has shape {tuple(tensor.shape)}, which does not fit "
                    "its weight "
                    f"{tuple(shape)}; with a weight (out, in/groups, count) it must be (1 to 3 "
                    "axes, out, in/groups, "
                    "count)"
                )
            if not tensor.is_floating_point() or not_finite(name, tensor, mask=False):
                raise CheckpointError(
                    f"{where}: {name}.{entry} must be finite floating-point numbers"
                )
    return AuthorsWeights(where=where, layers=layers, rest=rest)


def start_from_authors_(
    model: nn.Module,
    plan: ConversionPlan,
    weights: AuthorsWeights,
    *,
    version: AuthorsVersion | None = None,
    new_classifier: bool = False,
) -> list[str]:
    """Load the weights into the model and convert it; returns the names that kept their initial
    values.
    """
    elements = element_state(weights, plan, version)
    for layer in plan.layers:
        conv = model.get_submodule(layer.name)
        if (find_form(conv) or PLAIN).weight:
            raise CheckpointError(
                f"{weights.where}: {layer.name} is a {type(conv).__name__}, which would transform "
                "the file's elements"
            )
    groups = make_layers(model, plan)
    replaced = {f"{name}.weight" for layer in plan.layers for name in layer.names}
    kernels = {name: tensor for name, tensor in model.state_dict().items() if name in replaced}
    # Old kernels stand in for the elements, so that the rest must be complete.
    kept = load_weights_(
        model, weights.rest | kernels, weights.where, new_classifier=new_classifier
    )
    put_layers_(model, plan, groups)
    model.load_state_dict(elements, strict=False)
    return kept


def element_state(
    weights: AuthorsWeights, plan: ConversionPlan, version: AuthorsVersion | None = None
) -> dict[str, Tensor]:
    """Weights, positions and sigmas of all layers of the plan, under their names in the converted
    model.
    """
    if version is not None and weights.has_sigma:
        raise CheckpointError(
            f"{weights.where}: has {_SIGMA} entries, so it is of version max or gauss "
            "(--interpolation triangle or "
            f"gaussian); --authors-version {version} is for files without"
        )
    released = version in (None, RELEASED_VERSION)
    ours = {layer.name: _translated(layer, weights, released) for layer in plan.layers}
    _check_windows(plan, {name: parts["positions"] for name, parts in ours.items()}, weights.where)
    state: dict[str, Tensor] = {}
    for layer in plan.layers:
        own = (
            ours[layer.name] if layer.tie_group is None else {"weight": ours[layer.name]["weight"]}
        )
        state |= {f"{layer.name}.{name}": tensor for name, tensor in own.items()}
    for group in plan.tie_groups:
        first, *others = group.layers
        for name, owner_name in group.parameters.items():
            for other in others:
                if not torch.equal(ours[other][name], ours[first][name]):
                    raise CheckpointError(
                        f"{weights.where}: {name} of {first} and {other} differ, so the layers of "
                        f"{group.name} cannot "
                        "share them; use --tie none"
                    )
            state[f"{group.owner}.{owner_name}".removeprefix(".")] = ours[first][name]
    return state


def _translated(layer: LayerPlan, weights: AuthorsWeights, released: bool) -> dict[str, Tensor]:
    """weight (O, I, E), positions (A, O, I, E) from the centre in our order of axes, and sigma, if
    there is one.
    """
    theirs = next((weights.layers[name] for name in layer.names if name in weights.layers), None)
    if theirs is None:
        raise CheckpointError(
            f"{weights.where}: has no elements for {layer.name}, which is to be converted"
        )
    sigma, positions, method = (
        theirs.get(_SIGMA),
        theirs[_POSITIONS],
        find_interpolation(layer.interpolation),
    )
    if (sigma is not None) != method.has_sigma:
        allowed = f"no {_SIGMA}, so its interpolation is bilinear, not {layer.interpolation}"
        if sigma is not None:
            allowed = (
                f"a {_SIGMA}, so its interpolation is triangle (their version max) or gaussian "
                "(gauss), which the file does not say; use --interpolation"
            )
        raise CheckpointError(f"{weights.where}: {layer.name} has {allowed}")
    if tuple(positions.shape) != layer.position_shape:
        raise CheckpointError(
            f"{weights.where}: {layer.name}.{_POSITIONS} has shape {tuple(positions.shape)}, the "
            "model needs "
            f"{layer.position_shape}"
        )
    size, is_v0 = layer.dilated_size, released and sigma is None
    axes = _AXES[len(size)] if is_v0 else tuple(reversed(range(len(size))))
    order = [axes.index(axis) for axis in range(len(size))]
    # DCLS centres with the wrong axis's size; shift by the difference.
    shift = [size[index] // 2 - size[axis] // 2 for axis, index in enumerate(order)]
    offset = torch.tensor(shift, device=positions.device).reshape(-1, 1, 1, 1)
    precise = torch.float64 if positions.dtype == torch.float64 else torch.float32
    parts = {"weight": theirs[_WEIGHT], "positions": positions.to(precise)[order] + offset}
    if sigma is not None:
        parts["sigma"] = sigma.to(precise)[order].abs() + (method.min_sigma or 0.0)
    if not is_v0:  # our elements are spread to exactly their weight, theirs are not
        exact = {name: tensor.double() for name, tensor in parts.items()}
        widths = exact.get("sigma", torch.ones_like(exact["positions"]))
        total = torch.ones_like(exact["weight"])  # what an element's spread sums to: (O, I, E)
        for place, width, side in zip(exact["positions"], widths, size, strict=True):
            total = total * method.profile(place + side // 2, width, side).sum(-1)
        parts["weight"] = (exact["weight"] * total / (total + _NORMALISER)).to(
            theirs[_WEIGHT].dtype
        )
    return parts


def _check_windows(plan: ConversionPlan, positions: Mapping[str, Tensor], where: str) -> None:
    """Refuse positions outside their window, and name the window that would hold those of all
    layers of this size.
    """
    held = {
        layer.name: _holding(layer.dilated_size, positions[layer.name]) for layer in plan.layers
    }
    for layer in plan.layers:
        name, size = layer.name, layer.dilated_size
        if held[name] == size:
            continue
        alike = [held[other.name] for other in plan.layers if other.dilated_size == size]
        needed = tuple(map(max, zip(*alike, strict=True)))
        if len(set(size)) == 1:
            needed = (max(needed),) * len(needed)
        option = needed[0] if len(set(needed)) == 1 else size_text(needed)
        axis = next(axis for axis, side in enumerate(held[name]) if side != size[axis])
        raise CheckpointError(
            f"{where}: {name} has elements {positions[name][axis].abs().max().item():g} cells from "
            "the centre (axis "
            f"{axis}), outside of its window {size_text(size)}; use the window of its training, at "
            "least "
            f"{size_text(needed)} (--dilated-size {option})"
        )


def _holding(size: Sequence[int], positions: Tensor) -> tuple[int, ...]:
    """The window, grown by pairs of cells until it holds all positions (A, O, I, E)."""
    sides = []
    for side, places in zip(size, positions, strict=True):
        before, after = (
            math.ceil(-places.min().item()),
            math.ceil(places.max().item()),
        )  # cells beside the centre
        sides.append(
            max(side, 2 * max(before, after) + 1 if side % 2 else max(2 * before, 2 * after + 2))
        )
    return tuple(sides)
