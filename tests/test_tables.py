"""Names in messages and tables: what does not fit loses its middle, counted in columns of a terminal."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dcls_convert.errors import printable, shown
from dcls_convert.tables import Name, plain_table

# Letters, digits, wide characters, combining ones, and what a terminal must not get.
NAMES = st.text(st.sampled_from("abz019._-路径名🙂é\u0301\x1b\n"), max_size=60)
laws = settings(max_examples=300, deadline=None, derandomize=True, database=None)


@laws
@given(NAMES, st.integers(0, 60))
def test_what_is_shown_fits_and_keeps_both_ends(name, limit):
    text = shown(name, limit)
    assert text.isprintable()
    assert cell_len(text) <= limit
    if len(name) <= limit and cell_len(printable(name)) <= limit:
        assert text == printable(name)
    elif name.isascii() and name.isprintable() and limit >= 5:
        start, end = text.split("...") if text.count("...") == 1 else (text[: (limit - 2) // 2], text[-1:])
        assert start == name[: (limit - 2) // 2]
        assert name.endswith(end)
        assert end


@laws
@given(st.lists(NAMES, min_size=1, max_size=3), st.integers(40, 80))
def test_a_table_fits_its_names_and_never_cuts_a_number(names, width):
    table = plain_table("Name", "Number")
    for name in names:
        table.add_row(Name(name), "1234567 → 7654321")
    recorder = Console(width=width, file=io.StringIO())
    recorder.print(table)
    lines = recorder.file.getvalue().splitlines()
    assert len(lines) == 2 + len(names)
    assert max(map(cell_len, lines)) <= width
    assert all(line.rstrip().endswith("1234567 → 7654321") for line in lines[2:])


@pytest.mark.parametrize("width", [40, 30])
def test_names_that_differ_in_their_ends_still_differ(width):
    table = plain_table("Layer", "Count")
    for end in "12":
        table.add_row(Name(f"backbone.features.stages.3.blocks.7.token_mixer.conv{end}"), "34")
    recorder = Console(width=width, file=io.StringIO())
    recorder.print(table)
    assert [line.split()[0][-5:] for line in recorder.file.getvalue().splitlines()[2:]] == ["conv1", "conv2"]
