"""Sizes of inputs: one way to write them, on the command line and in messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcls_convert.cli.parsing import parse_input_size
from dcls_convert.errors import PlanError
from dcls_convert.input_sizes import checked_input_size, each_size, input_size_text
from dcls_convert.options import MAX_SIDE

sides = st.integers(1, MAX_SIDE)
images = st.lists(sides, min_size=2, max_size=4).map(tuple)
tensors = st.lists(sides, max_size=4).map(tuple)


@given(image=images, others=st.lists(tensors, max_size=3))
def test_the_command_line_reads_what_is_written(image, others):
    size = (image, *others) if others else image
    assert parse_input_size(input_size_text(size)) == size
    assert checked_input_size([list(one) for one in each_size(size)]) == size


@pytest.mark.parametrize(
    "given", [(), ((),), ((3,), (9,)), ((3, 8, 8), 5), ((3, 8, 8), (0,)), ((3, 8, 8), "16")]
)
def test_what_is_no_sizes_is_refused_with_what_would_do(given):
    with pytest.raises(PlanError, match=r"one size for each input, such as \(\(3, 64, 64\)"):
        checked_input_size(given)
