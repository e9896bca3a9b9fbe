"""How a sweep looks: a table for the terminal, JSON and CSV. Formatting only."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..compare.sweep import Sweep, SweepRow, Timing, growth
from ..depthwise import choices
from ..depthwise.geometry import size_text
from ..errors import printable
from ..tables import counted, plain_table, span
from .report import in_one_unit

TAKEN, DOMINATED, WITHOUT = ">", "-", "!"  # signs before rows; colours repeat them
NATURAL_WIDTH = 1000  # columns; no table is wider
PAPER = (
    "Only training shows the accuracy. In the paper, ConvNeXt lost with windows below 17x17 and gained nothing above; "
    "ResNet-50 had 7x7."
)
_Cell = Callable[[SweepRow], str]


@dataclass(frozen=True, slots=True)
class SweepView:
    """The rows, what to say of them, and the command of the row to take; for 80 columns or more."""

    sweep: Sweep

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        keys, costs, measured = _columns(self.sweep)
        tables = [self._table(keys, costs | measured)]
        width = Measurement.get(console, options.update(width=NATURAL_WIDTH), tables[0]).maximum
        if width > options.max_width and measured:
            tables = [self._table(keys, columns) for columns in (costs, measured)]
        title = Text(printable(self.sweep.model), style="bold")
        if self.sweep.input_size:
            title += Text(f", input {size_text(self.sweep.input_size)}", style="not bold dim")
        yield title
        for table in tables:
            yield Text()
            yield table
        yield Text()
        for line in _notes(self.sweep):
            yield Padding(line, (0, 0, 0, 1), expand=False)

    def _table(self, keys: dict[str, _Cell], columns: dict[str, _Cell]) -> Table:
        """With the rows of which there is something to say."""
        first, *headings = keys | columns
        table = plain_table(f"  {first}", *headings)
        for index, row in enumerate(self.sweep.rows):
            name, *named = [cell(row) for cell in keys.values()]
            cells = [cell(row) for cell in columns.values()]
            sign, style = _sign(row, taken=index == self.sweep.choice.row)
            if any(cells):
                table.add_row(f"{sign:1} {name}", *named, *cells, style=style)
        return table


def _sign(row: SweepRow, *, taken: bool) -> tuple[str, str]:
    if taken:
        return TAKEN, "bold green"
    if row.status in ("does not fit", "failed"):
        return WITHOUT, "yellow"
    return (DOMINATED, "dim") if row.dominated else ("", "")


def _columns(sweep: Sweep) -> tuple[dict[str, _Cell], dict[str, _Cell], dict[str, _Cell]]:
    """What names a row, what it costs, and what was measured of it; columns of which nothing is known are left out."""
    rows = sweep.rows
    macs, macs_unit = in_one_unit([row.macs for row in rows])
    size, size_unit = in_one_unit([row.folded_bytes for row in rows])
    grown = _percent_of_macs(rows[0])
    keys: dict[str, _Cell] = {"Window": lambda row: row.window, "Count": _count}
    if any(row.asked and row.asked.budget is not None for row in rows):
        keys["Budget"] = lambda row: "" if not row.asked or row.asked.budget is None else f"{row.asked.budget:g} %"
    if len({row.layers for row in rows if row.status == "done"}) > 1:
        keys["Layers"] = lambda row: str(row.layers or "")
    costs: dict[str, _Cell] = {
        "Parameters": lambda row: row.status if row.params is None else f"{row.params:,}",
        f"MACs{macs_unit}": lambda row: _unless_unplanned(row, macs(row.macs)),
        "": grown,
        f"Fold{size_unit}B": lambda row: _unless_unplanned(row, size(row.folded_bytes)),
    }
    measured: dict[str, _Cell] = {}
    if any(row.forward_ms for row in rows):
        measured["Forward, ms"] = lambda row: _time(row.forward_ms)
    if any(row.step_ms for row in rows):
        measured["Step, ms"] = lambda row: _time(row.step_ms)
    if any(row.kernel_error is not None for row in rows):
        measured["Kernels"] = lambda row: _number(row.kernel_error)
    if any(row.output_error is not None for row in rows):
        measured["Outputs"] = lambda row: _number(row.output_error)
    if any(row.same_top1 is not None for row in rows):
        measured["Top-1"] = lambda row: "" if row.same_top1 is None else f"{100 * row.same_top1:.0f} %"
    return keys, costs, measured


def _unless_unplanned(row: SweepRow, text: str) -> str:
    return "" if row.params is None else text


def _count(row: SweepRow) -> str:
    asked = row.asked.kernel_count if row.asked else None
    return span(row.kernel_counts) or ("" if asked is None else str(asked))


def _percent_of_macs(original: SweepRow) -> _Cell:
    def cell(row: SweepRow) -> str:
        known = row.asked is not None and row.macs is not None and original.macs
        return f"{growth(row, original, lambda row: row.macs):+.1f} %" if known else ""

    return cell


def _time(timing: Timing | None) -> str:
    if timing is None:
        return ""
    spread = (timing.third_quartile - timing.first_quartile) / 2
    digits = 0 if timing.median >= 99.95 else 1 if timing.median >= 9.995 else 2
    return f"{timing.median:,.{digits}f} ±{spread:,.{digits}f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _notes(sweep: Sweep) -> Iterator[Text]:
    rows, choice = sweep.rows, sweep.choice
    reasons = dict.fromkeys(f"{WITHOUT} {row.window} {row.status}: {row.reason}" for row in rows if row.reason)
    yield from (Text(printable(reason), style="yellow") for reason in reasons)
    if any(row.dominated for row in rows):
        yield Text(f"{DOMINATED} another row is as good in {_compared_by(sweep)}, and better in one.", style="dim")
    uncounted = [f"MACs were not counted: {sweep.macs_note}."] if sweep.macs_note else []
    sentences = [
        "Fold: the model's weights when folded.",
        *uncounted,
        *_timing_sentences(sweep),
        *_error_sentences(rows),
    ]
    yield from (Text(printable(sentence)) for sentence in sentences)
    if sweep.interrupted:
        yield Text("Interrupted: rows or measurements are missing.", style="bold yellow")
    if choice.row is None:
        yield Text(f"There is no row to take: {choice.why}.")
        return
    yield Text(PAPER)
    taken = rows[choice.row]
    yield Text(f"{TAKEN} Take {taken.window} with {span(taken.kernel_counts)} elements: {choice.why}.", style="bold")


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
    ways: Counter[str] = Counter()
    for row in sweep.rows:
        ways.update(row.ways)
    if ways:
        yield f"New layers are convolved by {' and '.join(sorted(ways))}."
    yield from map(str, choices())


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
    return json.dumps(sweep.to_dict(), indent=2, allow_nan=False) + "\n"


def sweep_csv(sweep: Sweep) -> str:
    """A line for each row; a value that is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*CSV_COLUMNS, "taken"])
    for index, row in enumerate(sweep.rows):
        writer.writerow([*(value(row) for value in CSV_COLUMNS.values()), index == sweep.choice.row])
    return text.getvalue()


