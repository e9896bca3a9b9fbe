"""A larger window does not look where the old network could not."""

import pytest
from torch import nn

from dcls_convert import convert_, find_convs, plan_conversion
from dcls_convert.errors import NothingMatchesError
from dcls_convert.geometry import keeps_centre
from dcls_convert.planning.rule_files import parse_rules

from ..dependence import WithOrdinary, seen
from .nets import depthwise

EVERYTHING = "format: 1\nrules: [{match: {kernel_size: {min: 2}}%s}]"
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
INPUT = {1: (2, 12), 2: (2, 12, 12), 3: (2, 12, 6, 6)}


def conv(dims, size, **options):
    return CONVS[dims](2, 2, size, groups=2, **options)


class CutTail(nn.Module):
    def forward(self, x):
        return x[..., :-3]


# Number of dimensions, and the module whose larger window would look too far.
FORMS = {
    "valid": (2, lambda: conv(2, 3, padding="valid")),
    "patches": (2, lambda: conv(2, 4, stride=4)),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_depend_on_no_input_that_they_did_not_depend_on(form):
    dims, build = FORMS[form]
    model = WithOrdinary(build(), conv(dims, 3, padding=1)).double()
    before = seen(model, INPUT[dims])
    options = {"dilated_size": "+4", "init": "random", "positions": "uniform", "budget": 800}
    rules = parse_rules(EVERYTHING % "")
    report = convert_(model, rules=rules, input_size=INPUT[dims], **options)
    assert [layer.name for layer in report.layers] == ["ordinary"]
    (skip,) = report.skipped
    assert skip.name.startswith("odd")
    assert "does not centre its kernel" in skip.reason
    assert not (seen(model, INPUT[dims]) & ~before).any()


def causal_in_time():
    pad = nn.ZeroPad3d((0, 0, 0, 0, 2, 0))
    return nn.Sequential(pad, conv(3, 3, padding=(0, 1, 1)))


@pytest.mark.parametrize("rule", ["", ", dense_axes: [0]"])
def test_a_window_that_does_not_grow_along_the_padded_axis_is_no_harm(rule):
    """In a network that is causal in time, windows may grow in space."""
    convs = find_convs(causal_in_time(), INPUT[3])
    (layer,) = plan_conversion(convs, parse_rules(EVERYTHING % rule), dilated_size=[3, 5, 5]).layers
    assert layer.dilated_size == (3, 5, 5)
    assert layer.grow == ()


@pytest.mark.parametrize("name", ["depthwise", "auto"])
def test_where_all_are_off_centre_the_message_names_rules_that_convert_them(name):
    """Not measured: without an input size, nobody knows that the tail is cut off."""
    model = nn.Sequential(conv(1, 4, padding=3), CutTail())
    with pytest.raises(NothingMatchesError) as problem:
        convert_(model, rules=name)
    assert "0: its padding of 3 does not centre" in str(problem.value)
    for key in ("padding: any", "grow: back"):
        rules = parse_rules(EVERYTHING % f", {key}")
        assert key in str(problem.value)
        plan_conversion(find_convs(model), rules, dilated_size="+2")


# cells before and after, extent, stride
CENTRED = [
    ((1, 1), 3, 1),
    ((3, 3), 7, 2),
    ((2, 2), 7, 4),  # PoolFormer's patches overlap by 3 cells
    ((1, 1), 4, 1),
    ((2, 2), 4, 1),
    ((0, 0), 1, 1),
    ((0, 1), 3, 2),  # TensorFlow's SAME padding
]
OFF_CENTRE = [
    ((0, 0), 3, 1),
    ((1, 1), 2, 1),
    ((2, 2), 11, 4),
    ((1, 1), 1, 1),
    ((2, 0), 3, 1),
    ((1, 0), 2, 1),
]


def test_padding_of_half_the_kernel_keeps_the_centre():
    for numbers in CENTRED:
        assert keeps_centre(*numbers), numbers
    for numbers in OFF_CENTRE:
        assert not keeps_centre(*numbers), numbers


def test_same_padding_of_any_kind_is_converted():
    model = nn.Sequential(depthwise(5), depthwise(3, padding=1, stride=2))
    plan = plan_conversion(find_convs(model, (4, 9, 14)), dilated_size="+2")
    assert [layer.dilated_size for layer in plan.layers] == [(7, 7), (5, 5)]
