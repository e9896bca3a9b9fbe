"""Tables and paragraphs for all views: in a terminal by rich, as Markdown, and as HTML."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from .text import printable

SHORT_NAME = 24  # terminal columns; texts up to this width never wrap if a longer name can
MARKDOWN_ESCAPES = {ord("\\"): "\\\\", ord("|"): "\\|"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    heading: str
    left: bool = False  # aligned to the left; numbers are aligned to the right
    words: bool = False  # text of any length, which wraps so that numbers stay whole


class Table:
    """Rows of texts under headings. A column in which no row has a text is left out.

    The first column holds names. If the table is too wide, long names wrap, then other long texts;
    numbers do not.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._rows: list[list[str]] = []
        self._styles: list[str] = []  # rich's style of each row
        self._total_rows = 0

    def add(self, *texts: str | None, style: str = "") -> None:
        """Add a row, with a text for each column; None is an empty one."""
        self._rows.append([printable(text or "") for text in texts])
        self._styles.append(style)

    def add_total(self, *texts: str | None) -> None:
        """Add a row below a line, in bold, after all other rows."""
        self.add(*texts, style="bold")
        self._total_rows += 1

    def _shown(self) -> tuple[list[Column], list[list[str]]]:
        """Return the columns with a text in any row, and what the rows have in them."""
        columns: list[Column] = []
        rows: list[list[str]] = [[] for _ in self._rows]
        for index, column in enumerate(self._columns):
            texts = [row[index] for row in self._rows]
            if index == 0 or any(texts) or not texts:
                columns.append(column)
                for row, text in zip(rows, texts, strict=True):
                    row.append(text)
        return columns, rows

    def markdown(self) -> str:
        """Return the table as Markdown; headings are not escaped."""
        columns, rows = self._shown()
        headings = []
        rules = []
        for column in columns:
            left = column.left or column is columns[0]
            headings.append(column.heading)
            rules.append("---" if left else "---:")
        lines = [_markdown_line(headings), _markdown_line(rules)]
        for row in rows:
            lines.append(_markdown_line(cell.translate(MARKDOWN_ESCAPES) for cell in row))
        return "".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = rich_table.Table(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold"
        )
        columns, rows = self._shown()
        longest_name = max((cell_len(row[0]) for row in rows), default=0)
        names_wrap = longest_name > SHORT_NAME
        for index, column in enumerate(columns):
            is_name = index == 0
            wraps = is_name and names_wrap
            if column.words:
                longest = max((cell_len(row[index]) for row in rows), default=0)
                wraps = longest > SHORT_NAME or not names_wrap
            table.add_column(
                column.heading,
                justify="left" if is_name or column.left else "right",
                no_wrap=not wraps,
                overflow="fold" if wraps else "ellipsis",
            )
        last = len(rows) - self._total_rows  # number of the row above the totals
        for number, (row, style) in enumerate(zip(rows, self._styles, strict=True), start=1):
            table.add_row(*map(Text, row), style=style, end_section=number == last)
        yield table


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
