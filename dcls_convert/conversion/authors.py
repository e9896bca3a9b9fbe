"""Load elements trained with the authors' package (DCLS 0.1.1, `dcls` on PyPI) into our layers.

Only this file knows the entries and versions of that package. Names of layers are names in the
model to convert.

Axes: O output channels, I input channels per group, E kernel elements, A spatial axes.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, PlanError
from ..geometry import position_limits, size_text
from ..layers.conv_classes import PLAIN, find_traits
from ..layers.interpolation import find_interpolation
from ..layers.profiles import PROFILES
from ..options import AUTO, AuthorsVersion
from ..planning.layer_plan import LayerPlan
from ..planning.plan import DraftPlan
from ..progress import Note
from ..text import join_with_and, short_list, shortened
from ..weights.loading import describe_non_finite
from .request import ConversionRequest, RequestWeights, options_that_decide_counts

# Entries of a layer of the authors' package, apart from its bias.
_WEIGHT = "weight"  # (O, I, E)
_POSITIONS = "P"  # (A, O, I, E), with the axes in an order that depends on the version
_SIGMA = "SIG"  # (A, O, I, E), in cells, of either sign; sigma is its absolute value + `min_sigma`
# Axes to which P[0], P[1], ... belong, by the number of axes.
_AXES_OF_V0 = {1: (0,), 2: (0, 1), 3: (0, 2, 1)}
_AXES_OF_OTHERS = {1: (0,), 2: (1, 0), 3: (2, 1, 0)}
# All versions but v0 divide an element's spread by its sum plus this number: see
# ConstructKernel1d to 3d.
_NORMALISER = 1e-7
# Version of the authors' published checkpoints. A file without SIG does not state its version.
RELEASED_VERSION: AuthorsVersion = "v0"


def split_authors_elements(
    state: Mapping[str, Tensor],
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Split a state dict into the elements of the authors' layers and all other entries.

    An authors' layer has a weight (O, I, E) and a P (A, O, I, E).

    Returns:
        The elements, by layer name and kind of entry (empty without authors' layers), and all other
        entries.
    """
    rest = dict(state)
    elements: dict[str, dict[str, Tensor]] = {}
    for entry, positions in state.items():
        name, _, kind = entry.rpartition(".")
        weight = state.get(f"{name}.{_WEIGHT}")
        if kind != _POSITIONS or weight is None or weight.dim() != 3:
            continue
        if positions.shape[1:] == weight.shape:
            elements[name] = {_WEIGHT: rest.pop(f"{name}.{_WEIGHT}"), _POSITIONS: rest.pop(entry)}
            if f"{name}.{_SIGMA}" in rest:
                elements[name][_SIGMA] = rest.pop(f"{name}.{_SIGMA}")
    return elements, rest


def counts_of_elements(weights: RequestWeights) -> dict[str, int]:
    """Return the number of elements per kernel in each of the authors' layers, by name."""
    return {name: layer[_WEIGHT].shape[-1] for name, layer in weights.elements.items()}


def check_counts_of_elements(draft: DraftPlan, weights: RequestWeights) -> None:
    """Refuse (PlanError) elements for layers outside the draft, and rules with another count."""
    layer_of = {name: layer for layer in draft.layers for name in layer.names}
    for name, count in counts_of_elements(weights).items():
        layer = layer_of.get(name)
        if layer is None:
            reason_of = {skip.name: skip.reason for skip in draft.skipped}
            raise PlanError(
                f"{weights.where}: has elements for {shortened(name)}, which would not be "
                f"converted: {reason_of.get(name, 'the model has no such convolution')}"
            )
        if layer.kernel_count != count:
            raise PlanError(
                f"{weights.where}: {layer.name} has {count} elements in a kernel, "
                f"but rule {layer.rule!r} states {layer.kernel_count}"
            )


