"""Which outputs of a network change with which cells of its inputs, as a table.

Along an axis of an input and the axis of an output that belongs to it, the table says which output
cells change with which input cells. Here, for a kernel of 3 cells:

              input cell
            0 1 2 3 4 5 6 7
          0 x x . . . . . .     A row is what an output cell looks at: output 2 looks at inputs 1 to
  output  1 x x x . . . . .     3, so its displacements are -1, 0 and +1.
  cell    2 . x x x . . . .     A column is what changes with an input cell: outputs 2 to 4 with
          3 . . x x x . . .     input 3. One run with a changed cell shows it.

The displacement of an entry is `input cell - stride * output cell`. The displacements of an
output's own place are the interval `AxisPair.own`: (0, 0) if it has as many cells as the input.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..running.arguments import Arguments

MIN_CELLS = 4  # along an axis; fewer have no order
# Relative to the largest output; rounding in a Fourier transform changes all outputs, by less.
ROUNDING = 1e-6
SLACK = 1e-3  # displacements are sums of few fractions

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
        # Half a ranking further on is another value, unless all are equal, and one of the tensor's.
        ranks = torch.searchsorted(values.double(), block.double().contiguous())
        block.copy_(values[(ranks + (len(values) + 1) // 2) % len(values)])
        return arguments.with_tensor(self.input, tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPair:
    """An axis of an input and one of an output, and how the output's cells lie over the input's."""

    input_axis: int
    output: int  # index among the outputs
    output_axis: int
    stride: Fraction = Fraction(1)  # input cells from one output cell to the next
    own: Interval = (0, 0)  # displacements of the place that may be the output's own
    is_cut: bool = False  # True if the output has fewer cells than there are places
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
        """Return the column without the outputs that change in another one."""
        masks: list[Tensor | None] = []
        for mask, known in zip(self.changed, other.changed, strict=True):
            masks.append(None if mask is None or known is None else mask & ~known)
        return DependenceColumn(self.probe, masks)

    def joined(self, other: "DependenceColumn") -> "DependenceColumn":
        """Return the column with the outputs that change in another one, too."""
        masks: list[Tensor | None] = []
        for mask, more in zip(self.changed, other.changed, strict=True):
            masks.append(None if mask is None or more is None else mask | more)
        return DependenceColumn(self.probe, masks)

    def cells(self, output: int, axis: int, lines: Sequence[AxisPair] = ()) -> list[int]:
        """Return the cells along an axis of an output at which something changes.

        With `lines`, the pairs of other axes, only what lies over the probe along these axes
        counts: a PixelCNN looks to both sides in the rows above its own, to one side in its own.
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
        """Return those of the first and the last cell of the block, for each changed output."""
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
        """Return the shape of each output that keeps it in all columns, by its index."""
        shapes = {}
        for output, mask in enumerate(self.columns[0].changed):
            if all(column.changed[output] is not None for column in self.columns):
                assert mask is not None
                shapes[output] = mask.shape
        return shapes

    def is_in_place(self, axis: int, output: int, output_axis: int) -> bool:
        """True if an axis of the input and one of an output are as many axes before the end."""
        return len(self.input_shape) - axis == len(self.shapes()[output]) - output_axis


def changes(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor | None]:
    """Return a mask of where each output differs; None if its shape does.

    Where an output is not finite, it counts as equal.
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
