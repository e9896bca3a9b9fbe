"""Requests: options that contradict each other are refused."""

from pathlib import Path

import pytest

from dcls_convert import PlanError
from dcls_convert.planning.plan_options import PlanOptions

from ..conftest import TINY
from ..requests import request_of
from .networks import NOISE, small_model


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": TINY, "init": "fit"}, "init 'fit' needs trained weights"),
        ({"model": TINY, "options": PlanOptions(scope="error")}, "scope 'error' needs trained"),
        ({"init": "largest", "options": PlanOptions(scope="error")}, "scope 'error' is for init"),
        ({"model": TINY, "calibration": NOISE}, "calibration needs trained weights"),
        ({"init": "random", "calibration": NOISE}, "calibration is for init 'fit'"),
        ({"calibration": NOISE, "dry_run": True}, "calibration needs kernels and images"),
        ({"model": TINY, "pretrained": True, "weights": {}}, "exclude each other"),
        ({"plan_folder": Path("other"), "options": PlanOptions(budget=80)}, "a plan is applied"),
        ({"init": "exact", "options": PlanOptions(budget=80)}, "omit budget"),
        ({"init": "best"}, "must be one of"),
        ({"seed": 2**63}, "must be from 0 to"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_in_conflict_are_refused_by_the_request(settings, says):
    with pytest.raises(PlanError, match=says):
        request_of(**{"model": small_model(), **settings})
