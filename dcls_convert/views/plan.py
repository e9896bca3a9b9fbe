"""How a plan looks: a row for each stage. Formatting only."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from ..depthwise.geometry import size_text
from ..errors import printable
from ..tables import Name, counted, plain_table, span

if TYPE_CHECKING:
    from ..planning.plan import ConversionPlan, LayerPlan

OUTSIDE = "(no stage)"


def plan_view(plan: "ConversionPlan") -> RenderableType:
    """The plan for a terminal of 80 columns or more, or a notebook."""
    stages: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        stages.setdefault(layer.stage or OUTSIDE, []).append(layer)
    table = plain_table("Stage", "Layers", "Kernel", "Count", "Tie groups")
    for stage, layers in stages.items():
        sizes = [
            span({getattr(layer, size) for layer in layers}, size_text) for size in ("kernel_size", "dilated_size")
        ]
        ties = {layer.tie_group for layer in layers} - {None}
        counts = span({layer.kernel_count for layer in layers})
        table.add_row(Name(stage), str(len(layers)), " → ".join(sizes), counts, str(len(ties)))
    used, limit = (sum(getattr(unit, name) for unit in plan.budget) for name in ("used", "limit"))
    title = f"{counted(len(plan.layers), 'layer')} of {plan.model or 'the model'}{', folded' * plan.folded}"
    new = f"Budget ({plan.scope}): {used:,} of {limit:,} parameters used."
    kept = f"{counted(len(plan.skipped), 'convolution')} kept." if plan.skipped else ""
    return Group(Text(printable(title), style="bold"), Text(), table, Text(), *map(Text, filter(None, (new, kept))))
