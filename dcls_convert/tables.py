"""Tables and paragraphs for all views: in a terminal by rich, as Markdown, and as HTML."""

import io
from collections.abc import Iterable

from rich import box
from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from .text import printable

MARKDOWN_ESCAPES = {ord("\\"): "\\\\", ord("|"): "\\|"}


class Table:
    """Rows of texts under headings. A column in which no row has a text is left out.

    The first column holds names, the column with the heading `words` holds text, and all other
    columns hold numbers. If the table is too wide, names and text wrap; numbers do not.
    """

    def __init__(self, *headings: str, words: str | None = None) -> None:
        self._headings = headings
        self._words = words
        self._rows: list[list[str]] = []
        self._styles: list[str] = []  # rich's style of each row
        self._rows_above_line = 0

    def add(self, *texts: str | None, style: str = "") -> None:
        """Add a row, with a text for each column; None leaves the cell empty."""
        self._rows.append([printable(text or "") for text in texts])
        self._styles.append(style)

    def add_total(self, *texts: str | None) -> None:
        """Add the last row, in bold, below a line."""
        self._rows_above_line = len(self._rows)
        self.add(*texts, style="bold")

    def _shown_columns(self) -> tuple[dict[str, bool], list[list[str]]]:
        """Return the headings of the shown columns, and each row's texts in these columns.

        The value of a heading is True if its column is left-aligned.
        """
        headings: dict[str, bool] = {}
        rows: list[list[str]] = [[] for _ in self._rows]
        for index, heading in enumerate(self._headings):
            texts = [row[index] for row in self._rows]
            if index == 0 or any(texts):
                headings[heading] = index == 0 or heading == self._words
                for row, text in zip(rows, texts, strict=True):
                    row.append(text)
        return headings, rows

    def markdown(self) -> str:
        """Return the table as Markdown; headings are not escaped."""
        headings, rows = self._shown_columns()
        rules = ["---" if is_left else "---:" for is_left in headings.values()]
        lines = [_markdown_line(headings), _markdown_line(rules)]
        for row in rows:
            lines.append(_markdown_line(cell.translate(MARKDOWN_ESCAPES) for cell in row))
        return "".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = rich_table.Table(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold"
        )
        headings, rows = self._shown_columns()
        for heading, is_left in headings.items():
            if is_left:
                table.add_column(heading, overflow="fold")
            else:
                table.add_column(heading, justify="right", no_wrap=True)
        for number, (row, style) in enumerate(zip(rows, self._styles, strict=True), start=1):
            is_above_line = number == self._rows_above_line
            table.add_row(*map(Text, row), style=style, end_section=is_above_line)
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
