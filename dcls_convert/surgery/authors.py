"""Elements and positions trained with the authors' package (DCLS, on PyPI `dcls`), in our layers.

Upstream spellings of entries (P, SIG) stand in this file alone; which version of the package
corresponds to which interpolation is stated by the records in layers/interpolation.py. Layers are
named as in the model to convert.

Axes: O output channels, I input channels per group, E kernel elements, A spatial axes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..fitting.groups import make_layers
from ..geometry import size_text
from ..layers.conv_classes import PLAIN, find_traits
from ..layers.interpolation import INTERPOLATIONS, Interpolation, find_interpolation
from ..networks.weights import describe_non_finite, load_weights_
from ..options import AuthorsVersion
from ..planning.known_counts import LayerCounts
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from ..planning.tie_groups import TieGroup
from .place import insert_layers_

# Entries of one of the authors' layers, beside its bias.
_WEIGHT = "weight"  # (O, I, E)
_POSITIONS = "P"  # (A, O, I, E), with the axes in an order that depends on the version
_SIGMA = "SIG"  # (A, O, I, E), in cells, of either sign; `min_sigma` is added to its absolute value
# Axes of P[0], P[1], ... in version v0, by the number of axes. Other versions reverse all axes.
_AXES = {1: (0,), 2: (0, 1), 3: (0, 2, 1)}
# All versions but v0 add this to the sum by which an element's spread is divided. DCLS 0.1.1,
# ConstructKernel1d to 3d.
_NORMALISER = 1e-7
# Version of the checkpoints that the authors published; a file without SIG does not state its own.
RELEASED_VERSION: AuthorsVersion = "v0"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthorsWeights:
    """A state dict with layers of the authors' package, sorted."""

    where: str  # what messages call it
    layers: dict[str, dict[str, Tensor]]  # by name and entry
    rest: dict[str, Tensor]  # all other entries

    @property
    def kernel_counts(self) -> LayerCounts:
        """The number of elements in the kernels of each layer."""
        counts = {}
        for name, layer in self.layers.items():
            counts[name] = layer[_WEIGHT].shape[-1]
        return LayerCounts(source=self.where, counts=counts)

    @property
    def has_sigma(self) -> bool:
        """Whether any layer has widths of its elements."""
        return any(_SIGMA in layer for layer in self.layers.values())


def split_authors_weights(state: Mapping[str, Tensor], where: str) -> AuthorsWeights | None:
    """Sort a state dict into the authors' layers and other entries.

    Returns:
        None if the state dict has no such layer, that is, no P beside a weight.

    Raises:
        CheckpointError: Entries of a layer are missing, do not fit each other or are not finite.
    """
    names = []
    for entry in state:
        if entry.endswith(f".{_POSITIONS}"):
            names.append(entry.removesuffix(f".{_POSITIONS}"))
    if not any(f"{name}.{_WEIGHT}" in state for name in names):
        return None
    rest = dict(state)
    layers: dict[str, dict[str, Tensor]] = {}
    for name in names:
        if f"{name}.{_WEIGHT}" not in state:
            raise CheckpointError(f"{where}: has {name}.{_POSITIONS}, but no {name}.{_WEIGHT}")
        layer = {}
        for entry in (_WEIGHT, _POSITIONS, _SIGMA):
            if f"{name}.{entry}" in state:
                layer[entry] = rest.pop(f"{name}.{entry}")
        _check_entries(name, layer, where)
        layers[name] = layer
    return AuthorsWeights(where=where, layers=layers, rest=rest)


def _check_entries(name: str, layer: Mapping[str, Tensor], where: str) -> None:
    """Refuse entries that do not fit the weight's shape, or are not finite numbers."""
    shape = layer[_WEIGHT].shape
    is_weight = len(shape) == 3 and min(shape) > 0
    for entry, tensor in layer.items():
        fits = is_weight and tensor.shape[1:] == shape and tensor.shape[0] in _AXES
        if entry != _WEIGHT and not fits:
            raise CheckpointError(
                f"{where}: {name}.{entry} has shape {tuple(tensor.shape)}, which does not fit its "
                f"weight {tuple(shape)}; with a weight (out, in/groups, count) it must be "
                "(1 to 3 axes, out, in/groups, count)"
            )
        if not tensor.is_floating_point() or describe_non_finite(name, tensor, mask=False):
            raise CheckpointError(f"{where}: {name}.{entry} must be finite floating-point numbers")