def check_elements(request: ConversionRequest, weights: RequestWeights | None, note: Note) -> None:
    """Refuse (CheckpointError) a start and counts that contradict elements in the weights.

    Without elements in the weights, options for the authors' elements are refused.
    """
    if weights is None:
        return
    where = weights.where
    if not weights.elements:
        if request.start.needs_authors_elements:
            raise CheckpointError(
                f"{where}: has no layers of the authors' package "
                f"(no layer has a {_POSITIONS} beside its weight)"
            )
        if request.start.authors_version is not None:
            raise CheckpointError(
                f"{where}: has no layers of the authors' package; omit the authors' version"
            )
        return
    counts = set(counts_of_elements(weights).values())
    stated = []
    if counts != {request.options.kernel_count}:
        stated = options_that_decide_counts(request.options)
    if request.start.init != AUTO:
        stated.append(f"init {request.start.init!r}")
    if request.start.calibration is not None:
        stated.append("calibration")
    if stated:
        raise CheckpointError(
            f"{where}: has elements of its own, {short_list(sorted(counts))} in a kernel; "
            f"omit {join_with_and(stated)}"
        )
    if not _have_sigma(weights) and request.start.authors_version is None:
        note(
            f"{where} is assumed to have version {RELEASED_VERSION} of the authors' layers; "
            "if that is wrong, state the authors' version"
        )


def _have_sigma(weights: RequestWeights) -> bool:
    return any(_SIGMA in layer for layer in weights.elements.values())


def names_lacking(weights: RequestWeights | None, draft: DraftPlan) -> list[str]:
    """Return the names of the network's tensors that the weights may lack.

    The weights may lack a new classifier. If they have elements, they may lack the old kernels.
    """
    if weights is None:
        return []
    names = [*weights.new_classifier]
    if weights.elements:
        names += [f"{name}.{_WEIGHT}" for layer in draft.layers for name in layer.names]
    return names


def translated_elements(
    weights: RequestWeights | None,
    draft: DraftPlan,
    model: nn.Module,
    version: AuthorsVersion | None,
) -> dict[str, Tensor] | None:
    """Return weights, positions and sigmas of the plan's layers, by name in the converted model.

    The result is None if the weights have no elements.

    Raises:
        CheckpointError: The elements do not fit the plan's layers, they are of another version, or
            a convolution would transform them.
    """
    if weights is None or not weights.elements:
        return None
    where = weights.where
    if version is not None and _have_sigma(weights):
        raise CheckpointError(
            f"{where}: has {_SIGMA} entries, so it is of version max or gauss "
            f"(interpolation triangle or gaussian); version {version} is for files without {_SIGMA}"
        )
    state: dict[str, Tensor] = {}
    for layer in draft.layers:
        conv = model.get_submodule(layer.name)
        if (find_traits(conv) or PLAIN).transform_weight:
            raise CheckpointError(
                f"{where}: {layer.name} is a {type(conv).__name__}, "
                "which would transform the file's elements"
            )
        theirs = _find_elements(layer, weights)
        ours = _translate(layer, theirs, version or RELEASED_VERSION)
        _check_inside(layer, ours["positions"], where)
        for parameter, tensor in ours.items():
            owner = layer.name
            if parameter != "weight":
                owner = layer.owner or layer.name
            name = f"{owner}.{parameter}"
            if name in state and not torch.equal(state[name], tensor):
                raise CheckpointError(
                    f"{where}: {parameter} of {owner} and {layer.name} differ, "
                    f"so the layers of {layer.tie_group} cannot share them; use tie 'none'"
                )
            state[name] = tensor
    return state


