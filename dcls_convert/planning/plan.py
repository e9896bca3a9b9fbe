"""A conversion plan as data, and its draft: the new layers, and which of them share positions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Self

from pydantic import Field

from ..errors import CheckpointError, PlanError
from ..geometry import Direction, size_text
from ..networks.sites import Skipped
from ..networks.source import ModelSource
from ..options import ERROR_SCOPE, Scope, Tie
from ..records import STRICT, JsonFraction, Record
from ..running.input_spec import InputSpec, check_inputs, checked_input_size, image_inputs
from ..text import count_text, counts_text, printable, range_text, short_list, shortened
from .kernel_counts import PlanBudget, solve_counts
from .layer_plan import LayerPlan, check_layer, position_groups
from .paths import matches_path, nearest_paths
from .tie_groups import without_lone_ties

PLAN_FORMAT = 1


@dataclass(frozen=True, kw_only=True, repr=False)  # no slots: `super()` would not find the class
class DraftPlan(Record):
    """A plan without kernel counts: the layers, their windows, and which share positions."""

    __pydantic_config__ = STRICT

    # Not Literal[1]: to Python, true is 1.
    format: Annotated[int, Field(ge=PLAN_FORMAT, le=PLAN_FORMAT)] = PLAN_FORMAT
    model: str | None  # "timm:convnext_tiny"; None for a module that only its user can build
    # Keyword arguments with which the model is built.
    model_args: dict[str, Any] = field(default_factory=dict)
    input_size: tuple[int, ...] | None  # (channels, *spatial) of one image
    rules: str  # file or name
    rules_text: str  # the rules as they were given
    tie: Tie
    share: JsonFraction  # number of new parameters allowed, as a share of the replaced weights
    layers: Annotated[tuple[LayerPlan, ...], Field(min_length=1)]
    skipped: tuple[Skipped, ...]
    params: int  # of the whole model, before the conversion
    macs: int | None  # of the whole model, before the conversion
    macs_note: str | None
    stages_from: str
    # Whether the layers are replaced by plain convolutions with their constructed kernels.
    folded: bool = False
    # What forward takes, if this is not a single image of normally distributed values.
    example_inputs: InputSpec | None = None
    not_measured: str | None = None  # see `ModelConvs`
    notes: tuple[str, ...] = ()  # what users should know about the new layers
    # Sentences on windows that grow because rules say so, and thereby let outputs see inputs that
    # they must not see.
    overruled: tuple[str, ...] = ()
    # The only side to which outputs look, as measured. None if outputs look to both sides, or if
    # this was not measured.
    outputs_look: Direction | None = None

    def __post_init__(self) -> None:
        """Tell each layer which layer owns its positions, and whether it is folded."""
        first_of: dict[str, LayerPlan] = {}  # of each tie group
        layers = []
        for layer in self.layers:
            owner = None
            if layer.tie_group is not None:
                first = first_of.setdefault(layer.tie_group, layer)
                owner = None if first is layer else first.name
            if layer.owner != owner or layer.folded != self.folded:
                layer = replace(layer, owner=owner, folded=self.folded)
            layers.append(layer)
        object.__setattr__(self, "layers", tuple(layers))

    def with_counts(self, chosen: Mapping[str, int] | None = None) -> "ConversionPlan":
        """Return the plan, with a kernel count for each layer that has none yet.

        Args:
            chosen: Counts that were chosen by errors, for the layers without counts, by name. If it
                is None, these layers get one count: the largest that the budget has room for.
        """
        decided = {option.name: getattr(self, option.name) for option in fields(DraftPlan)}
        layers = []
        for layer in self.layers:
            if chosen is not None and layer.name in chosen:
                layer = replace(layer, kernel_count=chosen[layer.name])
            layers.append(layer)
        decided["layers"], budget = solve_counts(layers, self.share)
        scope: Scope = "model" if chosen is None else ERROR_SCOPE
        return ConversionPlan(**decided, scope=scope, budget=budget)

    @property
    def source(self) -> ModelSource | None:
        """What builds the unconverted model; None if only its user can."""
        if self.model is None:
            return None
        return ModelSource(name=self.model, args=self.model_args)

    @property
    def inputs(self) -> InputSpec | None:
        """What forward takes; None if not known."""
        if self.example_inputs is None and self.input_size is not None:
            return image_inputs(self.input_size)
        return self.example_inputs

    @property
    def dilated_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The windows of the layers: distinct values, sorted."""
        return tuple(sorted({layer.dilated_size for layer in self.layers}))

    @property
    def growth_of_mixed_kernels(self) -> int | None:
        """Cells that each window adds to its kernel's extent, if kernels have several extents.

        None if all kernels have one extent, because the window's size then says the same, or if
        windows grow by different amounts.
        """
        extents: set[int] = set()
        growths: set[int] = set()
        for layer in self.layers:
            extents.update(layer.learnt_extents)
            growths.update(layer.growths)
        if len(extents) == 1 or len(growths) > 1:
            return None
        return growths.pop()


