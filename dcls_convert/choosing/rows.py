"""The rows of a sweep, one for each combination of a window and a count or budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..geometry import size_text
from ..text import range_text

RowStatus = Literal["original", "done", "does not fit"]
RequestedSize = int | tuple[int, ...] | str  # cells, or a growth such as "+4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A window, with a count or a budget."""

    size: RequestedSize  # `dilated_size` of the planning options
    kernel_count: int | None = None  # None: solved for the budget
    budget: float | None = None  # percent; None for the default, or if a count is given


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One combination, or the original. A value that is None or empty is unknown."""

    asked: Combination | None  # None for the original
    status: RowStatus
    reason: str | None = None  # why it does not fit; one line
    # Command line, or Python call, that converts with this combination.
    command: str | None = None
    layers: int = 0  # number of layers replaced
    layers_beyond_map: int = 0  # number of layers whose windows have cells that never meet the map
    dilated_sizes: tuple[tuple[int, ...], ...] = ()  # distinct values, sorted
    kernel_counts: tuple[int, ...] = ()  # distinct values, sorted
    elements: int | None = None  # in all kernels
    params: int | None = None  # of the whole model
    macs: int | None = None  # of the whole model, for one image

    @property
    def window(self) -> str:
        """ "17x17", or "7x7..9x9" for several windows; for a growth, "+4 (7x7..9x9)".

        If nothing was planned, it is the requested size.
        """
        if self.asked is None:
            return "original"
        size = self.asked.size
        planned = range_text(self.dilated_sizes, size_text)
        if isinstance(size, str):
            if not planned:
                return size
            return f"{size} ({planned})"
        if planned:
            return planned
        if isinstance(size, int):
            return str(size)
        return size_text(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The recommended size."""

    row: int | None = None  # index of the row; None if none is recommended
    why: str  # the reason, in words; without a row, why none is recommended
    command: str | None = None  # command line, or Python call, that converts to this size


def done_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the rows that were planned, without the original."""
    return [row for row in rows if row.status == "done"]


def percent_increase(value: float, original: float) -> float:
    """Return the percentage by which a value exceeds the original's."""
    return 100 * (value / original - 1)
