"""Tables fit any width and format: names wrap, and no number loses a digit."""

import io
import re

from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dcls_convert.tables import Table
from dcls_convert.text import printable, shortened

from .conftest import many_examples

# Letters, digits, wide and combining characters, control characters, and characters with a meaning
# in Markdown or CSV.
TEXTS = st.text(st.sampled_from('abz019._-路径名🙂é\u0301\x1b\n|\\[],"'), max_size=60)
NUMBER = "1234567 → 7654321"
MIN_NAME_WIDTH = 24  # terminal columns
ROWS = st.lists(st.tuples(TEXTS, st.none() | st.integers(0, 10**9)), min_size=1, max_size=4)


def table_of(rows):
    table = Table("Name", "Count", "Number")
    for name, count in rows:
        table.add(name, None if count is None else f"{count:,}", NUMBER)
    return table


def printed(table, width):
    recorder = Console(width=width, file=io.StringIO(), highlight=False)
    recorder.print(table)
    return recorder.file.getvalue().splitlines()


@many_examples
@given(TEXTS, st.integers(5, 60))
@example("路" * 40, 20)
def test_what_is_shown_fits(name, limit):
    text = shortened(name, limit)
    assert text.isprintable()
    assert cell_len(text) <= limit
    if len(name) <= limit and cell_len(printable(name)) <= limit:
        assert text == printable(name)


@many_examples
@given(ROWS, st.integers(0, 60))
def test_a_table_fits_by_its_names_and_no_number_wraps(rows, more):
    rows = [*rows, ("long" * 20, 1_000_000_000)]
    name_width = MIN_NAME_WIDTH + more
    width = name_width + len(" 1,000,000,000 ") + len(NUMBER) + 1
    head, _, *lines = printed(table_of(rows), width)
    assert max(map(cell_len, (head, *lines))) <= width
    assert all(line.isprintable() for line in lines)
    first_lines = [index for index, line in enumerate(lines) if line.rstrip().endswith(NUMBER)]
    for index, (_, count) in zip(first_lines, rows, strict=True):
        assert count is None or f" {count:,} " in lines[index]
    last_name = [line.split()[0] for line in lines[first_lines[-1] :]]
    assert "".join(last_name) == "long" * 20


@many_examples
@given(ROWS)
def test_markdown_gives_back_the_texts(rows):
    table = table_of(rows)
    table.add_total("all|", "7", NUMBER)
    head, sides, *lines = table.markdown().splitlines()
    assert head == "| Name | Count | Number |"  # the total has a count
    assert sides == "| --- | ---: | ---: |"
    assert "Count" not in table_of([("name", None)]).markdown()
    for line, (name, count) in zip(lines, [*rows, ("all|", 7)], strict=True):
        cells = [cell.strip() for cell in re.findall(r"((?:\\.|[^|\\])*)\|", line)[1:]]
        texts = [printable(name), "" if count is None else f"{count:,}", NUMBER]
        assert [re.sub(r"\\(.)", r"\1", cell) for cell in cells] == [text.strip() for text in texts]
