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
from .layout import CHARACTERS_PER_INCH, LINE, MARGIN, add_axes, add_text, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# Inches.
LEAST_PANEL_WIDTH = 1.9  # with the panel's numbers and label
HEIGHT = 1.85
PANEL_LEFT = 0.45  # numbers and label beside a panel
BOTTOM = 0.35  # numbers and label below a panel
TOP = 0.2  # a factor such as 1e-3 above a panel
SPACE = 0.1

LONGEST_NAME = 30  # characters, in a legend
HANDLE = 8  # characters as wide as a legend's line sample, with its space
# Field of `TrackedPositions` -> label of its axis.
CURVES = {
    "speed": "speed (cells per {unit})",
    "spread": "spread (cells)",
    "border_share": "share at the border",
}
LINE_STYLES = ("-", "--", ":")
# Mark every point: a known value between unknown ones has no line to show it.
POINTS: dict[str, Any] = {"marker": ".", "markersize": 2.5, "linewidth": 0.9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Panels of speed, spread and border share. A sentence replaces a panel with nothing to see.

    With one training, each curve is a positions tensor. With several, each curve is a training: the
    mean over its positions tensors.
    """

    names: Sequence[str]  # of the positions tensors, in the order of the records
    shown: Sequence[int]  # numbers of the tensors that have a curve, if there is one training
    trainings: Sequence[Training]  # at least one; all count the same unit
    width: float  # of the figure, in inches

    @property
    def height(self) -> float:
        """The height that the panels need, in inches."""
        text = self._text()
        text_lines = text.count("\n") + 1 if text else 0
        return self._rows * HEIGHT + (text_lines + self._legend_rows) * LINE + SPACE

    def draw(self, part: "SubFigure") -> None:
        """Draw the panels on a part of a figure that has this height."""
        add_text(part, self._text())
        fields = self._fields
        lines = []
        for number, field in enumerate(fields):
            row, column = divmod(number, self._columns)
            width = self.width / self._columns
            axes = add_axes(
                part,
                column * width + PANEL_LEFT,
                self._legend_rows * LINE + SPACE + (self._rows - 1 - row) * HEIGHT + BOTTOM,
                width - PANEL_LEFT - SPACE,
                HEIGHT - BOTTOM - TOP,
            )
            lines = self._draw_panel(axes, field)
        if lines:
            part.legend(
                handles=lines, loc="lower center", ncols=self._legend_columns, frameon=False
            )

    def _draw_panel(self, axes: "Axes", field: str) -> list[Any]:
        """Draw the curves of a field, and return them."""
        unit = self.trainings[0].unit
        lines = []
        for label, colour, style, steps, values in self._curves(field):
            lines += axes.plot(steps, values, style, color=colour, label=label, **POINTS)
        axes.set(xlabel=unit, ylabel=CURVES[field].format(unit=unit))
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.update_datalim([(self.trainings[0].steps[0], 0)])  # top margin above 0
        axes.set_ylim(bottom=0)
        # Short numbers, such as 2.5 with "1e-3" above, so that the label beside them fits.
        axes.ticklabel_format(axis="y", scilimits=(-2, 3))
        return lines

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
    def _fields(self) -> list[str]:
        return [field for field in CURVES if self._constant_value(field) is None]

    def _constant_value(self, field: str) -> str | None:
        """Return the one value of all records, "unknown" or "0"; None if curves show something."""
        values = torch.cat([training.values(field).flatten() for training in self.trainings])
        known = values[~values.isnan()]
        if len(known) == 0:
            return "unknown"
        return None if known.any() else "0"

    def _text(self) -> str:
        """Return the sentences above the panels, in lines."""
        sentences = []
        if len(self.trainings) > 1 and len(self.names) > 1:
            sentences.append(f"Each line is the mean over {len(self.names)} positions tensors.")
        for field, label in CURVES.items():
            constant = self._constant_value(field)
            if constant is not None:
                name = label.partition(" (")[0].capitalize()
                sentences.append(f"{name}: {constant} in all records.")
        return wrapped(" ".join(sentences), self.width)

    @property
    def _columns(self) -> int:
        max_columns = max(int(self.width / LEAST_PANEL_WIDTH), 1)
        return max(min(max_columns, len(self._fields)), 1)

    @property
    def _rows(self) -> int:
        return math.ceil(len(self._fields) / self._columns)

    @property
    def _legend_columns(self) -> int:
        longest = max(map(len, self._labels)) + HANDLE
        room = int((self.width - 2 * MARGIN) * CHARACTERS_PER_INCH)
        return min(max(room // longest, 1), len(self._labels))

    @property
    def _legend_rows(self) -> int:
        return math.ceil(len(self._labels) / self._legend_columns) + 1
