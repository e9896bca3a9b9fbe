"""Which windows layers get, and which size `auto` takes."""

import pytest
from torch import nn

from dcls_convert import convert_, find_convs, plan_conversion
from dcls_convert.errors import NothingMatchesError
from dcls_convert.layers.conv_classes import CONV_CLASSES
from dcls_convert.options import MAX_ADDED_COST_PERCENT, MAX_WINDOW
from dcls_convert.reports.report import predict_report

from ..dependence import WithOrdinary, seen
from ..rules import LARGER_THAN_1, rules_of
from .nets import convs_of, depthwise, plan_of

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
INPUT = {1: (2, 12), 2: (2, 12, 12), 3: (2, 12, 6, 6)}


def conv(dims, size, **options):
    return CONVS[dims](2, 2, size, groups=2, **options)


class CutTail(nn.Module):
    def forward(self, x):
        return x[..., :-3]


@pytest.mark.parametrize(
    "options", [{"size": 3, "padding": "valid"}, {"size": 4, "stride": 4}], ids=["valid", "patches"]
)
def test_outputs_depend_on_no_input_that_they_did_not_depend_on(options):
    """The larger window of either convolution would look too far."""
    model = WithOrdinary(conv(2, **options), conv(2, 3, padding=1)).double()
    before = seen(model, INPUT[2])
    start = {"dilated_size": "+4", "init": "random", "positions": "uniform", "budget": 800}
    report = convert_(model, rules=rules_of(LARGER_THAN_1), input_size=INPUT[2], **start)
    assert [layer.name for layer in report.layers] == ["ordinary"]
    (skip,) = report.skipped
    assert skip.name.startswith("odd")
    assert "does not centre its kernel" in skip.reason
    assert not (seen(model, INPUT[2]) & ~before).any()


def causal_in_time():
    pad = nn.ZeroPad3d((0, 0, 0, 0, 2, 0))
    return nn.Sequential(pad, conv(3, 3, padding=(0, 1, 1)))


@pytest.mark.parametrize("rule", [{}, {"dense_axes": [0]}], ids=str)
def test_a_window_that_does_not_grow_along_the_padded_axis_is_no_harm(rule):
    """In a network that is causal in time, windows may grow in space."""
    convs = find_convs(causal_in_time(), INPUT[3])
    rules = rules_of(LARGER_THAN_1 | rule)
    (layer,) = plan_conversion(convs, rules, dilated_size=[3, 5, 5]).layers
    assert layer.dilated_size == (3, 5, 5)
    assert layer.grow == ()


@pytest.mark.parametrize("name", ["depthwise", "auto"])
def test_where_all_are_off_centre_the_message_names_rules_that_convert_them(name):
    """Not measured: without an input size, nobody knows that the tail is cut off."""
    model = nn.Sequential(conv(1, 4, padding=3), CutTail())
    with pytest.raises(NothingMatchesError) as problem:
        convert_(model, rules=name)
    assert "0: its padding of 3 does not centre" in str(problem.value)
    for key, value in {"padding": "any", "grow": "back"}.items():
        assert f"{key}: {value}" in str(problem.value)
        rules = rules_of(LARGER_THAN_1 | {key: value})
        plan_conversion(find_convs(model), rules, dilated_size="+2")


def test_same_padding_of_any_kind_is_converted():
    model = nn.Sequential(depthwise(5), depthwise(3, padding=1, stride=2))
    plan = plan_conversion(find_convs(model, (4, 9, 14)), dilated_size="+2")
    assert [layer.dilated_size for layer in plan.layers] == [(7, 7), (5, 5)]


def test_an_axis_along_which_a_window_does_not_grow_has_no_side():
    rules = rules_of({"grow": "back"})
    (layer,) = plan_of(nn.Sequential(depthwise()), None, dilated_size=[9, 3], rules=rules).layers
    assert layer.grow == ("back", "both")
    (layer,) = plan_of(nn.Sequential(depthwise()), None, dilated_size=[3, 3], rules=rules).layers
    assert layer.grow == ()


def window_of(conv, size, **rule):
    """The window and dense axes that one convolution gets."""
    options = {"dilated_size": size, "rules": rules_of(rule), "budget": 10_000}
    (layer,) = plan_of(nn.Sequential(conv), None, **options).layers
    return layer.dilated_size, layer.dense_axes


