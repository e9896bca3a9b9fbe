"""Load elements trained with the authors' package (DCLS, `dcls` on PyPI) into our layers.

Only this file reads the entries P and SIG. The records in layers/interpolation.py state which
version of the package corresponds to which interpolation. Layers are named as in the model to
convert.

Axes: O output channels, I input channels per group, E kernel elements, A spatial axes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..geometry import size_text
from ..layers.conv_classes import PLAIN, find_traits
from ..layers.interpolation import INTERPOLATIONS, Interpolation, find_interpolation
from ..options import AuthorsVersion
from ..placing.groups import make_layers
from ..placing.place import insert_layers_
from ..planning.known_counts import LayerCounts
from ..planning.layer_plan import LayerPlan
from ..planning.paths import joined_name
from ..planning.plan import ConversionPlan
from ..planning.tie_groups import TieGroup
from ..weights.loading import describe_non_finite, load_weights_

# Entries of a layer of the authors' package, apart from its bias.
_WEIGHT = "weight"  # (O, I, E)
_POSITIONS = "P"  # (A, O, I, E), with the axes in an order that depends on the version
_SIGMA = "SIG"  # (A, O, I, E), in cells, of either sign; `min_sigma` is added to its absolute value
# To which axes P[0], P[1], ... belong in version v0, by the number of axes. Other versions reverse
# the axes.
_AXES = {1: (0,), 2: (0, 1), 3: (0, 2, 1)}
# All versions but v0 divide an element's spread by its sum plus this: DCLS 0.1.1, ConstructKernel1d
# to 3d.
_NORMALISER = 1e-7
# Version of the authors' published checkpoints. A file without SIG does not state its version.
RELEASED_VERSION: AuthorsVersion = "v0"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthorsWeights:
    """A state dict, split into layers of the authors' package and the rest."""

    where: str  # its name in messages
    layers: dict[str, dict[str, Tensor]]  # tensors by layer name and entry
    rest: dict[str, Tensor]  # all other entries

    @property
    def kernel_counts(self) -> LayerCounts:
        """The number of elements per kernel in each layer."""
        counts = {}
        for name, layer in self.layers.items():
            counts[name] = layer[_WEIGHT].shape[-1]
        return LayerCounts(source=self.where, counts=counts)

    @property
    def has_sigma(self) -> bool:
        """True if any layer has sigmas."""
        return any(_SIGMA in layer for layer in self.layers.values())


