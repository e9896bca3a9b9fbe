"""Sentences on how close outputs stayed."""

import pytest

from dcls_convert.reports.outcome import Outcome, outcome_sentences


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        # A share of few images is not a percentage.
        ({"images": 1, "same_top1": 1.0}, "On 1 held-out image: 1 of 1 have the same top-1"),
        (
            {"images": 12, "same_largest": 0.75},
            "On 12 held-out images: 9 of 12 have the same largest output as before (75 %).",
        ),
        # Images from the calibration's folder are said to be, and crops are not called images.
        (
            {"images": 10, "files_held_out": 2},
            "On 10 crops of 2 held-out images from the calibration's folder",
        ),
    ],
)
def test_how_close_outputs_stayed_is_said_for_what_was_compared(outcome, line):
    sentences = outcome_sentences(Outcome(kernel_error=0.2, fitted_images=9, **outcome))
    assert line in sentences[-1]