@pytest.mark.parametrize(
    ("kernel", "size", "rule", "window", "dense_axes"),
    [
        ((1, 7), 17, {}, (1, 17), (0,)),
        ((1, 7), (9, 9), {}, (9, 9), ()),  # each side is stated
        ((3, 3, 5), (3, 7, 9), {"dense_axes": [0]}, (3, 7, 9), (0,)),
        ((3, 5), 17, {"dense_axes": [0]}, (3, 17), (0,)),
        ((3, 4), (5, 8), {}, (5, 8), ()),
        ((3,), 9, {}, (9,), ()),
    ],
)
def test_an_integer_leaves_sides_of_1_and_dense_axes(kernel, size, rule, window, dense_axes):
    conv = CONV_CLASSES[len(kernel)](4, 4, kernel, groups=4, padding="same")
    assert window_of(conv, size, **rule) == (window, dense_axes)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("convnext_tiny", 224),
        ("convnext_tiny", 128),  # the maps are the limit, not the MACs
        ("convnext_tiny", 64),  # most kernels reach over their maps as they are
        ("mixnet_s", 224),
        ("resnet18", 224),
    ],
)
def test_windows_grow_as_far_as_the_limits_allow(name, side):
    convs = convs_of(name, (3, side, side))
    plan = plan_conversion(convs)
    (growth,) = {growth for layer in plan.layers for growth in layer.growths}
    assert growth >= 2

    def is_usual(plan):
        """Whether windows and MACs are within the limits of `auto`."""
        beyond_maps = 0
        for layer in plan.layers:
            (rows, columns), (height, width) = layer.dilated_size, layer.input_extent
            beyond_maps += rows > 2 * height - 1 or columns > 2 * width - 1
        largest = max(max(layer.dilated_size) for layer in plan.layers)
        added_percent = 100 * (predict_report(plan).macs.after / convs.macs - 1)
        costs_little = added_percent <= MAX_ADDED_COST_PERCENT
        return costs_little and largest <= MAX_WINDOW and 2 * beyond_maps <= len(plan.layers)

    assert is_usual(plan) or growth == 2
    for larger in range(growth + 2, MAX_WINDOW + 1, 2):
        assert not is_usual(plan_conversion(convs, dilated_size=f"+{larger}"))


@pytest.mark.parametrize(
    ("conv", "window"),
    [
        (depthwise(7), (11, 11)),
        (depthwise((3, 5)), (7, 9)),
        (depthwise(3, dilation=(2, 1)), (9, 7)),
        (depthwise((1, 3), dilation=2), (1, 9)),  # the side of 1 has no dilation
    ],
)
def test_a_growth_adds_cells_to_the_extent_of_each_side(conv, window):
    assert window_of(conv, "+4")[0] == window
    assert window_of(conv, "auto", dilated_size="+4")[0] == window


@pytest.mark.parametrize(("too_large", "side"), [(1, MAX_WINDOW), (2, 7)])
def test_auto_lets_half_of_the_windows_be_larger_than_their_maps_and_not_more(too_large, side):
    """Of a window of more than 7 cells, some meet only padding on a map of 4."""
    costly = nn.Conv2d(3, 64, 15, padding=7)  # the MACs would allow windows of 17
    on_small_maps = [depthwise(3, 64) for _ in range(too_large)]
    model = nn.Sequential(costly, depthwise(3, 64, stride=8, padding=1), *on_small_maps)
    plan = plan_of(model, (3, 32, 32), dilated_size="auto")
    assert {layer.dilated_size for layer in plan.layers} == {(side, side)}


def test_auto_chooses_no_growth_that_a_layer_refuses():
    """Reflect padding of 4 does not fit a map of 4 cells; the MACs would allow windows of 17."""
    costly = nn.Conv2d(3, 64, 7, padding=3)
    strided = depthwise(3, 64, stride=8, padding=1)
    model = nn.Sequential(costly, strided, depthwise(3, 64, padding=1, padding_mode="reflect"))
    plan = plan_of(model, (3, 32, 32), dilated_size="auto")
    assert [layer.dilated_size for layer in plan.layers] == [(7, 7), (7, 7)]


def test_rules_that_state_sizes_keep_them_and_leave_the_others_to_auto():
    convs = convs_of("efficientnet_b0")
    rules = rules_of(
        {"match": {"kernel_size": [5, 5]}, "dilated_size": 9}, {"match": {"kind": "depthwise"}}
    )
    plan = plan_conversion(convs, rules)
    assert {(layer.kernel_size, layer.dilated_size) for layer in plan.layers} == {
        ((5, 5), (9, 9)),
        ((3, 3), (5, 5)),
    }


class Own(nn.Sequential):
    """A network of the user's own, which is measured."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_auto_takes_a_window_that_runs_though_the_one_that_is_tried_first_does_not():
    """Reflected cells of +4, which is tried before auto has chosen, are more than the map has."""
    causal_in_rows = [nn.ZeroPad2d((0, 0, 2, 0)), conv(2, (3, 1))]
    model = Own(*causal_in_rows, conv(2, (1, 3), padding=(0, 1), padding_mode="reflect"))
    plan = plan_conversion(find_convs(model, (2, 24, 3)), rules_of({}), budget=1000)
    assert [layer.dilated_size for layer in plan.layers] == [(5, 1), (1, 5)]