def _find_elements(layer: LayerPlan, weights: RequestWeights) -> Mapping[str, Tensor]:
    """Return the layer's entries.

    Raises:
        CheckpointError: There are none, or their interpolation or shape differs, or a value is not
            finite.
    """
    name = next((name for name in layer.names if name in weights.elements), None)
    if name is None:
        raise CheckpointError(
            f"{weights.where}: has no elements for {layer.name}, which would be converted"
        )
    theirs = weights.elements[name]
    has_sigma = _SIGMA in theirs
    interpolation = find_interpolation(layer.interpolation)
    if has_sigma != interpolation.has_sigma or not interpolation.is_of_authors:
        subject = f"{weights.where}: {layer.name}"
        if has_sigma:
            raise CheckpointError(
                f"{subject} has a {_SIGMA}, so its interpolation is triangle (their version max) "
                "or gaussian (gauss), which the file does not say; state the interpolation"
            )
        raise CheckpointError(
            f"{subject} has no {_SIGMA}, so its interpolation is bilinear, "
            f"not {layer.interpolation}"
        )
    for entry, tensor in theirs.items():
        shape = layer.position_shape
        if entry == _WEIGHT:
            shape = shape[1:]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{weights.where}: {name}.{entry} has shape {tuple(tensor.shape)}, "
                f"the model needs {shape}"
            )
        problem = describe_non_finite(f"{name}.{entry}", tensor, mask=False)
        if problem is not None:
            raise CheckpointError(f"{weights.where}: {problem}")
    return theirs


def _translate(
    layer: LayerPlan, theirs: Mapping[str, Tensor], version: AuthorsVersion
) -> dict[str, Tensor]:
    """Translate a layer of the authors' package into the parameters of ours.

    Returns:
        "weight" (O, I, E); "positions" (A, O, I, E) from the window's centre, in our order of axes;
        and, if the layer has a sigma, "sigma" (A, O, I, E).
    """
    interpolation = find_interpolation(layer.interpolation)
    size = layer.dilated_size
    weight = theirs[_WEIGHT]
    is_v0 = version == "v0" and _SIGMA not in theirs
    axes = _AXES_OF_V0 if is_v0 else _AXES_OF_OTHERS
    # For each of our axes, its place in P. The tables state the inverse, but swaps are their own
    # inverse.
    order = list(axes[len(size)])
    # Half precision would round positions: 8 cells from the centre, by a sixteenth of a cell.
    dtype = torch.float32
    if theirs[_POSITIONS].dtype == torch.float64:
        dtype = torch.float64
    positions = theirs[_POSITIONS].to(dtype)[order]
    for axis, place in enumerate(order):
        # P[place] belongs to our axis `axis`, but DCLS adds half the size of axis `place` to it.
        positions[axis] += size[place] // 2 - size[axis] // 2
    ours = {"weight": weight, "positions": positions}
    sigma = torch.ones_like(positions)
    if _SIGMA in theirs:
        sigma = theirs[_SIGMA].to(dtype)[order].abs() + (interpolation.min_sigma or 0.0)
        ours["sigma"] = sigma
    if not is_v0:
        # The cells of our elements sum to exactly their weight, the cells of the authors' elements
        # to a little less.
        spread_sum = torch.ones_like(weight, dtype=torch.float64)  # (O, I, E)
        for axis, side in enumerate(size):
            cells = positions[axis].double() + side // 2  # from the window's first cell
            profile = PROFILES[layer.interpolation](cells, sigma[axis].double(), side)
            spread_sum *= profile.sum(-1)
        scaled_weight = weight.double() * spread_sum / (spread_sum + _NORMALISER)
        ours["weight"] = scaled_weight.to(weight.dtype)
    return ours


def _check_inside(layer: LayerPlan, positions: Tensor, where: str) -> None:
    """Refuse (CheckpointError) positions (A, O, I, E) outside the layer's window."""
    for axis, side in enumerate(layer.dilated_size):
        low, high = position_limits(side)
        excess = max(low - positions[axis].min().item(), positions[axis].max().item() - high)
        if excess > 0:
            raise CheckpointError(
                f"{where}: {layer.name} has elements {excess:g} cells outside of its window "
                f"{size_text(layer.dilated_size)}; use the window of its training, which has "
                f"at least {side + 2 * math.ceil(excess)} cells along axis {axis}"
            )