def start_from_authors_(
    model: nn.Module,
    plan: ConversionPlan,
    weights: AuthorsWeights,
    *,
    version: AuthorsVersion | None = None,
    new_classifier: bool = False,
) -> list[str]:
    """Load the weights into the model and convert it.

    Returns:
        The names of the entries that kept their initial values.
    """
    elements = element_state(weights, plan, version)
    for layer in plan.layers:
        conv = model.get_submodule(layer.name)
        traits = find_traits(conv) or PLAIN
        if traits.transform_weight:
            raise CheckpointError(
                f"{weights.where}: {layer.name} is a {type(conv).__name__}, "
                "which would transform the file's elements"
            )
    groups = make_layers(model, plan)
    # The file has no kernels for the convolutions that are replaced. Give their old kernels to
    # `load_weights_`, so that it can check that everything else is there.
    state = dict(weights.rest)
    old_state = model.state_dict()
    for layer in plan.layers:
        for name in layer.names:
            if f"{name}.weight" in old_state:
                state[f"{name}.weight"] = old_state[f"{name}.weight"]
    kept = load_weights_(model, state, weights.where, new_classifier=new_classifier)
    insert_layers_(model, plan, groups)
    model.load_state_dict(elements, strict=False)
    return kept


def element_state(
    weights: AuthorsWeights, plan: ConversionPlan, version: AuthorsVersion | None = None
) -> dict[str, Tensor]:
    """Weights, positions and sigmas of the plan's layers, by their names in the converted model.

    Raises:
        CheckpointError: The elements are not those of the plan's layers, or of another version.
    """
    if version is not None and weights.has_sigma:
        versions_of = _versions_by_interpolation(has_sigma=True)
        raise CheckpointError(
            f"{weights.where}: has {_SIGMA} entries, "
            f"so it is of version {' or '.join(versions_of.values())} "
            f"(--interpolation {' or '.join(versions_of)}); "
            f"--authors-version {version} is for files without"
        )
    version = version or RELEASED_VERSION
    ours: dict[str, dict[str, Tensor]] = {}
    positions: dict[str, Tensor] = {}
    for layer in plan.layers:
        ours[layer.name] = _translate(layer, weights, version)
        positions[layer.name] = ours[layer.name]["positions"]
    _check_windows(plan, positions, weights.where)
    state: dict[str, Tensor] = {}
    for layer in plan.layers:
        for part, tensor in ours[layer.name].items():
            # Positions and sigma of a tie group are registered on its owner.
            if part == "weight" or layer.tie_group is None:
                state[f"{layer.name}.{part}"] = tensor
    for group in plan.tie_groups:
        for part, owner_name in group.parameters.items():
            shared = _shared_part(part, group, ours, weights.where)
            state[f"{group.owner}.{owner_name}".removeprefix(".")] = shared
    return state


def _shared_part(
    part: str, group: TieGroup, ours: Mapping[str, Mapping[str, Tensor]], where: str
) -> Tensor:
    """The positions or sigmas of a tie group's layers; CheckpointError if they differ."""
    first, *others = group.layers
    shared = ours[first][part]
    for other in others:
        if not torch.equal(ours[other][part], shared):
            raise CheckpointError(
                f"{where}: {part} of {first} and {other} differ, so the layers of "
                f"{group.name} cannot share them; use --tie none"
            )
    return shared