@dataclass(frozen=True, kw_only=True, repr=False)
class ConversionPlan(DraftPlan):
    """Everything that the conversion decides; enough to rebuild the converted model."""

    scope: Scope
    budget: PlanBudget

    def with_counts(self, chosen: Mapping[str, int] | None = None) -> "ConversionPlan":
        """Return the plan itself: all its layers have their counts."""
        return self

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "the plan") -> Self:
        """Read a plan that `to_json` wrote.

        Raises:
            CheckpointError: The text is damaged, of a newer version, or contradicts itself. The
                message begins with `where`.
        """
        plan = super().from_json(text, where)
        try:
            _check_plan(plan)
        except PlanError as error:
            raise CheckpointError(f"{where}: {error}") from None
        return plan

    @classmethod
    def from_dict(cls, data: object, where: str = "the plan") -> Self:
        """Read a plan from what `to_dict` returned.

        Raises:
            CheckpointError: See `from_json`.
        """
        return cls.from_json(json.dumps(data), where)

    def without(self, paths: str | Sequence[str]) -> "ConversionPlan":
        """Return the plan without some of its layers, which then stay as they are in the model.

        The other layers keep their windows and counts. A layer that is left alone in its tie group
        gets its own positions. The budget is the budget for the layers that remain.

        Args:
            paths: Qualified name of a module, to leave out all its layers; a pattern for names of
                layers, such as "dec1.*"; or a list of these.

        Raises:
            PlanError: A path is not a string, or matches no layer of the plan; or no layer would
                remain.
        """
        patterns = _as_patterns(paths)
        self._check_known(patterns)
        kept = []
        removed = []
        for layer in self.layers:
            if matches_path(layer.names, patterns):
                reason = f"left out of the plan by {' or '.join(map(shortened, patterns))}"
                kind = f"Conv{layer.dims}d"
                removed.append(Skipped(name=layer.name, type=kind, reason=reason))
            else:
                kept.append(layer)
        if not kept:
            raise PlanError(f"without {short_list(patterns)}, no layer of the plan would remain")
        return replace(self.with_layers(kept), skipped=(*self.skipped, *removed))

    def untied(self, name: str) -> "ConversionPlan":
        """Return the plan in which a layer, by its name, has positions of its own.

        The budget counts these positions, too.
        """
        self._check_known([name])
        layers = []
        for layer in self.layers:
            layers.append(replace(layer, tie_group=None) if layer.name == name else layer)
        return self.with_layers(layers)

    def with_errors(
        self, kernel_errors: Mapping[str, float], output_errors: Mapping[str, float]
    ) -> "ConversionPlan":
        """Return the plan with the errors that the start left in its layers, by layer name."""
        if not kernel_errors and not output_errors:
            return self
        layers = []
        for layer in self.layers:
            kernel_error = kernel_errors.get(layer.name)
            output_error = output_errors.get(layer.name)
            layers.append(replace(layer, fit_error=kernel_error, output_error=output_error))
        return replace(self, layers=tuple(layers))

    def with_layers(self, layers: Sequence[LayerPlan]) -> "ConversionPlan":
        """Return the plan with only the given layers, and the budget for them.

        A layer that is left alone in its tie group gets its own positions.
        """
        solved, budget = solve_counts(without_lone_ties(layers), self.share)
        return replace(self, layers=solved, budget=budget)

    def _check_known(self, patterns: Sequence[str]) -> None:
        """Raise PlanError for a pattern that matches no layer."""
        names: list[str] = []
        for layer in self.layers:
            names += layer.names
        for pattern in patterns:
            if not matches_path(names, [pattern]):
                near = short_list(nearest_paths([pattern], names), 6)
                raise PlanError(
                    f"the plan has no layer {shortened(pattern)}; the nearest are {near}"
                )

    def __repr__(self) -> str:
        """The layers in one sentence; the report that `predict_report` makes has the costs."""
        kernels = range_text((layer.kernel_size for layer in self.layers), size_text)
        windows = range_text(self.dilated_sizes, size_text)
        counts = counts_text(self.kernel_counts, "element")
        return (
            f"Plan for {printable(self.model or 'a model')}: "
            f"{count_text(len(self.layers), 'layer')}, {kernels} → {windows}, "
            f"{counts} per kernel; {count_text(len(self.skipped), 'convolution')} kept. "
            "predict_report(plan) shows the costs."
        )

    @property
    def kernel_counts(self) -> tuple[int, ...]:
        """The kernel counts of the layers: distinct values, sorted."""
        return tuple(sorted({layer.kernel_count for layer in self.layers}))


def _as_patterns(paths: str | Sequence[str]) -> list[str]:
    """Return the paths as a list; raise PlanError if they are neither a string nor strings."""
    if isinstance(paths, str):
        return [paths]
    if not isinstance(paths, Iterable) or not all(isinstance(path, str) for path in paths):
        raise PlanError(
            f"paths: found {shortened(repr(paths))}; "
            "give a module's name, a pattern or a list of these"
        )
    return list(paths)


def _check_plan(plan: ConversionPlan) -> None:
    """Raise PlanError for impossible inputs or layers, or ties of layers that are not alike."""
    if plan.input_size is not None:
        checked_input_size(plan.input_size)
    if plan.example_inputs is not None:
        check_inputs(plan.example_inputs)
    for layer in plan.layers:
        check_layer(layer)
    for group in position_groups(plan.layers):
        shapes = set()
        for layer in group:
            window = (layer.dilated_size, layer.grow, layer.dense_axes, layer.interpolation)
            shapes.add((layer.position_shape, window))
        if len(shapes) > 1:
            raise PlanError(
                f"tie group {shortened(str(group[0].tie_group))}: its layers have {len(shapes)} "
                "different shapes"
            )
