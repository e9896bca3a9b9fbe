"""A row for each stage, of a plan or a report: its replaced layers together; and how a plan looks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..depthwise.geometry import size_text
from ..planning.plan import ConversionPlan
from ..reports.report import Change
from ..tables import Column, Table, counted, span, title


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRow:
    """The replaced layers of one stage; or one layer, where each has a row of its own."""

    layers: tuple[Any, ...]  # LayerPlan or LayerReport; the latter alone has costs and errors
    name: str = ""

    @property
    def kernels(self) -> str:
        """ "7x7 → 17x17"."""
        return " → ".join(span(self._all(size), size_text) for size in ("kernel_size", "dilated_size"))

    @property
    def counts(self) -> str:
        """ "34", or "29..40"."""
        return span(self._all("kernel_count"))

    @property
    def params(self) -> Change:
        """With biases, and with positions, which count where they are first used."""
        return self._total("params")

    @property
    def macs(self) -> Change:
        """For one image; unknown where the model could not be traced."""
        return self._total("macs")

    @property
    def error(self) -> float | None:
        """The mean relative error of the kernels; None where they were not made from trained ones."""
        errors = [layer.fit_error for layer in self.layers if layer.fit_error is not None]
        return sum(errors) / len(errors) if errors else None

    def _all(self, name: str) -> set[Any]:
        return {getattr(layer, name) for layer in self.layers}

    def _total(self, unit: str) -> Change:
        before, after = ([getattr(layer, f"{unit}_{when}") for layer in self.layers] for when in ("before", "after"))
        return Change() if None in (*before, *after) else Change(before=sum(before), after=sum(after))


def stage_rows(layers: Iterable[Any]) -> list[StageRow]:
    """Rows of the layers of a plan or report, in the layers' order."""
    stages: dict[str, list[Any]] = {}
    for layer in layers:
        stages.setdefault(layer.stage or "(no stage)", []).append(layer)
    return [StageRow(name=name, layers=tuple(members)) for name, members in stages.items()]


COLUMNS: list[Column[StageRow]] = [
    Column("Stage", lambda row: row.name),
    Column("Layers", lambda row: len(row.layers)),
    Column("Kernel", lambda row: row.kernels, left=True),
    Column("Count", lambda row: row.counts),
]


def plan_view(plan: ConversionPlan) -> RenderableType:
    """The plan for a terminal of 80 columns or more, or a notebook."""
    used, limit = (sum(getattr(unit, name) for unit in plan.budget) for name in ("used", "limit"))
    head = title(f"{counted(len(plan.layers), 'layer')} of {plan.model or 'the model'}{', folded' * plan.folded}")
    lines = [f"Budget ({plan.scope}): {used:,} of {limit:,} parameters used."]
    lines += [f"{counted(len(plan.skipped), 'convolution')} kept."] * bool(plan.skipped)
    ties: Column[StageRow] = Column("Tie groups", lambda row: len({layer.tie_group for layer in row.layers} - {None}))
    return Group(head, Text(), Table([*COLUMNS, ties], stage_rows(plan.layers)), Text(), *map(Text, lines))
