"""Tables in this program's style, and what rich lays out as plain text or HTML."""

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .errors import printable, shown

LEAST_NAME = 24  # columns, with the space beside it, down to which names give way; then numbers are folded
ENDLESS = 1_000_000  # columns, where a table is asked how many it would like to have


class _NamesGiveWay(Table):
    """A table whose first column is narrowed before the others."""

    least_name = LEAST_NAME

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, endless = self.columns[0], options.update(max_width=ENDLESS)
        first.max_width = None
        surplus = console.measure(self, options=endless).maximum - options.max_width
        if surplus > 0:
            parts = (first.header, *first.cells)
            name = max(console.measure(part, options=endless).maximum for part in parts)
            space = self.padding[1]
            first.max_width = max(name - surplus, min(name, self.least_name - space))
        yield from super().__rich_console__(console, options)


def plain_table(first: str, *headings: str, least_name: int = LEAST_NAME) -> Table:
    """An empty table: a column for names, then columns for numbers."""
    table = _NamesGiveWay(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.least_name = least_name
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "Kernel" else "right", overflow="fold")
    return table


class Name:
    """A cell with a name, which loses its middle where it has more than half of the terminal's columns."""

    def __init__(self, name: object) -> None:
        self._name = printable(name)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = min(cell_len(self._name), console.width // 2, options.max_width)
        return Measurement(width, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(shown(self._name, options.max_width))


def as_text(part: RenderableType) -> str:
    """What rich lays out, at 80 columns, without colours."""
    return _recorded(part).export_text().rstrip("\n")


def as_html(part: RenderableType) -> str:
    """The same with colours, as a part of a page, such as a notebook; text from outside is escaped."""
    code = '<pre style="font-family:monospace;line-height:normal">{code}</pre>'
    return _recorded(part).export_html(inline_styles=True, code_format=code)


def _recorded(part: RenderableType) -> Console:
    console = Console(record=True, file=io.StringIO(), width=80, force_jupyter=False)
    console.print(part)
    return console


def span(values: Iterable[Any], text: Callable[[Any], str] = str) -> str:
    """The least and the greatest value, "29..40"; a single value by itself, and nothing for none."""
    ordered = sorted(values)
    return "..".join(dict.fromkeys(text(value) for value in (*ordered[:1], *ordered[-1:])))


def counted(count: int, noun: str) -> str:
    """1 and "layer" -> "1 layer"; 1200 -> "1,200 layers"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