def split_authors_weights(state: Mapping[str, Tensor], where: str) -> AuthorsWeights | None:
    """Split a state dict into layers of the authors' package and the rest.

    Returns:
        None if the state dict has no such layer, that is, no P with a weight.

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
    weight_has_elements = len(shape) == 3 and min(shape) > 0
    for entry, tensor in layer.items():
        fits = weight_has_elements and tensor.shape[1:] == shape and tensor.shape[0] in _AXES
        if entry != _WEIGHT and not fits:
            raise CheckpointError(
                f"{where}: {name}.{entry} has shape {tuple(tensor.shape)}, which does not fit its "
                f"weight {tuple(shape)}; with a weight (out, in/groups, count) it must be "
                "(1 to 3 axes, out, in/groups, count)"
            )
        if not tensor.is_floating_point() or describe_non_finite(name, tensor, mask=False):
            raise CheckpointError(f"{where}: {name}.{entry} must be finite floating-point numbers")


def convert_with_authors_weights_(
    model: nn.Module,
    plan: ConversionPlan,
    weights: AuthorsWeights,
    *,
    version: AuthorsVersion | None = None,
    new_classifier: bool = False,
) -> list[str]:
    """Load the weights into the model, and convert it.

    Returns:
        The names of the entries that kept their initial values.
    """
    elements = translate_authors_elements(weights, plan, version)
    for layer in plan.layers:
        conv = model.get_submodule(layer.name)
        traits = find_traits(conv) or PLAIN
        if traits.transform_weight:
            raise CheckpointError(
                f"{weights.where}: {layer.name} is a {type(conv).__name__}, "
                "which would transform the file's elements"
            )
    groups = make_layers(model, plan)
    # The file has no kernels for the convolutions that are replaced. `load_weights_` gets their
    # present kernels instead, so that it can check that everything else is there.
    state = dict(weights.rest)
    old_state = model.state_dict()
    for layer in plan.layers:
        for name in layer.names:
            if f"{name}.weight" in old_state:
                state[f"{name}.weight"] = old_state[f"{name}.weight"]
    not_loaded = load_weights_(model, state, weights.where, new_classifier=new_classifier)
    insert_layers_(model, plan, groups)
    model.load_state_dict(elements, strict=False)
    return not_loaded


def translate_authors_elements(
    weights: AuthorsWeights, plan: ConversionPlan, version: AuthorsVersion | None = None
) -> dict[str, Tensor]:
    """Return weights, positions and sigmas of the plan's layers, by name in the converted model.

    Raises:
        CheckpointError: The elements do not fit the plan's layers, or are of another version.
    """
    if version is not None and weights.has_sigma:
        versions = _versions_by_interpolation(has_sigma=True)
        raise CheckpointError(
            f"{weights.where}: has {_SIGMA} entries, "
            f"so it is of version {' or '.join(versions.values())} "
            f"(interpolation {' or '.join(versions)}); "
            f"version {version} is for files without {_SIGMA}"
        )
    version = version or RELEASED_VERSION
    translated: dict[str, dict[str, Tensor]] = {}
    positions: dict[str, Tensor] = {}
    for layer in plan.layers:
        translated[layer.name] = _translate(layer, weights, version)
        positions[layer.name] = translated[layer.name]["positions"]
    _check_windows(plan, positions, weights.where)
    state: dict[str, Tensor] = {}
    for layer in plan.layers:
        for parameter, tensor in translated[layer.name].items():
            # Positions and sigma of a tie group are registered on its owner.
            if parameter == "weight" or layer.tie_group is None:
                state[f"{layer.name}.{parameter}"] = tensor
    for group in plan.tie_groups:
        for parameter, owner_name in group.parameters.items():
            shared = _shared_parameter(parameter, group, translated, weights.where)
            state[joined_name(group.owner, owner_name)] = shared
    return state


def _shared_parameter(
    parameter: str, group: TieGroup, translated: Mapping[str, Mapping[str, Tensor]], where: str
) -> Tensor:
    """Return the positions or sigmas of a tie group's layers; CheckpointError if they differ."""
    first, *others = group.layers
    shared = translated[first][parameter]
    for other in others:
        if not torch.equal(translated[other][parameter], shared):
            raise CheckpointError(
                f"{where}: {parameter} of {first} and {other} differ, so the layers of "
                f"{group.name} cannot share them; use tie 'none'"
            )
    return shared


