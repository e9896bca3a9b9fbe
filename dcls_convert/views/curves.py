"""Curves of how elements moved in trainings, for the figure."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..text import shortened
from .history import Training
from .layout import CHARACTERS_PER_INCH, LINE, MARGIN, add_axes, add_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# Inches.
LEAST_PANEL_WIDTH = 1.9  # of a panel with its numbers and label
HEIGHT = 1.85
PANEL_LEFT = 0.45  # numbers and label beside a panel
BOTTOM = 0.35  # numbers and label below a panel
TOP = 0.2  # a factor such as 1e-3 above a panel
SPACE = 0.1

LONGEST_NAME = 30  # characters, in a legend
HANDLE = 8  # characters that are as wide as the line before a name, and the space around
# Fields of a `TrackedPositions`, and what they are.
CURVES = {
    "speed": "speed (cells per {unit})",
    "spread": "spread (cells)",
    "border_share": "share at the border",
}
LINE_STYLES = ("-", "--", ":")
# Points, since no line leads to a known value between unknown ones.
POINTS: dict[str, Any] = {"marker": ".", "markersize": 2.5, "linewidth": 0.9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Panels of speed, spread and border share.

    Of one training, each curve is a positions tensor. Of several, each is a training: the mean over
    its tensors.
    """

    names: Sequence[str]  # of the positions tensors, in the order of the records
    shown: Sequence[int]  # numbers of the tensors that have a curve, if there is one training
    trainings: Sequence[Training]  # at least one; all count the same unit
    width: float  # of the figure, in inches

    @property
    def height(self) -> float:
        """The height that they need, in inches."""
        text_lines = 1 if self._text else 0
        return self._rows * HEIGHT + (text_lines + self._legend_rows) * LINE + SPACE

    def draw(self, part: "SubFigure") -> None:
        """Draw them on a part of a figure that has their height."""
        add_text(part, self._text)
        for number, field in enumerate(CURVES):
            row, column = divmod(number, self._columns)
            width = self.width / self._columns
            axes = add_axes(
                part,
                column * width + PANEL_LEFT,
                self._legend_rows * LINE + SPACE + (self._rows - 1 - row) * HEIGHT + BOTTOM,
                width - PANEL_LEFT - SPACE,
                HEIGHT - BOTTOM - TOP,
            )
            self._draw_panel(axes, field)
        # All panels have the same lines.
        part.legend(
            handles=list(axes.lines), loc="lower center", ncols=self._legend_columns, frameon=False
        )

    def _draw_panel(self, axes: "Axes", field: str) -> None:
        """Draw the curves of a field."""
        unit = self.trainings[0].unit
        for label, colour, style, steps, values in self._curves(field):
            axes.plot(steps, values, style, color=colour, label=label, **POINTS)
        axes.set(xlabel=unit, ylabel=CURVES[field].format(unit=unit))
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.update_datalim([(self.trainings[0].steps[0], 0)])  # with 0, for the top margin
        axes.set_ylim(bottom=0)
        # Short numbers, such as 2.5 with "1e-3" above, so that the label beside them fits.
        axes.ticklabel_format(axis="y", scilimits=(-2, 3))

    def _curves(self, field: str) -> Iterator[tuple[str, Any, str, list[int], Tensor]]:
        """Return the label, colour, line style, steps and values of each curve."""
        import matplotlib

        styles = itertools.cycle(LINE_STYLES)
        if len(self.trainings) > 1:
            for number, training in enumerate(self.trainings):
                values = training.values(field).nanmean(1)
                yield self._labels[number], f"C{number}", next(styles), training.steps, values
            return
        (training,) = self.trainings
        tensor_values = training.values(field)
        # From dark, the first layers, to light. The lightest shades are left out.
        shades = torch.linspace(0, 0.85, len(self.shown))
        colours = matplotlib.colormaps["viridis"](shades.numpy())
        for label, number, colour in zip(self._labels, self.shown, colours, strict=True):
            yield label, colour, next(styles), training.steps, tensor_values[:, number]

    @property
    def _labels(self) -> list[str]:
        names = [training.name for training in self.trainings]
        if len(names) == 1:
            names = [self.names[number] for number in self.shown]
        return [shortened(name, LONGEST_NAME) for name in names]

    @property
    def _text(self) -> str:
        """What the lines do not say themselves."""
        if len(self.trainings) == 1 or len(self.names) == 1:
            return ""
        return f"Each line is the mean over {len(self.names)} positions tensors."

    @property
    def _columns(self) -> int:
        most = max(int(self.width / LEAST_PANEL_WIDTH), 1)
        return min(most, len(CURVES))

    @property
    def _rows(self) -> int:
        return math.ceil(len(CURVES) / self._columns)

    @property
    def _legend_columns(self) -> int:
        longest = max(map(len, self._labels)) + HANDLE
        room = int((self.width - 2 * MARGIN) * CHARACTERS_PER_INCH)
        return min(max(room // longest, 1), len(self._labels))

    @property
    def _legend_rows(self) -> int:
        return math.ceil(len(self._labels) / self._legend_columns) + 1
