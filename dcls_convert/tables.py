"""The table class that all views share: columns, written as text, Markdown, CSV or HTML."""

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

from .text import printable, shown

# Columns of the terminal, with the gap. Names are shortened to no less than this; if the table is
# still too wide, numbers wrap.
MIN_NAME_WIDTH = 24
ENDLESS = 1_000_000  # columns; the width at which a table is asked for its natural width
MARKDOWN_ESCAPES = {ord("\\"): "\\\\", ord("|"): "\\|"}

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A heading, a value, and how it is written."""

    heading: str
    value: Callable[[Row], Any]  # None if it is not known
    format: Callable[[Any], str] = str  # writes a known value
    left: bool = False  # aligned to the left; numbers are aligned to the right
    words: bool = False  # a text of any length, which is folded before names and numbers give way

    def text(self, row: Row) -> str:
        value = self.value(row)
        if value is None:
            return ""
        return printable(self.format(value))

    def is_known(self, rows: Sequence[Row]) -> bool:
        """Whether any of the rows has a value."""
        for row in rows:
            if self.value(row) is not None:
                return True
        return False


@dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    """A row for each record.

    The first column holds names, which lose their middle if there is no room for them.
    """

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    style: Callable[[Row], str] = lambda row: ""  # style of a row, as rich writes it
    totals: Sequence[Row] = ()  # rows below the others, in bold
    min_name_width: int = MIN_NAME_WIDTH

    def csv(self) -> str:
        """A line for each row, of values; one that is not known is empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_headings(self.columns))
        for row in self.rows:
            writer.writerow([column.value(row) for column in self.columns])
        return text.getvalue()

    def markdown(self) -> str:
        """A table of Markdown; headings are not escaped."""
        headings, rows = self.cells()
        columns = self._known_columns()
        rules = []
        for column in columns:
            left = column.left or column is columns[0]
            rules.append("---" if left else "---:")
        lines = [_markdown_line(headings), _markdown_line(rules)]
        for row in rows:
            lines.append(_markdown_line(map(_escape_markdown, row)))
        return "".join(lines)

    def surplus(self, console: Console, options: ConsoleOptions) -> int:
        """By how many columns of the terminal the table is wider than the room for it."""
        laid_out = self._laid_out(console.width // 2)
        measured = console.measure(laid_out, options=options.update(max_width=ENDLESS))
        return measured.maximum - options.max_width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name_width = console.width // 2
        surplus = self.surplus(console, options)
        if surplus > 0 and not _with_words(self.columns):
            longest = self._longest_name(name_width)
            shortest_allowed = min(longest, self.min_name_width - 1)
            name_width = max(longest - surplus, shortest_allowed)
        yield self._laid_out(name_width)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Headings, and the texts of each row, without columns that have no values."""
        columns = self._known_columns()
        texts = []
        for row in self._all_rows():
            texts.append([column.text(row) for column in columns])
        return _headings(columns), texts

    def _all_rows(self) -> list[Row]:
        return [*self.rows, *self.totals]

    def _known_columns(self) -> list[Column[Row]]:
        """The columns that have a value in any row; all of them if there are no rows."""
        rows = self._all_rows()
        if not rows:
            return list(self.columns)
        return [column for column in self.columns if column.is_known(rows)]

    def _longest_name(self, limit: int) -> int:
        """Width of the longest name or its heading, each shortened to `limit`."""
        names = self.columns[0]
        longest = cell_len(shown(names.heading, limit))
        for row in self._all_rows():
            longest = max(longest, cell_len(shown(names.text(row), limit)))
        return longest

    def _laid_out(self, name_width: int) -> table.Table:
        """The table as rich's, with names at most `name_width` columns of the terminal wide."""
        laid_out = table.Table(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold"
        )
        columns = self._known_columns()
        folded = _with_words(columns) or columns[1:]
        for column in columns:
            if column in folded:
                overflow: Any = {"overflow": "fold"}
            else:
                overflow = {"no_wrap": True}
            left = column.left or column is columns[0]
            justify: Any = "left" if left else "right"
            laid_out.add_column(column.heading, justify=justify, **overflow)
        _, texts = self.cells()
        styles = list(map(self.style, self.rows))
        styles += ["bold"] * len(self.totals)
        for index, (cells, style) in enumerate(zip(texts, styles, strict=True), start=1):
            name, *others = cells
            laid_out.add_row(
                Text(shown(name, name_width)),
                *map(Text, others),
                style=style,
                end_section=index == len(self.rows),  # a line above the totals
            )
        return laid_out


def _headings(columns: Sequence[Column[Row]]) -> list[str]:
    return [column.heading for column in columns]


def _with_words(columns: Sequence[Column[Row]]) -> list[Column[Row]]:
    return [column for column in columns if column.words]


def _escape_markdown(cell: str) -> str:
    return cell.translate(MARKDOWN_ESCAPES)


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def field_column(path: str) -> Column[Any]:
    """For CSV: the field "macs.after" of each row, headed "macs_after".

    Several numbers are written with spaces between them.
    """

    def value(row: Any) -> Any:
        for name in path.split("."):
            row = getattr(row, name, None)
        if isinstance(row, tuple):
            return " ".join(map(str, row))
        return row

    return Column(path.replace(".", "_"), value)


def title(name: object, more: str = "") -> Text:
    """A line above a table."""
    return Text(printable(name), style="bold") + Text(printable(more), style="not bold dim")


def indented(line: str, style: str = "", by: int = 1) -> Padding:
    """A paragraph beside a table."""
    return Padding(Text(printable(line), style=style), (0, 0, 0, by), expand=False)


def as_text(part: RenderableType) -> str:
    """What rich lays out at 80 columns, without colours."""
    return _recorded(part).export_text().rstrip("\n")


def as_html(part: RenderableType) -> str:
    """What rich lays out at 80 columns, with colours, as a part of a page such as a notebook.

    Text from outside is escaped.
    """
    code = '<pre style="font-family:monospace;line-height:normal">{code}</pre>'
    return _recorded(part).export_html(inline_styles=True, code_format=code)


def _recorded(part: RenderableType) -> Console:
    console = Console(record=True, file=io.StringIO(), width=80, force_jupyter=False)
    console.print(part)
    return console
