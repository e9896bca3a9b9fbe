"""A sweep as data, and as a table with notes on it."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from ..geometry import size_text
from ..records import Record
from ..reports.number_text import in_one_unit, with_separators
from ..tables import Column, Table, as_html, as_text, indented, title
from ..text import counts_text, range_text
from .rows import Recommendation, SweepRow, done_rows, percent_increase

# Signs in front of the rows of the table, which the styles of the rows repeat.
RECOMMENDED = ">"
UNPLANNED = "!"
SIGN_STYLES = {RECOMMENDED: "bold green", UNPLANNED: "yellow", "": ""}
PAPER = (
    "Only training shows the accuracy. In the paper, ConvNeXt was worse below 17x17 "
    "and no better above; ResNet-50 used 7x7."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep(Record):
    """All rows, the original first."""

    format: int = 1
    model: str
    trained: bool  # True if the network keeps trained weights; then no size is recommended
    input_size: tuple[int, ...] | None
    macs_note: str | None = None  # why MACs are not known
    rows: tuple[SweepRow, ...]
    added_macs: float  # percent that the recommended size may add to the original's MACs
    choice: Recommendation

    def __rich__(self) -> RenderableType:
        return python_view(self)

    __str__ = as_text
    _repr_html_ = as_html


def sweep_view(sweep: Sweep) -> RenderableType:
    """Return a sweep as it is shown in a terminal of at least 80 columns."""
    input_size = ""
    if sweep.input_size:
        input_size = f", input {size_text(sweep.input_size)}"
    table = Table(_columns(sweep), sweep.rows, style=lambda row: SIGN_STYLES[_sign(sweep, row)])
    return Group(title(sweep.model, input_size), Text(), table, Text(), *_notes(sweep))


def python_view(sweep: Sweep) -> RenderableType:
    """Return the table and notes, and what to call next."""
    parts = [sweep_view(sweep)]
    if sweep.choice.command is not None:
        parts += [Text(), indented(sweep.choice.command, by=4)]
    elif sweep.trained:
        parts.append(indented("trained=False recommends a size to train from random weights."))
    return Group(*parts)


def _sign(sweep: Sweep, row: SweepRow) -> str:
    """Return the sign in front of a row."""
    if sweep.choice.row is not None and row is sweep.rows[sweep.choice.row]:
        return RECOMMENDED
    if row.status == "does not fit":
        return UNPLANNED
    return ""


def _columns(sweep: Sweep) -> list[Column[SweepRow]]:
    """Return the columns; that of the number of layers only if it varies."""
    write_macs, macs_unit = in_one_unit(row.macs for row in sweep.rows)

    def added_macs(row: SweepRow) -> float | None:
        original = sweep.rows[0]
        if row.asked is None or row.macs is None or not original.macs:
            return None
        return percent_increase(row.macs, original.macs)

    def params_or_status(row: SweepRow) -> str:
        if row.params is None:
            return row.status
        return with_separators(row.params)

    columns: list[Column[SweepRow]] = [
        Column("  Window", lambda row: f"{_sign(sweep, row):1} {row.window}"),
        Column("Count", _counts),
        Column("Budget", lambda row: row.asked and row.asked.budget, "{:g} %".format),
    ]
    layer_counts = {row.layers for row in done_rows(sweep.rows)}
    if len(layer_counts) > 1:
        columns.append(Column("Layers", lambda row: row.layers or None))
    return [
        *columns,
        Column("Parameters", params_or_status),
        Column(f"MACs{macs_unit}", lambda row: row.macs, write_macs),
        Column("", added_macs, "{:+.1f} %".format),
    ]


def _counts(row: SweepRow) -> str:
    """Return the kernel counts, or the requested count if the row could not be planned."""
    planned = range_text(row.kernel_counts)
    if planned:
        return planned
    if row.asked is None or not row.asked.kernel_count:
        return ""
    return str(row.asked.kernel_count)


def _notes(sweep: Sweep) -> Iterator[RenderableType]:
    """Yield notes that explain the rows, and the recommendation."""
    yield from _misfit_notes(sweep)
    yield from _map_notes(sweep)
    if sweep.macs_note:
        yield indented(f"MACs were not counted: {sweep.macs_note}.")
    why = sweep.choice.why
    if sweep.choice.row is None:
        yield indented(f"No size is recommended: {why}.")
        return
    yield indented(PAPER)
    recommended = sweep.rows[sweep.choice.row]
    elements = counts_text(recommended.kernel_counts, "element")
    yield indented(f"{RECOMMENDED} Take {recommended.window} with {elements}: {why}.", "bold")


def _misfit_notes(sweep: Sweep) -> Iterator[RenderableType]:
    """Yield a line for each row that could not be planned, without duplicates."""
    misfits = []
    for row in sweep.rows:
        if row.reason is not None:
            misfits.append(f"{UNPLANNED} {row.window} {row.status}: {row.reason}")
    for misfit in dict.fromkeys(misfits):
        yield indented(misfit, "yellow")


def _map_notes(sweep: Sweep) -> Iterator[RenderableType]:
    """Say which windows have cells that never meet the feature map, and in how many layers."""
    counts: dict[str, int] = {}
    for row in sweep.rows:
        if row.layers_beyond_map:
            counts[row.window] = row.layers_beyond_map
    if counts:
        windows = ", ".join(f"{window} ({layers})" for window, layers in counts.items())
        yield indented(
            "Windows at least twice as large as the feature map at this input size, whose outer "
            f"cells meet only padding (in how many layers): {windows}."
        )
