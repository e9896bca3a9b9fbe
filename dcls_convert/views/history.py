"""How positions moved during training: the record of a `PositionTracker` as curves."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import CheckpointError
from ..planning.layer_plan import position_groups
from ..planning.plan import ConversionPlan
from ..text import short_list, shortened
from ..tuning.tracker import TrackRecord, read_track

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

# Fields of a `TrackedPositions`, and their labels.
CURVES = {
    "speed": "speed (cells per step)",
    "spread": "spread (cells)",
    "border_share": "share at the border",
}
LINE_STYLES = ("-", "--", ":")
LEGEND_COLUMNS = 4


def read_history(path: Path, plan: ConversionPlan) -> tuple[TrackRecord, ...]:
    """Return the records of a training, in the order of the plan's positions.

    Raises:
        CheckpointError: The file has no records, or they are of another model.
    """
    records = read_track(path)
    if not records:
        raise CheckpointError(f"{path}: has no records")
    names = [first.position_names["positions"] for first, *_ in position_groups(plan.layers)]
    for record in records:
        if not _are_names_of(list(record.positions), names):
            raise CheckpointError(
                f"{path}: is a record of another model; it follows {short_list(record.positions)}, "
                f"the checkpoint has {short_list(names)}"
            )
    return records


def _are_names_of(recorded: Sequence[str], names: Sequence[str]) -> bool:
    """True if the recorded names are these; a module around the network may add a prefix."""
    if len(recorded) != len(names):
        return False
    pairs = zip(recorded, names, strict=True)
    return all(f".{with_prefix}".endswith(f".{name}") for with_prefix, name in pairs)


def draw_history(part: "SubFigure", names: Sequence[str], records: Sequence[TrackRecord]) -> None:
    """Draw speed, spread and border share over the steps.

    Args:
        part: The part of the figure to draw on.
        names: Of the positions tensors, in the order of the records.
        records: At least one.
    """
    import matplotlib

    steps = [record.step for record in records]
    rows_of_steps = [list(record.positions.values()) for record in records]
    # From dark, the first layers, to light. The lightest shades are left out.
    shades = torch.linspace(0, 0.85, len(names))
    colours = matplotlib.colormaps["viridis"](shades.numpy())
    panels = part.subplots(1, len(CURVES))
    for panel, (field, label) in zip(panels, CURVES.items(), strict=True):
        styles = itertools.cycle(LINE_STYLES)
        for index, (name, colour, style) in enumerate(zip(names, colours, styles, strict=False)):
            heights = []
            for rows in rows_of_steps:
                height = getattr(rows[index], field)
                heights.append(math.nan if height is None else height)
            # With points, since no line leads to a known value between unknown ones.
            points = {"marker": ".", "markersize": 4}
            panel.plot(steps, heights, style, color=colour, label=shortened(name, 30), **points)
        panel.set(xlabel="step", ylabel=label)
        panel.locator_params(axis="x", integer=True, min_n_ticks=1)
        panel.update_datalim([(steps[0], 0)])  # so that the margin above is one of 0 to top
        panel.set_ylim(bottom=0)
    part.legend(handles=panels[0].lines, loc="outside lower center", ncols=LEGEND_COLUMNS)
