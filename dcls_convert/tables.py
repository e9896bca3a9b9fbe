"""The table class shared by all views, and its forms: text, Markdown and HTML."""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich import box, table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from .text import printable, shortened

# Terminal columns, including the gap after a name. Names are not shortened further than this. If
# the table is still too wide, numbers wrap.
MIN_NAME_WIDTH = 24
UNLIMITED_WIDTH = 1_000_000  # terminal columns; a table measured at it has its natural width
MARKDOWN_ESCAPES = {ord("\\"): "\\\\", ord("|"): "\\|"}

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table: its heading, its values, and how they are written."""

    heading: str
    value: Callable[[Row], Any]  # the value in a row; None if it is not known
    format: Callable[[Any], str] = str  # writes a known value
    left: bool = False  # aligned to the left; numbers are aligned to the right
    words: bool = False  # text of any length, which wraps so that names and numbers stay whole

    def text(self, row: Row) -> str:
        value = self.value(row)
        if value is None:
            return ""
        return printable(self.format(value))

    def is_known(self, rows: Sequence[Row]) -> bool:
        """True if any of the rows has a value."""
        for row in rows:
            if self.value(row) is not None:
                return True
        return False


@dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    """A table with a row for each record.

    The first column holds names. If the table is too wide, their middle is cut out.
    """

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    style: Callable[[Row], str] = lambda row: ""  # rich's style of a row
    totals: Sequence[Row] = ()  # rows below the others, in bold
    min_name_width: int = MIN_NAME_WIDTH

    def markdown(self) -> str:
        """Return the table as Markdown; headings are not escaped."""
        headings, rows = self.cells()
        columns = self._known_columns()
        rules = []
        for column in columns:
            left = column.left or column is columns[0]
            rules.append("---" if left else "---:")
        lines = [_markdown_line(headings), _markdown_line(rules)]
        for row in rows:
            lines.append(_markdown_line(cell.translate(MARKDOWN_ESCAPES) for cell in row))
        return "".join(lines)

    def surplus(self, console: Console, options: ConsoleOptions) -> int:
        """Return by how many terminal columns the table exceeds the available width."""
        rich_table = self._rich_table(console.width // 2)
        measured = console.measure(rich_table, options=options.update(max_width=UNLIMITED_WIDTH))
        return measured.maximum - options.max_width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name_width = console.width // 2
        surplus = self.surplus(console, options)
        if surplus > 0 and not _word_columns(self.columns):
            longest = self._longest_name(name_width)
            shortest_allowed = min(longest, self.min_name_width - 1)
            name_width = max(longest - surplus, shortest_allowed)
        yield self._rich_table(name_width)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and the texts of each row, without columns that have no values."""
        columns = self._known_columns()
        texts = []
        for row in self._all_rows():
            texts.append([column.text(row) for column in columns])
        return [column.heading for column in columns], texts

    def _all_rows(self) -> list[Row]:
        return [*self.rows, *self.totals]

    def _known_columns(self) -> list[Column[Row]]:
        """Return the columns with a value in any row; all of them if there are no rows."""
        rows = self._all_rows()
        if not rows:
            return list(self.columns)
        return [column for column in self.columns if column.is_known(rows)]

    def _longest_name(self, limit: int) -> int:
        """Return the width of the longest name or of the heading, each shortened to `limit`."""
        names = self.columns[0]
        longest = cell_len(shortened(names.heading, limit))
        for row in self._all_rows():
            longest = max(longest, cell_len(shortened(names.text(row), limit)))
        return longest

    def _rich_table(self, name_width: int) -> table.Table:
        """Return rich's table, with names of at most `name_width` terminal columns."""
        rich_table = table.Table(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold"
        )
        columns = self._known_columns()
        wrapped = _word_columns(columns) or columns[1:]
        for column in columns:
            if column in wrapped:
                overflow: Any = {"overflow": "fold"}
            else:
                overflow = {"no_wrap": True}
            left = column.left or column is columns[0]
            justify: Any = "left" if left else "right"
            rich_table.add_column(column.heading, justify=justify, **overflow)
        _, texts = self.cells()
        styles = list(map(self.style, self.rows))
        styles += ["bold"] * len(self.totals)
        for index, (cells, style) in enumerate(zip(texts, styles, strict=True), start=1):
            name, *others = cells
            rich_table.add_row(
                Text(shortened(name, name_width)),
                *map(Text, others),
                style=style,
                end_section=index == len(self.rows),  # a line above the totals
            )
        return rich_table


def _word_columns(columns: Sequence[Column[Row]]) -> list[Column[Row]]:
    return [column for column in columns if column.words]


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def title(name: object, more: str = "") -> Text:
    """Return the title line above a table."""
    return Text(printable(name), style="bold") + Text(printable(more), style="not bold dim")


def indented(line: str, style: str = "", by: int = 1) -> Padding:
    """Return an indented paragraph, to stand above or below a table."""
    return Padding(Text(printable(line), style=style), (0, 0, 0, by), expand=False)


def as_text(part: RenderableType) -> str:
    """Render with rich at 80 columns, as text without colours."""
    return _recorded(part).export_text().rstrip("\n")


def as_html(part: RenderableType) -> str:
    """Render with rich at 80 columns, as coloured HTML for part of a page, such as a notebook.

    Text from outside is escaped.
    """
    code = '<pre style="font-family:monospace;line-height:normal">{code}</pre>'
    return _recorded(part).export_html(inline_styles=True, code_format=code)


def _recorded(part: RenderableType) -> Console:
    """Return a console that has recorded the rendered part, for export."""
    console = Console(record=True, file=io.StringIO(), width=80, force_jupyter=False)
    console.print(part)
    return console
