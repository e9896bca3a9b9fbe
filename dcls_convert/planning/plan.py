"""A conversion plan as data: what becomes what, what is tied; to and from JSON."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field

from ..depthwise.geometry import check_cells, check_window, extent
from ..errors import CheckpointError, PlanError, listed, one_line, shown
from ..layers.interpolation import find_interpolation
from ..networks.sites import OldConv, Skipped
from ..networks.stages import common_parent
from ..options import Scope, Tie
from ..records import Record
from ..tables import as_html
from .budget import BudgetUnit

PLAN_FORMAT = 1
_STRICT = ConfigDict(strict=True, extra="forbid")
_FOLLOWING = {
    "layers",
    "tie_groups",
    "budget",
    "skipped",
}  # follow from layers and options, or are compared alone


def taken_from(record: object, kind: type) -> dict[str, Any]:
    """Those fields of the dataclass `kind` that `record` has too, with its values."""
    return {
        part.name: getattr(record, part.name) for part in fields(kind) if hasattr(record, part.name)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan(OldConv):
    """One convolution, and the DCLS layer that takes its place."""

    __pydantic_config__ = _STRICT

    dilated_size: tuple[int, ...]
    dense_axes: tuple[int, ...]
    interpolation: str
    kernel_count: int
    tie_group: str | None  # None: positions of its own
    rule: str  # what the rule that claimed it is called

    @property
    def shared_parameters(self) -> tuple[str, ...]:  # by the layers of a tie group
        return (
            ("positions", "sigma")
            if find_interpolation(self.interpolation).has_sigma
            else ("positions",)
        )

    @property
    def position_shape(self) -> tuple[int, ...]:
        """(A, O, I, *dense axes, E)."""
        dense = [self.dilated_size[axis] for axis in self.dense_axes]
        learnt = len(self.dilated_size) - len(dense)
        return (
            learnt,
            self.out_channels,
            self.in_channels // self.groups,
            *dense,
            self.kernel_count,
        )

    @property
    def lines(self) -> int:  # what one more element costs in weights
        return math.prod(self.position_shape[1:-1])

    @property
    def extents(self) -> tuple[int, ...]:  # cells that the old kernel spans, on each axis
        return tuple(map(extent, self.kernel_size, self.dilation))

    @property
    def cells(
        self,
    ) -> int:  # of the window along the learnt axes: the most elements that a kernel can use
        return math.prod(
            side for axis, side in enumerate(self.dilated_size) if axis not in self.dense_axes
        )

    @property
    def coordinates(
        self,
    ) -> int:  # learnable ones of one element: its position, and sigma if it has one
        return self.position_shape[0] * len(self.shared_parameters)

    @property
    def folded_weights(self) -> int:  # of the plain convolution with the constructed kernel
        return self.lines * self.cells

    @property
    def position_params(self) -> int:  # positions and sigma, shared by the tie group
        return self.lines * self.kernel_count * self.coordinates


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounts:
    """Kernel counts of elements that exist already, for all layers to convert; nothing is left to
    solve.
    """

    source: str  # "checkpoint weights.pth", for messages
    counts: Mapping[str, int]  # by the layer's name
    solved: bool = False  # for these layers; else a tie group of the elements' makers had one count


@dataclass(frozen=True, kw_only=True, slots=True)
class TieGroup:
    """Layers that share their positions, and the module on which the positions are registered."""

    __pydantic_config__ = _STRICT

    name: str
    owner: str  # qualified name of the lowest module that holds the group; "" is the model itself
    parameters: dict[str, str]  # "positions" (and "sigma") -> the parameter's name on the owner
    layers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing in which a plan differs from another; values are as in their JSON."""

    what: str  # a field of the plan or of a layer; "layers" for layers that one of them lacks
    one: Any
    other: Any
    layers: tuple[str, ...] = ()  # in which it differs so; none for the plan as a whole