def _translate(
    layer: LayerPlan, weights: AuthorsWeights, version: AuthorsVersion
) -> dict[str, Tensor]:
    """Translate a layer of the authors' package into the parameters of ours.

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
    is_v0 = version == "v0" and sigma is None
    order, shifts = _axis_order_and_shifts(size, is_v0=is_v0)
    offset = torch.tensor(shifts, device=positions.device).reshape(-1, 1, 1, 1)  # (A, 1, 1, 1)
    # Half precision would round positions: at 8 cells from the centre, by a sixteenth of a cell.
    dtype = torch.float32
    if positions.dtype == torch.float64:
        dtype = torch.float64
    ours = {"weight": weight, "positions": positions.to(dtype)[order] + offset}
    if sigma is not None:
        ours["sigma"] = sigma.to(dtype)[order].abs() + (interpolation.min_sigma or 0.0)
    if not is_v0:
        spread_sum = _spread_sum(ours, interpolation, size)  # (O, I, E)
        # The cells of our elements sum to exactly their weight; the authors' sum to a little less.
        scaled_weight = weight.double() * spread_sum / (spread_sum + _NORMALISER)
        ours["weight"] = scaled_weight.to(weight.dtype)
    return ours


def _axis_order_and_shifts(size: Sequence[int], *, is_v0: bool) -> tuple[list[int], list[int]]:
    """Return, for each of our axes, its index in P, and the shift from their centre to ours."""
    dims = len(size)
    their_axes = _AXES[dims] if is_v0 else tuple(reversed(range(dims)))
    order = []
    shifts = []
    for axis in range(dims):
        index_in_p = their_axes.index(axis)
        order.append(index_in_p)
        # DCLS centres with the wrong axis's size; shift by the difference.
        shifts.append(size[index_in_p] // 2 - size[axis] // 2)
    return order, shifts


def _find_elements(layer: LayerPlan, weights: AuthorsWeights) -> dict[str, Tensor]:
    """Return the layer's entries.

    Raises:
        CheckpointError: There are none, or they are of another interpolation or shape.
    """
    candidates = [weights.layers[name] for name in layer.names if name in weights.layers]
    if not candidates:
        raise CheckpointError(
            f"{weights.where}: has no elements for {layer.name}, which is to be converted"
        )
    elements = candidates[0]
    _check_interpolation(layer, has_sigma=_SIGMA in elements, where=weights.where)
    shape = tuple(elements[_POSITIONS].shape)
    if shape != layer.position_shape:
        raise CheckpointError(
            f"{weights.where}: {layer.name}.{_POSITIONS} has shape {shape}, "
            f"the model needs {layer.position_shape}"
        )
    return elements


def _check_interpolation(layer: LayerPlan, *, has_sigma: bool, where: str) -> None:
    """Refuse an interpolation that the package does not have for layers with, or without, sigma."""
    versions = _versions_by_interpolation(has_sigma=has_sigma)
    if layer.interpolation in versions:
        return
    if not has_sigma:
        raise CheckpointError(
            f"{where}: {layer.name} has no {_SIGMA}, "
            f"so its interpolation is {' or '.join(versions)}, not {layer.interpolation}"
        )
    choices: list[str] = []
    for name, version in versions.items():
        if choices:
            choices.append(f"{name} ({version})")
        else:
            choices.append(f"{name} (their version {version})")
    raise CheckpointError(
        f"{where}: {layer.name} has a {_SIGMA}, so its interpolation is {' or '.join(choices)}, "
        "which the file does not say; state the interpolation"
    )


def _versions_by_interpolation(*, has_sigma: bool) -> dict[str, str]:
    """Return the package's interpolations with, or without, sigma, and its versions for each."""
    versions = {}
    for name, interpolation in INTERPOLATIONS.items():
        if interpolation.authors_versions and interpolation.has_sigma == has_sigma:
            versions[name] = " or ".join(interpolation.authors_versions)
    return versions


def _spread_sum(
    parameters: Mapping[str, Tensor], interpolation: Interpolation, size: Sequence[int]
) -> Tensor:
    """Sum an element's spread over the window, before it is normalised: (O, I, E)."""
    positions = parameters["positions"].double()  # (A, O, I, E)
    sigma = torch.ones_like(positions)
    if "sigma" in parameters:
        sigma = parameters["sigma"].double()
    total = torch.ones_like(positions[0])
    for axis, side in enumerate(size):
        cells = positions[axis] + side // 2  # from the window's first cell
        total = total * interpolation.profile(cells, sigma[axis], side).sum(-1)
    return total


def _check_windows(plan: ConversionPlan, positions: Mapping[str, Tensor], where: str) -> None:
    """Refuse positions outside their window.

    The message names the window that would hold the positions of all layers of this size.
    """
    needed_windows: dict[str, tuple[int, ...]] = {}
    for layer in plan.layers:
        needed_windows[layer.name] = _grown_window(layer.dilated_size, positions[layer.name])
    for layer in plan.layers:
        size = layer.dilated_size
        needed = needed_windows[layer.name]
        if needed == size:
            continue
        needed_at_this_size = [
            needed_windows[other.name] for other in plan.layers if other.dilated_size == size
        ]
        window = tuple(map(max, zip(*needed_at_this_size, strict=True)))
        if len(set(size)) == 1:  # a square window stays square
            window = (max(window),) * len(window)
        option = size_text(window)
        if len(set(window)) == 1:
            option = str(window[0])
        axis = 0  # the first one along which positions are outside
        while needed[axis] == size[axis]:
            axis += 1
        farthest = positions[layer.name][axis].abs().max().item()
        raise CheckpointError(
            f"{where}: {layer.name} has elements {farthest:g} cells from the centre (axis {axis}), "
            f"outside of its window {size_text(size)}; use the window of its training, "
            f"at least {size_text(window)} (dilated size {option})"
        )


def _grown_window(size: Sequence[int], positions: Tensor) -> tuple[int, ...]:
    """Grow the window by pairs of cells until it holds all positions (A, O, I, E)."""
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
