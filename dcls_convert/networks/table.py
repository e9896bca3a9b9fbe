"""Tables of dependence: which outputs of a network change with which cells of its inputs.

For an input axis and the output axis that belongs to it, the table says which output cells change
with which input cells. Here, for a kernel of 3 cells:

              input cell
            0 1 2 3 4 5 6 7
          0 x x . . . . . .     A row: the inputs at which an output looks. Output 2 looks at inputs
  output  1 x x x . . . . .     1 to 3, so its displacements are -1, 0 and +1.
  cell    2 . x x x . . . .     A column: the outputs that change with an input. Outputs 2 to 4
          3 . . x x x . . .     change with input 3. One run with a changed cell shows a column.

The displacement of an entry is `input cell - stride * output cell`. The displacements of an
output's own place are the interval `AxisPair.own`: (0, 0) if input and output have equally many
cells.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..running.arguments import Arguments

MIN_CELLS = 4  # least length of an axis on which an order of cells can be seen
# Smallest change that counts, relative to the largest output. Rounding in a Fourier transform
# changes all outputs, but by less.
ROUNDING = 1e-6
SLACK = 1e-3  # for rounding: displacements are sums of few fractions

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A block of cells of one input, which get other values."""

    input: int  # index among the tensors of the arguments
    cells: dict[int, tuple[int, int]]  # axis -> first and last cell of the block

    def changed(self, arguments: Arguments) -> Arguments:
        """Return the arguments with other values in the block."""
        tensor = arguments.tensors()[self.input].clone()
        numbers = tensor
        if tensor.is_complex():
            numbers = torch.view_as_real(tensor)
        values = torch.unique(numbers)
        block = numbers
        for axis, (first, last) in self.cells.items():
            block = block.narrow(axis, first, last - first + 1)
        # Replace each value by the tensor's value half a ranking further on. It is a different
        # value, unless all values are equal.
        ranks = torch.searchsorted(values.double(), block.double().contiguous())
        block.copy_(values[(ranks + (len(values) + 1) // 2) % len(values)])
        return arguments.with_tensor(self.input, tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPair:
    """An input axis and an output axis, and how the output's cells lie over the input's."""

    input_axis: int
    output: int  # index among the outputs
    output_axis: int
    stride: Fraction = Fraction(1)  # input cells from one output cell to the next
    own: Interval = (0, 0)  # displacements of the output's own place
    is_cut: bool = False  # True if the output has too few cells to know its own place
    correlation: float = 0  # of input cells and the output cells that change with them


@dataclass(frozen=True, slots=True)
class DependenceColumn:
    """The outputs that change with a block of input cells."""

    probe: Probe
    changed: list[Tensor | None]  # a mask of each output; None if its shape changed

    def is_empty(self) -> bool:
        """True if nothing changed."""
        return all(mask is not None and not mask.any() for mask in self.changed)

    def without(self, other: "DependenceColumn") -> "DependenceColumn":
        """Return the column without the outputs that change in the other column."""
        masks: list[Tensor | None] = []
        for mask, known in zip(self.changed, other.changed, strict=True):
            masks.append(None if mask is None or known is None else mask & ~known)
        return DependenceColumn(self.probe, masks)

    def joined(self, other: "DependenceColumn") -> "DependenceColumn":
        """Return the column, to which the changed outputs of the other column are added."""
        masks: list[Tensor | None] = []
        for mask, more in zip(self.changed, other.changed, strict=True):
            masks.append(None if mask is None or more is None else mask | more)
        return DependenceColumn(self.probe, masks)

    def cells(self, output: int, axis: int, lines: Sequence[AxisPair] = ()) -> list[int]:
        """Return the cells along an axis of an output at which the output changes.

        With `lines` (the pairs of other axes), only cells that lie over the probe along those axes
        count. A PixelCNN needs them: it looks to both sides in the rows above, but to one side in
        its own row.
        """
        mask = self.changed[output]
        assert mask is not None
        for line in lines:
            first, last = self.probe.cells[line.input_axis]
            size = mask.shape[line.output_axis]
            low = math.ceil((first - line.own[1]) / float(line.stride) - SLACK)
            high = math.floor((last - line.own[0]) / float(line.stride) + SLACK)
            low = min(size, max(0, low))
            mask = mask.narrow(line.output_axis, low, max(0, min(size, high + 1) - low))
        slices = mask.movedim(axis, 0).reshape(mask.shape[axis], -1)
        return [int(cell) for cell in slices.any(1).nonzero()]

    def displacements(self, pair: AxisPair, lines: Sequence[AxisPair] = ()) -> list[Interval]:
        """Return the displacements of the block's first and last cell, for each changed output."""
        first, last = self.probe.cells[pair.input_axis]
        found = []
        for cell in self.cells(pair.output, pair.output_axis, lines):
            place = float(pair.stride) * cell
            found.append((first - place, last - place))
        return found


@dataclass(frozen=True, slots=True)
class DependenceTable:
    """Columns for some axes of one input."""

    input_shape: torch.Size
    columns: list[DependenceColumn]

    @property
    def axes(self) -> list[int]:
        """The axes of the input along which blocks were changed."""
        return list(self.columns[0].probe.cells)

    def shapes(self) -> dict[int, torch.Size]:
        """Return, by index, the shape of each output that has the same shape in all columns."""
        shapes = {}
        for output, mask in enumerate(self.columns[0].changed):
            if all(column.changed[output] is not None for column in self.columns):
                assert mask is not None
                shapes[output] = mask.shape
        return shapes

    def is_in_place(self, axis: int, output: int, output_axis: int) -> bool:
        """True if the input axis and the output axis have the same index, counted from the last."""
        return len(self.input_shape) - axis == len(self.shapes()[output]) - output_axis


def changes(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor | None]:
    """Return a mask of the changed values of each output; None if its shape has changed.

    Values that are not finite count as unchanged.
    """
    masks: list[Tensor | None] = [None] * len(before)
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        if old.shape != new.shape:
            continue
        finite = old.isfinite() & new.isfinite()
        values = torch.where(finite, old.double(), 0)
        difference = torch.where(finite, new.double() - values, 0).abs()
        rounding = min(ROUNDING, 10 * torch.finfo(old.dtype).eps)
        largest = torch.maximum(values.abs(), difference).amax() if values.numel() else 0
        masks[number] = difference > rounding * largest
    return masks
