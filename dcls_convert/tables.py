"""One column table for all views: text at any width, Markdown, CSV and HTML; and the lines around
it.
"""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich import box, table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from .errors import printable, shown

LEAST_NAME = (
    24  # columns, with the space beside it, down to which names give way; then numbers are folded
)
ENDLESS = 1_000_000  # columns, where a table is asked how many it would like to have
SPECIAL_IN_MARKDOWN = {ord(character): f"\\{character}" for character in "\\|"}

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A heading, a value, and how it is written."""

    heading: str
    value: Callable[[Row], Any]  # None: not known
    format: Callable[[Any], str] = str  # of a value that is known
    left: bool = False  # aligned; numbers are not
    words: bool = False  # of any length; folded before names and numbers give way

    def text(self, row: Row) -> str:
        value = self.value(row)
        return "" if value is None else printable(self.format(value))


@dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    """A row for each record. The first column holds names, which lose their middle where there is
    no room.
    """

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    style: Callable[[Row], str] = lambda row: ""  # rich's, of a row
    totals: Sequence[Row] = ()  # rows below the others, in bold
    least_name: int = LEAST_NAME

    def csv(self) -> str:
        """A line for each row, of values; one that is not known is empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.heading for column in self.columns])
        writer.writerows([column.value(row) for column in self.columns] for row in self.rows)
        return text.getvalue()

    def markdown(self) -> str:
        columns, rows = self._texts()
        sides = ["---" if column.left or column is columns[0] else "---:" for column in columns]
        lines = [[column.heading for column in columns], sides]
        lines += [[cell.translate(SPECIAL_IN_MARKDOWN) for cell in row] for row in rows]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def surplus(self, console: Console, options: ConsoleOptions) -> int:
        """Columns of the terminal that the table would like to have, and that are not there."""
        laid_out = self._laid_out(console.width // 2)
        return (
            console.measure(laid_out, options=options.update(max_width=ENDLESS)).maximum
            - options.max_width
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room, surplus = console.width // 2, self.surplus(console, options)
        if surplus > 0 and not any(column.words for column in self.columns):
            names = [
                self.columns[0].heading,
                *(self.columns[0].text(row) for row in (*self.rows, *self.totals)),
            ]
            width = max(cell_len(shown(name, room)) for name in names)
            room = max(width - surplus, min(width, self.least_name - 1))
        yield self._laid_out(room)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Headings, and the texts of each row."""
        columns, rows = self._texts()
        return [column.heading for column in columns], rows

    def _texts(self) -> tuple[list[Column[Row]], list[list[str]]]:
        """The columns of which something is known, and the cells of each row."""
        rows = [*self.rows, *self.totals]
        known = [
            one
            for one in self.columns
            if not rows or any(one.value(row) is not None for row in rows)
        ]
        return known, [[column.text(row) for column in known] for row in rows]

    def _laid_out(self, room: int) -> table.Table:
        """As rich knows it, with names of at most so many columns of the terminal."""
        columns, rows = self._texts()
        folded = [column for column in columns if column.words] or columns[1:]
        laid_out = table.Table(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold"
        )
        for column in columns:
            left = column.left or column is columns[0]
            wraps: Any = {"overflow": "fold"} if column in folded else {"no_wrap": True}
            laid_out.add_column(column.heading, justify="left" if left else "right", **wraps)
        styles = [*map(self.style, self.rows), *["bold"] * len(self.totals)]
        for index, ((name, *others), style) in enumerate(zip(rows, styles, strict=True), start=1):
            laid_out.add_row(
                *map(Text, (shown(name, room), *others)),
                style=style,
                end_section=index == len(self.rows),
            )
        return laid_out


def field_column(path: str) -> Column[Any]:
    """For CSV: of each row the field "macs.after", headed "macs_after"; several numbers with spaces
    between them.
    """

    def value(row: Any) -> Any:
        for name in path.split("."):
            row = getattr(row, name, None)
        return " ".join(map(str, row)) if isinstance(row, tuple) else row

    return Column(path.replace(".", "_"), value)


def title(name: object, more: str = "") -> Text:
    """A line above a table."""
    return Text(printable(name), style="bold") + Text(printable(more), style="not bold dim")


def indented(line: str, style: str = "", by: int = 1) -> Padding:
    """A paragraph beside a table."""
    return Padding(Text(printable(line), style=style), (0, 0, 0, by), expand=False)


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
