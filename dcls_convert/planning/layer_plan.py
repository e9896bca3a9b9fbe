"""One convolution of a plan: the DCLS layer that replaces it, with its shapes, counts and costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from ..errors import PlanError
from ..geometry import (
    Grow,
    Padding,
    Pair,
    along_learnt_axes,
    check_cells,
    check_window,
    grid_positions,
    grow_of_axes,
    learnt_axes,
    old_centre,
    position_limits,
)
from ..layers.interpolation import find_interpolation
from ..networks.sites import OldConv
from ..text import one_line, shortened


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan(OldConv):
    """One convolution, and the DCLS layer that replaces it."""

    # Empty in plans of earlier versions, which did not state these fields. The fields are not
    # compared, so that an earlier plan equals the same plan made now.
    stride: tuple[int, ...] = field(default=(), compare=False)
    padding: Padding = field(default=(), compare=False)
    padding_mode: str = field(default="", compare=False)
    transform: str = field(default="", compare=False)

    dilated_size: tuple[int, ...]
    dense_axes: tuple[int, ...]
    interpolation: str
    kernel_count: int  # UNSOLVED (0) in a draft, until it is decided
    # True if a rule or an option states the count. False if the count is chosen, or is the number
    # of elements in existing weights.
    count_is_stated: bool
    tie_group: str | None  # None if the layer shares its positions with no other layer
    rule: str  # label of the rule that claimed it
    # How the window grows along each axis ("both" where it does not); empty if all are "both".
    grow: tuple[Grow, ...] = ()

    # The fields below are not in the plan's JSON. A plan sets the first two of its layers.

    # Name of the layer whose positions this layer uses, the first of the tie group. None if this
    # layer has the positions.
    owner: Annotated[str | None, Field(exclude=True)] = None
    # Whether the layer is replaced by a plain convolution with the constructed kernel.
    folded: Annotated[bool, Field(exclude=True)] = False
    # Relative errors that the start left, if there was a start: of the kernel and, on images of a
    # calibration, of the outputs. Plans with and without errors are equal.
    fit_error: Annotated[float | None, Field(exclude=True)] = field(default=None, compare=False)
    output_error: Annotated[float | None, Field(exclude=True)] = field(default=None, compare=False)

    @property
    def position_attributes(self) -> tuple[str, ...]:
        """The names of the parameters that say where elements are; a tie group shares them."""
        return find_interpolation(self.interpolation).position_parameters

    @property
    def group_name(self) -> str:
        """The name of the tie group, or of the layer itself if it is not tied."""
        return self.tie_group or self.name

    @property
    def position_names(self) -> dict[str, str]:
        """Attribute -> name in a state dict, if this layer is the first of its group."""
        return {attribute: f"{self.name}.{attribute}" for attribute in self.position_attributes}

    @property
    def position_shape(self) -> tuple[int, ...]:
        """(A, O, I, *dense axes, E): learnt axes, channels, cells of dense axes, elements."""
        return (
            len(self.dilated_size) - len(self.dense_axes),
            self.out_channels,
            self.in_channels // self.groups,
            *[self.dilated_size[axis] for axis in self.dense_axes],
            self.kernel_count,
        )

    @property
    def lines(self) -> int:
        """Kernel lines of the layer (see `layers/elements.py`): O x I x dense cells.

        One more element per kernel needs this many weights.
        """
        lines = self.out_channels * (self.in_channels // self.groups)
        for axis in self.dense_axes:
            lines *= self.dilated_size[axis]
        return lines

    @property
    def old_cells(self) -> int:
        """Cells of the old kernel along the learnt axes."""
        return math.prod(along_learnt_axes(self.kernel_size, self.dense_axes))

    @property
    def grow_of_axes(self) -> tuple[Grow, ...]:
        """How the window grows, along each axis."""
        return grow_of_axes(self.grow, self.dims)

    @property
    def old_limits(self) -> list[Pair]:
        """Positions of the old kernel's first and last cell, along each learnt axis."""
        limits = []
        for axis in self.learnt_axes:
            grid = grid_positions(
                self.kernel_size[axis],
                self.dilation[axis],
                self.dilated_size[axis],
                self.grow_of_axes[axis],
            )
            limits.append((grid[0], grid[-1]))
        return limits

    @property
    def old_centre(self) -> tuple[float, ...]:
        """`geometry.old_centre` along each learnt axis."""
        return tuple(map(old_centre, self.old_limits, self.learnt_grow))

    @property
    def exceeds_map(self) -> bool:
        """Whether the window has cells that never lie on the input map."""
        useful = self.useful_limits(self.dilated_size, self.dense_axes, self.grow)
        return useful != list(map(position_limits, self.learnt_size))

    @property
    def learnt_axes(self) -> tuple[int, ...]:
        """The axes along which elements have a position."""
        return learnt_axes(self.dims, self.dense_axes)

    @property
    def learnt_grow(self) -> list[Grow]:
        """How the window grows along each learnt axis."""
        return [self.grow_of_axes[axis] for axis in self.learnt_axes]

    @property
    def learnt_size(self) -> tuple[int, ...]:
        """Size of the window along each learnt axis, in cells."""
        return along_learnt_axes(self.dilated_size, self.dense_axes)

    @property
    def learnt_extents(self) -> tuple[int, ...]:
        """The extents along the learnt axes."""
        return along_learnt_axes(self.extents, self.dense_axes)

    @property
    def growths(self) -> tuple[int, ...]:
        """How many cells the window adds to the old kernel's extent, on each learnt axis."""
        growths = []
        for length, old in zip(self.learnt_size, self.learnt_extents, strict=True):
            growths.append(length - old)
        return tuple(growths)

    @property
    def cells(self) -> int:
        """Cells of the window along the learnt axes: the most elements that a kernel can use."""
        return math.prod(self.learnt_size)

    @property
    def coordinates_per_element(self) -> int:
        """Learnable numbers of one element besides its weight: its position, and sigma if any."""
        learnt = len(self.dilated_size) - len(self.dense_axes)
        return learnt * len(self.position_attributes)

    @property
    def params_before(self) -> int:
        """Parameters of the old convolution, with bias."""
        return self.dense_weights + self._bias_params

    @property
    def params_after(self) -> int:
        """Parameters of the new layer, with bias."""
        return self.weight_params + self.position_params + self._bias_params

    @property
    def _bias_params(self) -> int:
        return self.out_channels if self.bias else 0

    @property
    def weight_params(self) -> int:
        """Weights of the elements; of a folded layer, all cells of the constructed kernels."""
        if self.folded:
            return self.lines * self.cells
        return self.lines * self.kernel_count

    @property
    def position_params(self) -> int:
        """Parameters of positions and sigma; tied ones count in the first layer of their group."""
        if self.folded or self.owner is not None:
            return 0
        return self.lines * self.kernel_count * self.coordinates_per_element

    @property
    def macs_before(self) -> int | None:
        """MACs of the old convolution for one image; None if not known."""
        return self.macs(self.kernel_size)

    @property
    def macs_after(self) -> int | None:
        """MACs of the constructed kernels for one image; None if not known."""
        return self.macs(self.dilated_size)


