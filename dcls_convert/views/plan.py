"""How a plan looks: a row for each stage."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from ..tables import Column, Table, counted, title
from .stages import COLUMNS, StageRow, stage_rows

if TYPE_CHECKING:
    from ..planning.plan import ConversionPlan

TIES: Column[StageRow] = Column("Tie groups", lambda row: len({layer.tie_group for layer in row.layers} - {None}))


def plan_view(plan: "ConversionPlan") -> RenderableType:
    """The plan for a terminal of 80 columns or more, or a notebook."""
    used, limit = (sum(getattr(unit, name) for unit in plan.budget) for name in ("used", "limit"))
    head = title(f"{counted(len(plan.layers), 'layer')} of {plan.model or 'the model'}{', folded' * plan.folded}")
    lines = [f"Budget ({plan.scope}): {used:,} of {limit:,} parameters used."]
    lines += [f"{counted(len(plan.skipped), 'convolution')} kept."] * bool(plan.skipped)
    return Group(head, Text(), Table([*COLUMNS, TIES], stage_rows(plan.layers)), Text(), *map(Text, lines))
