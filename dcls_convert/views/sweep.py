"""How a sweep looks: a table for the terminal, JSON and CSV."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..compare.sweep import Sweep, SweepRow, Timing, growth
from ..depthwise.geometry import size_text
from ..records import write_json
from ..tables import Column, Table, counted, indented, span, title
from .counts import exact, in_one_unit

TAKEN, DOMINATED, WITHOUT = ">", "-", "!"  # signs before rows; colours repeat them
PAPER = (
    "Only training shows the accuracy. In the paper, ConvNeXt lost with windows below 17x17 and gained nothing above; "
    "ResNet-50 had 7x7."
)


@dataclass(frozen=True, slots=True)
class SweepView:
    """The rows, what to say of them, and the command of the row to take; for 80 columns or more."""

    sweep: Sweep

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        keys, costs, measured = _columns(self.sweep)
        tables = [self._table([*keys, *costs, *measured])]
        if tables[0].surplus(console, options) > 0 and any(_known(measured, row) for row in self.sweep.rows):
            rows = [row for row in self.sweep.rows if _known(measured, row)]
            tables = [self._table([*keys, *costs]), self._table([*keys, *measured], rows)]
        size = self.sweep.input_size
        yield title(self.sweep.model, f", input {size_text(size)}" if size else "")
        for table in tables:
            yield Text()
            yield table
        yield Text()
        for line, style in _notes(self.sweep):
            yield indented(line, style)

    def _table(self, columns: Sequence[Column[SweepRow]], rows: Sequence[SweepRow] = ()) -> Table[SweepRow]:
        return Table(columns, rows or self.sweep.rows, style=lambda row: _sign(self.sweep, row)[1])


def _known(columns: Sequence[Column[SweepRow]], row: SweepRow) -> bool:
    return any(column.value(row) is not None for column in columns)


def _sign(sweep: Sweep, row: SweepRow) -> tuple[str, str]:
    if sweep.choice.row is not None and row is sweep.rows[sweep.choice.row]:
        return TAKEN, "bold green"
    if row.status in ("does not fit", "failed"):
        return WITHOUT, "yellow"
    return (DOMINATED, "dim") if row.dominated else ("", "")


def _columns(sweep: Sweep) -> tuple[list[Column[SweepRow]], list[Column[SweepRow]], list[Column[SweepRow]]]:
    """What names a row, what it costs, and what was measured of it."""
    rows, original = sweep.rows, sweep.rows[0]
    macs, macs_unit = in_one_unit(row.macs for row in rows)
    size, size_unit = in_one_unit(row.folded_bytes for row in rows)
    several = len({row.layers for row in rows if row.status == "done"}) > 1

    def grown(row: SweepRow) -> float | None:
        known = row.asked is not None and row.macs is not None and original.macs
        return growth(row, original, lambda row: row.macs) if known else None

    keys: list[Column[SweepRow]] = [
        Column("  Window", lambda row: f"{_sign(sweep, row)[0]:1} {row.window}"),
        Column("Count", lambda row: span(row.kernel_counts) or str((row.asked and row.asked.kernel_count) or "")),
        Column("Budget", lambda row: row.asked and row.asked.budget, "{:g} %".format),
        Column("Layers", lambda row: row.layers or None if several else None),
    ]
    costs: list[Column[SweepRow]] = [
        Column("Parameters", lambda row: row.status if row.params is None else exact(row.params)),
        Column(f"MACs{macs_unit}", lambda row: row.macs, macs),
        Column("", grown, "{:+.1f} %".format),
        Column(f"Fold{size_unit}B", lambda row: row.folded_bytes, size),
    ]
    measured: list[Column[SweepRow]] = [
        Column("Forward, ms", lambda row: row.forward_ms, _time),
        Column("Step, ms", lambda row: row.step_ms, _time),
        Column("Kernels", lambda row: row.kernel_error, "{:.3f}".format),
        Column("Outputs", lambda row: row.output_error, "{:.3f}".format),
        Column("Top-1", lambda row: row.same_top1, lambda share: f"{100 * share:.0f} %"),
    ]
    return keys, costs, measured


def _time(timing: Timing) -> str:
    spread = (timing.third_quartile - timing.first_quartile) / 2
    digits = 0 if timing.median >= 99.95 else 1 if timing.median >= 9.995 else 2
    return f"{timing.median:,.{digits}f} ±{spread:,.{digits}f}"


def _notes(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """Lines, and their styles."""
    rows, choice = sweep.rows, sweep.choice
    for reason in dict.fromkeys(f"{WITHOUT} {row.window} {row.status}: {row.reason}" for row in rows if row.reason):
        yield reason, "yellow"
    if any(row.dominated for row in rows):
        yield f"{DOMINATED} another row is as good in {_compared_by(sweep)}, and better in one.", "dim"
    yield "Fold: the model's weights when folded.", ""
    if sweep.macs_note:
        yield f"MACs were not counted: {sweep.macs_note}.", ""
    for sentence in (*_timing_sentences(sweep), *_error_sentences(rows)):
        yield sentence, ""
    if sweep.interrupted:
        yield "Interrupted: rows or measurements are missing.", "bold yellow"
    if choice.row is None:
        yield f"There is no row to take: {choice.why}.", ""
        return
    yield PAPER, ""
    taken = rows[choice.row]
    yield f"{TAKEN} Take {taken.window} with {span(taken.kernel_counts)} elements: {choice.why}.", "bold"


def _compared_by(sweep: Sweep) -> str:
    done = [row for row in sweep.rows if row.status == "done"]
    timed, fitted = (all(getattr(row, name) is not None for row in done) for name in ("step_ms", "kernel_error"))
    images = all(row.images for row in done)
    gain = ("error of outputs" if images else "error of kernels") if fitted else "number of elements"
    return f"window, parameters, {'times' if timed else 'MACs'} and {gain}"


def _timing_sentences(sweep: Sweep) -> Iterator[str]:
    timing = sweep.timing
    if timing is None or not any(row.forward_ms for row in sweep.rows):
        return
    threads = f", {counted(timing.threads, 'thread')}" if timing.threads else ""
    yield (
        f"Times: median of runs by turns ± half the interquartile range; {counted(timing.batch, 'image')} at a time "
        f"in {'bfloat16 autocast' if timing.amp else 'float32'}, {timing.device}{threads}, torch {timing.torch}. "
        "Step: forward, backward, SGD."
    )
    widest = max(row.spread or 0 for row in sweep.rows)
    if widest > sweep.slower:
        yield f"Equal runs differ by {widest:.0f} %: measure longer (--seconds), on an idle machine."
    if ways := sorted(set[str]().union(*(row.ways for row in sweep.rows))):
        yield f"New layers are convolved by {' and '.join(ways)}."


def _error_sentences(rows: Sequence[SweepRow]) -> Iterator[str]:
    images = next((row.images for row in rows if row.images is not None), None)
    if images is None:
        return
    compared = f"{counted(images, 'image')} held out of the calibration" if images else "random images"
    yield (
        f"Kernels: mean relative error. Outputs: relative error for {compared}."
        + " Top-1: share of them with the same class as before." * any(row.same_top1 is not None for row in rows)
    )


def sweep_json(sweep: Sweep) -> str:
    """One object: format, model, input size, rows, timing, and the row to take."""
    return write_json(sweep.to_dict())


def sweep_csv(sweep: Sweep) -> str:
    """A line for each row; a value that is not known is empty."""

    def of_timing(part: str, name: str) -> Column[SweepRow]:
        return Column(f"{part}_{name}", lambda row: getattr(getattr(row, part), name, None))

    def field(name: str) -> Column[SweepRow]:
        return Column(name, lambda row: getattr(row, name))

    numbers = ("median", "first_quartile", "third_quartile", "runs")
    columns = [
        field("window"),
        Column("asked_kernel_count", lambda row: row.asked and row.asked.kernel_count),
        Column("asked_budget", lambda row: row.asked and row.asked.budget),
        *map(field, ("status", "layers")),
        Column("kernel_counts", lambda row: " ".join(map(str, row.kernel_counts))),
        *map(field, ("elements", "params", "macs", "folded_bytes")),
        *(of_timing(part, name) for part in ("forward_ms", "step_ms") for name in numbers),
        Column("ways", lambda row: " ".join(f"{way}:{count}" for way, count in row.ways.items())),
        *map(field, ("kernel_error", "images", "output_error", "same_top1", "dominated", "reason", "command")),
        Column("taken", lambda row: _sign(sweep, row)[0] == TAKEN),
    ]
    return Table(columns, sweep.rows).csv()