def _timing_part(part: str, name: str) -> Callable[[SweepRow], object]:
    return lambda row: getattr(getattr(row, part), name, None)


CSV_COLUMNS: dict[str, Callable[[SweepRow], object]] = {
    "window": lambda row: row.window,
    "asked_kernel_count": lambda row: row.asked and row.asked.kernel_count,
    "asked_budget": lambda row: row.asked and row.asked.budget,
    "status": lambda row: row.status,
    "layers": lambda row: row.layers,
    "kernel_counts": lambda row: " ".join(map(str, row.kernel_counts)),
    "elements": lambda row: row.elements,
    "params": lambda row: row.params,
    "macs": lambda row: row.macs,
    "folded_bytes": lambda row: row.folded_bytes,
    **{
        f"{part}_{name}": _timing_part(part, name)
        for part in ("forward_ms", "step_ms")
        for name in ("median", "first_quartile", "third_quartile", "runs")
    },
    "ways": lambda row: " ".join(f"{way}:{count}" for way, count in row.ways.items()),
    "kernel_error": lambda row: row.kernel_error,
    "images": lambda row: row.images,
    "output_error": lambda row: row.output_error,
    "same_top1": lambda row: row.same_top1,
    "dominated": lambda row: row.dominated,
    "reason": lambda row: row.reason,
    "command": lambda row: row.command,
}