def _translate(
    layer: LayerPlan, weights: AuthorsWeights, version: AuthorsVersion
) -> dict[str, Tensor]:
    """One of the authors' layers as ours.

    Returns:
        "weight" (O, I, E); "positions" (A, O, I, E) from the window's centre, in our order of axes;
        and "sigma" (A, O, I, E) if the layer has one.
    """
    theirs = _find_elements(layer, weights)
    interpolation = find_interpolation(layer.interpolation)
    weight = theirs[_WEIGHT]
    positions = theirs[_POSITIONS]
    sigma = theirs.get(_SIGMA)
    size = layer.dilated_size
    dims = len(size)
    is_v0 = version == "v0" and sigma is None
    their_axes = tuple(reversed(range(dims)))
    if is_v0:
        their_axes = _AXES[dims]
    order = []
    shift = []
    for axis in range(dims):
        index_of_axis = their_axes.index(axis)  # in P
        order.append(index_of_axis)
        # DCLS centres with the wrong axis's size; shift by the difference.
        shift.append(size[index_of_axis] // 2 - size[axis] // 2)
    offset = torch.tensor(shift, device=positions.device).reshape(-1, 1, 1, 1)  # (A, 1, 1, 1)
    # Half precision would round positions: at 8 cells from the centre, by a sixteenth of a cell.
    dtype = torch.float32
    if positions.dtype == torch.float64:
        dtype = torch.float64
    parts = {"weight": weight, "positions": positions.to(dtype)[order] + offset}
    if sigma is not None:
        parts["sigma"] = sigma.to(dtype)[order].abs() + (interpolation.min_sigma or 0.0)
    if not is_v0:
        spread = _spread_sum(parts, interpolation, size)  # (O, I, E)
        # Our elements are spread to exactly their weight, those of the authors are not.
        parts["weight"] = (weight.double() * spread / (spread + _NORMALISER)).to(weight.dtype)
    return parts


def _find_elements(layer: LayerPlan, weights: AuthorsWeights) -> dict[str, Tensor]:
    """The entries for the layer; CheckpointError if there are none, or of another kind or shape."""
    found = [weights.layers[name] for name in layer.names if name in weights.layers]
    if not found:
        raise CheckpointError(
            f"{weights.where}: has no elements for {layer.name}, which is to be converted"
        )
    elements = found[0]
    _check_interpolation(layer, has_sigma=_SIGMA in elements, where=weights.where)
    shape = tuple(elements[_POSITIONS].shape)
    if shape != layer.position_shape:
        raise CheckpointError(
            f"{weights.where}: {layer.name}.{_POSITIONS} has shape {shape}, "
            f"the model needs {layer.position_shape}"
        )
    return elements


def _check_interpolation(layer: LayerPlan, *, has_sigma: bool, where: str) -> None:
    """Refuse an interpolation that no version of the package with such entries has."""
    versions_of = _versions_by_interpolation(has_sigma=has_sigma)
    if layer.interpolation in versions_of:
        return
    if not has_sigma:
        raise CheckpointError(
            f"{where}: {layer.name} has no {_SIGMA}, "
            f"so its interpolation is {' or '.join(versions_of)}, not {layer.interpolation}"
        )
    choices: list[str] = []
    for name, version in versions_of.items():
        if choices:
            choices.append(f"{name} ({version})")
        else:
            choices.append(f"{name} (their version {version})")
    raise CheckpointError(
        f"{where}: {layer.name} has a {_SIGMA}, so its interpolation is {' or '.join(choices)}, "
        "which the file does not say; use --interpolation"
    )


def _versions_by_interpolation(*, has_sigma: bool) -> dict[str, str]:
    """The interpolations that the package has, with or without sigma, and their versions there."""
    versions_of = {}
    for name, interpolation in INTERPOLATIONS.items():
        if interpolation.authors_versions and interpolation.has_sigma == has_sigma:
            versions_of[name] = " or ".join(interpolation.authors_versions)
    return versions_of


def _spread_sum(
    parts: Mapping[str, Tensor], interpolation: Interpolation, size: Sequence[int]
) -> Tensor:
    """What the spread of an element sums to over the window, before it is normalised: (O, I, E)."""
    positions = parts["positions"].double()  # (A, O, I, E)
    sigma = torch.ones_like(positions)
    if "sigma" in parts:
        sigma = parts["sigma"].double()
    total = torch.ones_like(positions[0])
    for axis, side in enumerate(size):
        cells = positions[axis] + side // 2  # from the window's first cell
        total = total * interpolation.profile(cells, sigma[axis], side).sum(-1)
    return total


def _check_windows(plan: ConversionPlan, positions: Mapping[str, Tensor], where: str) -> None:
    """Refuse positions outside their window.

    The message names the window that would hold the positions of all layers of this size.
    """
    needed_by: dict[str, tuple[int, ...]] = {}
    for layer in plan.layers:
        needed_by[layer.name] = _grown_window(layer.dilated_size, positions[layer.name])
    for layer in plan.layers:
        size = layer.dilated_size
        if needed_by[layer.name] == size:
            continue
        of_this_size = [
            needed_by[other.name] for other in plan.layers if other.dilated_size == size
        ]
        window = tuple(map(max, zip(*of_this_size, strict=True)))
        if len(set(size)) == 1:  # a square window stays square
            window = (max(window),) * len(window)
        option = size_text(window)
        if len(set(window)) == 1:
            option = str(window[0])
        axis = 0
        while needed_by[layer.name][axis] == size[axis]:
            axis += 1
        farthest = positions[layer.name][axis].abs().max().item()
        raise CheckpointError(
            f"{where}: {layer.name} has elements {farthest:g} cells from the centre (axis {axis}), "
            f"outside of its window {size_text(size)}; use the window of its training, "
            f"at least {size_text(window)} (--dilated-size {option})"
        )


def _grown_window(size: Sequence[int], positions: Tensor) -> tuple[int, ...]:
    """The window, grown by pairs of cells until it holds all positions (A, O, I, E)."""
    sides = []
    for side, coordinates in zip(size, positions, strict=True):
        cells_before = math.ceil(-coordinates.min().item())
        cells_after = math.ceil(coordinates.max().item())
        if side % 2:
            needed = 2 * max(cells_before, cells_after) + 1
        else:  # an even window has one cell less after its centre than before it
            needed = max(2 * cells_before, 2 * (cells_after + 1))
        sides.append(max(side, needed))
    return tuple(sides)