@dataclass(frozen=True, kw_only=True)  # no slots: `super()` would not find the class
class ConversionPlan(Record):
    """Everything that the conversion decides; enough to rebuild the converted model from its
    source.
    """

    __pydantic_config__ = _STRICT

    format: Annotated[int, Field(ge=PLAN_FORMAT, le=PLAN_FORMAT)] = (
        PLAN_FORMAT  # not Literal[1]: true is 1 to Python
    )
    model: str | None  # "timm:convnext_tiny"; None for a module that only its user can build
    model_args: dict[str, Any] = field(
        default_factory=dict
    )  # keyword arguments with which it is built
    input_size: tuple[int, ...] | None
    rules: str  # file or name
    rules_text: str  # the rules as they were given
    scope: Scope
    tie: Tie
    share: Fraction  # of the replaced weights that the new parameters may use
    layers: tuple[LayerPlan, ...]
    tie_groups: tuple[TieGroup, ...]
    skipped: tuple[Skipped, ...]
    budget: tuple[BudgetUnit, ...]
    params: int  # of the whole model, before
    macs: int | None  # of the whole model, before
    macs_note: str | None
    stages_from: str
    folded: (
        bool  # whether plain convolutions with the constructed kernels stand in the layers' places
    )

    @property
    def windows(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """(dilated size, dense axes) of each layer, under all its names."""
        return {
            name: (layer.dilated_size, layer.dense_axes)
            for layer in self.layers
            for name in layer.names
        }

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "the plan") -> Self:
        """The plan that `to_json` wrote. CheckpointError, from `where`: damaged, newer, or
        contradicts itself.
        """
        plan = super().from_json(text, where)
        try:
            for layer in plan.layers:
                _check_layer(layer)
            for group in plan.tie_groups:
                layers = [layer for layer in plan.layers if layer.tie_group == group.name]
                shapes = {
                    (layer.position_shape, layer.dilated_size, layer.interpolation)
                    for layer in layers
                }
                if len(shapes) > 1:
                    raise PlanError(
                        f"tie group {shown(group.name)}: its layers have {len(shapes)} different "
                        "shapes"
                    )
            if plan.tie_groups != named_owners(plan.layers):
                names = listed(group.name for group in plan.tie_groups)
                raise PlanError(f"the plan's tie groups are not those of its layers: {names}")
        except PlanError as error:
            raise CheckpointError(f"{where}: {error}") from error
        return plan

    @classmethod
    def from_dict(cls, data: object, where: str = "the plan") -> Self:
        """As `from_json`, of what `to_dict` gave."""
        return cls.from_json(json.dumps(data), where)

    @property
    def hash(self) -> str:
        """SHA-256 over the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def diff(self, other: "ConversionPlan") -> tuple[Difference, ...]:
        """What differs between this plan and another: first as a whole, then in layers, equal
        differences together.
        """
        mine, theirs = self.to_dict(), other.to_dict()
        changed = [name for name in mine if name not in _FOLLOWING and mine[name] != theirs[name]]
        differences = [
            Difference(what=name, one=mine[name], other=theirs[name]) for name in changed
        ]
        ours, others = (
            {layer["names"][0]: layer for layer in plan["layers"]} for plan in (mine, theirs)
        )
        for there, layers, lacking in ((True, ours, others), (False, others, ours)):
            if missing := tuple(name for name in layers if name not in lacking):
                differences.append(
                    Difference(what="layers", one=there, other=not there, layers=missing)
                )
        alike: dict[str, list[str]] = {}
        for name in (name for name in ours if name in others):
            for what, value in ours[name].items():
                if value != others[name][what]:
                    alike.setdefault(json.dumps([what, value, others[name][what]]), []).append(name)
        for key, names in alike.items():
            what, one, another = json.loads(key)
            differences.append(Difference(what=what, one=one, other=another, layers=tuple(names)))
        return tuple(differences)

    def _repr_html_(self) -> str:
        """The plan in a notebook: the report that it predicts."""
        from ..views.report import plan_view

        return as_html(plan_view(self))

    def group(self, name: str) -> TieGroup:
        return next(group for group in self.tie_groups if group.name == name)


def named_owners(layers: Sequence[LayerPlan]) -> tuple[TieGroup, ...]:
    """The tie groups, each on the lowest module that holds its layers, under names that no other
    group has there.
    """
    groups: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        if layer.tie_group is not None:
            groups.setdefault(layer.tie_group, []).append(layer)
    taken: Counter[str] = Counter()
    ties = []
    for name, members in groups.items():
        names = tuple(layer.name for layer in members)
        owner = common_parent(names)
        taken[owner] += 1
        suffix = f"_{taken[owner]}" if taken[owner] > 1 else ""
        parameters = {
            parameter: f"dcls_{parameter}{suffix}" for parameter in members[0].shared_parameters
        }
        ties.append(TieGroup(name=name, owner=owner, parameters=parameters, layers=names))
    return tuple(ties)


def _check_layer(layer: LayerPlan) -> None:
    if not layer.names:
        raise PlanError("a layer: has no name")
    try:
        for name, channels in (
            ("in_channels", layer.in_channels),
            ("out_channels", layer.out_channels),
        ):
            if min(channels, layer.groups) < 1 or channels % layer.groups:
                raise PlanError(
                    f"{name} {channels} must be a positive multiple of its groups, {layer.groups}"
                )
        find_interpolation(layer.interpolation)
        if not set(layer.dense_axes) < set(range(dims := len(layer.kernel_size))):
            raise PlanError(
                f"dense axes {layer.dense_axes} are not axes of a {dims}-D kernel, or leave none "
                "to be learnt"
            )
        check_window(layer.kernel_size, layer.dilation, layer.dilated_size, layer.dense_axes)
        check_cells(layer.out_channels * layer.in_channels // layer.groups, layer.dilated_size)
        if not 1 <= layer.kernel_count <= layer.cells:
            most = f"the {layer.cells} cells of its window"
            raise PlanError(f"kernel count {layer.kernel_count} must be from 1 to {most}")
    except ValueError as error:
        raise PlanError(f"{shown(layer.name)}: {one_line(error)}") from error