def position_groups(layers: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    """Group layers by the positions that they use; the first of a group owns them.

    A layer that is not tied is a group of its own. Groups are in the order of their first layers.
    """
    groups: dict[object, list[LayerPlan]] = {}
    for layer in layers:
        key = layer.names if layer.tie_group is None else layer.tie_group
        groups.setdefault(key, []).append(layer)
    return list(groups.values())


def common_useful_limits(layers: Sequence[LayerPlan]) -> list[Pair]:
    """Return the positions that are useful (`geometry.useful_limits`) in all layers of a group."""
    limits_of_layers = []
    for layer in layers:
        limits_of_layers.append(
            layer.useful_limits(layer.dilated_size, layer.dense_axes, layer.grow)
        )
    common = []
    for limits in zip(*limits_of_layers, strict=True):  # by axis
        lows, highs = zip(*limits, strict=True)
        common.append((max(lows), min(highs)))
    return common


def check_layer(layer: LayerPlan) -> None:
    """Raise PlanError, with the layer's name, for values that no layer can have."""
    try:
        _check_values(layer)
    except ValueError as error:
        raise PlanError(f"{shortened(layer.name)}: {one_line(error)}") from None


def _check_values(layer: LayerPlan) -> None:
    channels_of = {"in_channels": layer.in_channels, "out_channels": layer.out_channels}
    for name, channels in channels_of.items():
        if min(channels, layer.groups) < 1 or channels % layer.groups:
            raise PlanError(
                f"{name} {channels} must be a positive multiple of its groups, {layer.groups}"
            )
    find_interpolation(layer.interpolation)  # raises if it is unknown
    dims = len(layer.kernel_size)
    if not set(layer.dense_axes) < set(range(dims)):
        raise PlanError(
            f"dense axes {layer.dense_axes} are not axes of a {dims}-D kernel, "
            "or leave none to be learnt"
        )
    if len(layer.grow_of_axes) != dims:
        raise PlanError(f"grow states {len(layer.grow)} axes of a {dims}-D kernel")
    check_window(
        layer.kernel_size, layer.dilation, layer.dilated_size, layer.dense_axes, layer.grow
    )
    check_cells(layer.out_channels * layer.in_channels // layer.groups, layer.dilated_size)
    if not 1 <= layer.kernel_count <= layer.cells:
        raise PlanError(
            f"kernel count {layer.kernel_count} must be from 1 "
            f"to the {layer.cells} cells of its window"
        )
