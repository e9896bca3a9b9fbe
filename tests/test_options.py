"""Percentages of budgets and limits."""

from fractions import Fraction

import pytest

from dcls_convert.errors import PlanError
from dcls_convert.options import parse_percent


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (0.1, Fraction(1, 1000)),  # the decimal as written, not the nearest binary number
        ("80%", Fraction(4, 5)),
        (80, Fraction(4, 5)),
        *((text, None) for text in ("", "80 per cent", "-5", "nan", 0, None)),
        ("1e-99999999999", None),  # as an exact number, this would fill the memory
    ],
)
def test_a_percentage_above_0_is_read_exactly_and_all_else_is_refused(text, share):
    if share is not None:
        assert parse_percent(text) == share
        return
    with pytest.raises(PlanError, match=r"^budget .* must be a percentage"):
        parse_percent(text)
