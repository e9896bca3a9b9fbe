"""A larger window does not look where the old network could not."""

import pytest
import torch.nn.functional as F
from torch import nn

from dcls_convert import convert_, find_convs, plan_conversion, register_conv
from dcls_convert.errors import NothingMatchesError
from dcls_convert.geometry import keeps_centre
from dcls_convert.planning.rule_files import parse_rules

from ..dependence import WithOrdinary, seen
from .nets import depthwise

EVERYTHING = "format: 1\nrules: [{match: {kernel_size: {min: 2}}%s}]"
DEFAULT = parse_rules(EVERYTHING % "")
ANY = parse_rules(EVERYTHING % ", padding: any")
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
INPUT = {1: (2, 12), 2: (2, 12, 12), 3: (2, 12, 6, 6)}


def conv(dims, size, **options):
    return CONVS[dims](2, 2, size, groups=2, **options)


class PadsFirst(nn.Conv2d):
    """Declares a padding of rows above only."""

    def __init__(self):
        super().__init__(2, 2, 3, groups=2, padding=(0, 1))
        self.pad = nn.ZeroPad2d((0, 0, 2, 0))

    def forward(self, x):
        return self._conv_forward(self.pad(x), self.weight, self.bias)


register_conv(PadsFirst, padding_module="pad")


class Call(nn.Module):
    """A convolution, and what is done before and after it."""

    def __init__(self, conv, before=lambda x: x, after=lambda x: x):
        super().__init__()
        self.conv = conv
        self.before = before
        self.after = after

    def forward(self, x):
        return self.after(self.conv(self.before(x)))


def cut(end):
    return lambda x: x[:, :, :end]


# Number of dimensions, and the module whose larger window would look too far.
FORMS = {
    "padded before": (1, lambda: Call(conv(1, 3), lambda x: F.pad(x, (2, 0)))),
    "padded by a module": (1, lambda: nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), conv(1, 3))),
    "tail cut off": (1, lambda: Call(conv(1, 4, padding=3), after=cut(-3))),
    "dilated, tail cut off": (1, lambda: Call(conv(1, 3, dilation=2, padding=4), after=cut(-4))),
    "kernel of 2, tail cut off": (1, lambda: Call(conv(1, 2, padding=1), after=cut(-1))),
    "strided": (1, lambda: Call(conv(1, 4, stride=2), lambda x: F.pad(x, (2, 0)))),
    "causal in time": (
        3,
        lambda: Call(conv(3, 3, padding=(0, 1, 1)), lambda x: F.pad(x, (0, 0, 0, 0, 2, 0))),
    ),
    "rows above": (2, lambda: Call(conv(2, (2, 3), padding=(1, 1)), after=cut(-1))),
    "declared rows above": (2, PadsFirst),
    "valid": (2, lambda: conv(2, 3)),
    "declared valid": (2, lambda: conv(2, 3, padding="valid")),
    "patches": (2, lambda: conv(2, 4, stride=4)),
    "reflected": (2, lambda: nn.Sequential(nn.ReflectionPad2d(1), conv(2, 3))),
    "wrapped around": (1, lambda: Call(conv(1, 5), lambda x: F.pad(x, (2, 2), mode="circular"))),
}


def converted(model, rules, size):
    options = {"dilated_size": "+4", "init": "random", "positions": "uniform", "budget": 800}
    return convert_(model, rules=rules, input_size=size, **options)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_depend_on_no_input_that_they_did_not_depend_on(form):
    dims, build = FORMS[form]
    model = WithOrdinary(build(), conv(dims, 3, padding=1)).double()
    before = seen(model, INPUT[dims])
    report = converted(model, DEFAULT, INPUT[dims])
    assert [layer.name for layer in report.layers] == ["ordinary"]
    (skip,) = report.skipped
    assert skip.name.startswith("odd")
    assert "does not centre its kernel" in skip.reason
    assert not (seen(model, INPUT[dims]) & ~before).any()


@pytest.mark.parametrize("form", ["tail cut off", "declared rows above", "wrapped around"])
def test_a_rule_may_ask_for_it_all_the_same(form):
    dims, build = FORMS[form]
    model = WithOrdinary(build(), conv(dims, 3, padding=1)).double()
    before = seen(model, INPUT[dims])
    report = converted(model, ANY, INPUT[dims])
    assert len(report.layers) == 2
    assert (seen(model, INPUT[dims]) & ~before).any()


def test_a_window_that_does_not_grow_along_the_padded_axis_is_no_harm():
    """In a network that is causal in time, windows may grow in space."""
    dims, build = FORMS["causal in time"]
    rules = parse_rules(EVERYTHING % ", dense_axes: [0]")
    model = build().double()
    convs = find_convs(model, INPUT[dims])
    (layer,) = plan_conversion(convs, rules, dilated_size="+2").layers
    assert layer.dilated_size == (3, 5, 5)


@pytest.mark.parametrize("name", ["depthwise", "auto"])
def test_where_all_are_off_centre_the_message_names_the_rule(name):
    model = FORMS["tail cut off"][1]()
    with pytest.raises(
        NothingMatchesError, match=r"conv: its padding of 3 does not centre .*padding: any"
    ):
        convert_(model, rules=name, input_size=(2, 12))


# extent, stride, (before, after)
CENTRED = [
    (3, 1, (1, 1)),
    (7, 2, (3, 3)),
    (7, 4, (2, 2)),  # PoolFormer's patches overlap by 3 cells
    (4, 2, (1, 1)),
    (4, 1, (1, 1)),
    (4, 1, (2, 2)),
    (3, 2, (0, 1)),  # SAME
    (5, 2, (1, 2)),
    (1, 1, (0, 0)),
]
OFF_CENTRE = [
    (3, 1, (0, 0)),
    (3, 1, (2, 0)),
    (3, 1, (0, 2)),
    (3, 2, (1, 0)),
    (2, 2, (0, 0)),
    (2, 1, (1, 1)),
    (11, 4, (2, 2)),
    (5, 1, (1, 1)),
    (1, 1, (1, 1)),
]


def test_symmetric_and_same_padding_keep_the_centre():
    for extent, stride, (before, after) in CENTRED:
        assert keeps_centre(before, after, extent, stride), (extent, stride, before, after)
    for extent, stride, (before, after) in OFF_CENTRE:
        assert not keeps_centre(before, after, extent, stride), (extent, stride, before, after)


def test_same_padding_of_any_kind_is_converted():
    model = nn.Sequential(depthwise(5), depthwise(3, padding=1, stride=2))
    plan = plan_conversion(find_convs(model, (4, 9, 14)), dilated_size="+2")
    assert [layer.dilated_size for layer in plan.layers] == [(7, 7), (5, 5)]
