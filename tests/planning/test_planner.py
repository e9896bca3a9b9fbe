"""Plans: which layers are tied, which windows they get, and what is skipped or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert.conversion.apply_plan import apply_plan_
from dcls_convert.errors import PlanError
from dcls_convert.layers.conv_classes import CONV_CLASSES
from dcls_convert.options import MAX_ADDED_COST_PERCENT, MAX_WINDOW
from dcls_convert.planning.layer_plan import position_groups
from dcls_convert.planning.plan import ConversionPlan
from dcls_convert.planning.planner import plan_conversion
from dcls_convert.planning.rule_files import parse_rules
from dcls_convert.reports.report import predict_report

from .nets import Net, convs_of, depthwise, on_meta, plan_of


def rules_with(text):
    return parse_rules(f"format: 1\nrules: [{{{text}}}]")


EVERYTHING = rules_with("padding: any")

# Ties.

SHAPES = [
    {"size": 3},
    {"size": 5},
    {"size": 3, "dilation": 2},
    {"size": 3, "groups": 2},
    {"size": 3, "groups": 1},
    {"size": 3, "bias": False},
]


def tree(stages):
    """Convolutions in blocks in stages: `stages.{stage}.{block}.{index}`."""

    def module(node):
        if isinstance(node, int):
            return depthwise(**SHAPES[node])
        return nn.ModuleList(map(module, node))

    return nn.ModuleDict({"stages": module(stages)})


blocks = st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=2)
trees = st.lists(st.lists(blocks, min_size=1, max_size=3), min_size=1, max_size=2)


def tied(plan):
    """Return the groups of layers that share positions."""
    return [group for group in position_groups(plan.layers) if group[0].tie_group is not None]


@given(stages=trees, interpolation=st.sampled_from(["bilinear", "gaussian"]))
def test_layers_of_one_stage_and_shape_share_positions_and_no_others_do(stages, interpolation):
    model = on_meta(tree, stages)
    alike = {}
    for name, conv in model.named_modules():
        if isinstance(conv, nn.Conv2d):
            key = (name.split(".")[1], conv.weight.shape, conv.kernel_size, conv.dilation)
            alike.setdefault(key, []).append(name)
    options = {"dilated_size": 9, "rules": EVERYTHING, "budget": 1000}
    plan = plan_of(model, None, interpolation=interpolation, **options)
    groups = [[layer.name for layer in group] for group in tied(plan)]
    assert sorted(groups) == sorted(names for names in alike.values() if len(names) > 1)
    apply_plan_(model, plan)
    shared = {"positions", "sigma"} if interpolation == "gaussian" else {"positions"}
    for owner, *others in tied(plan):
        assert owner.owner is None
        parameters = model.get_submodule(owner.name)._parameters
        for layer in others:
            assert (layer.owner, layer.kernel_count) == (owner.name, owner.kernel_count)
            module = model.get_submodule(layer.name)
            assert all(getattr(module, name) is parameters[name] for name in shared)
    assert len([name for name in model.state_dict() if "positions" in name]) == len(alike)


def test_frozen_convolutions_are_not_tied_to_those_that_are_trained():
    model = Net(lambda: [depthwise(), depthwise(), depthwise()])
    model.layer1[0].weight.requires_grad_(False)  # its bias is trained
    model.layer1[2].requires_grad_(False)
    plan = plan_of(model)
    groups = [[layer.name for layer in group] for group in tied(plan)]
    assert ["layer1.0", "layer1.2"] in groups
    assert all("layer1.1" not in group for group in groups)
    apply_plan_(model, plan)
    trained = [model.get_submodule(f"layer1.{i}").positions.requires_grad for i in range(3)]
    assert trained == [False, True, False]


def test_layers_outside_of_stages_and_with_tie_none_have_positions_of_their_own():
    model = nn.Module()
    model.first = depthwise()
    model.second = depthwise()
    for plan in (plan_of(model, None), plan_of(Net(), tie="none")):
        assert not tied(plan)
        assert {layer.tie_group for layer in plan.layers} == {None}


def test_layers_are_tied_only_if_their_windows_grow_alike():
    rules = {
        "format": 1,
        "rules": [
            {"match": {"path": "layer*.0"}, "grow": "back"},
            {"match": {"path": "layer*.1"}, "grow": ["back", "ahead"]},
            {"match": {"path": "layer*.[23]"}, "grow": "back"},
        ],
    }
    model = Net(lambda: [depthwise() for _ in range(4)])
    plan = plan_of(model, rules=rules)
    assert {tuple(layer.name[-1] for layer in group) for group in tied(plan)} == {("0", "2", "3")}
    assert ConversionPlan.from_dict(plan.to_dict()) == plan


def test_an_axis_along_which_a_window_does_not_grow_has_no_side():
    rules = rules_with("grow: back")
    (layer,) = plan_of(nn.Sequential(depthwise()), None, dilated_size=[9, 3], rules=rules).layers
    assert layer.grow == ("back", "both")
    (layer,) = plan_of(nn.Sequential(depthwise()), None, dilated_size=[3, 3], rules=rules).layers
    assert layer.grow == ()


# Windows.


def windows(conv, size, rule=""):
    """The window and dense axes that one convolution gets."""
    options = {"dilated_size": size, "rules": rules_with(rule), "budget": 10_000}
    (layer,) = plan_of(nn.Sequential(conv), None, **options).layers
    return layer.dilated_size, layer.dense_axes


@pytest.mark.parametrize(
    ("kernel", "size", "rule", "window", "dense_axes"),
    [
        ((1, 7), 17, "", (1, 17), (0,)),
        ((1, 7), (9, 9), "", (9, 9), ()),  # each side is stated
        ((3, 3, 5), (3, 7, 9), "dense_axes: [0]", (3, 7, 9), (0,)),
        ((3, 5), 17, "dense_axes: [0]", (3, 17), (0,)),
        ((3, 4), (5, 8), "", (5, 8), ()),
        ((3,), 9, "", (9,), ()),
    ],
)
def test_an_integer_leaves_sides_of_1_and_dense_axes(kernel, size, rule, window, dense_axes):
    conv = CONV_CLASSES[len(kernel)](4, 4, kernel, groups=4, padding="same")
    assert windows(conv, size, rule) == (window, dense_axes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            ({"dilated_size": size}, "dilated size .* must be a positive integer, one for each")
            for size in [0, "7x7", True, (7, 0)]
        ),
        ({"dilated_size": "+3"}, r"growth \+3 must be even, .* use \+2 or \+4$"),
        ({"dilated_size": 8}, "layer1.0: .* must be odd as the kernel 3 is.* use 7 or 9"),
        ({"dilated_size": (7,)}, "layer1.0: the size 7 is for 1-D, this convolution is 2-D"),
        ({"rules": rules_with("dense_axes: [0, 1]")}, "all its axes are dense"),
        ({"scope": "stage"}, "scope=.* must be one of"),
        *(
            ({"kernel_count": count}, "must be a positive integer, auto or exact")
            for count in (0, True, "34")
        ),
        ({"scope": "error"}, "needs the trained kernels, which are not given here"),
        ({"kernel_count": 50}, "layer1.0: kernel count 50 is more than the 49 cells"),
        ({"kernel_count": 5, "budget": 50}, "kernel count states the count"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_impossible_option_is_refused(options, says):
    with pytest.raises(PlanError, match=says):
        plan_of(Net(), **{"strict": True, **options})


@pytest.mark.parametrize(
    ("build", "size", "reason"),
    [
        (lambda: depthwise(4), 9, "must be even"),
        (
            lambda: depthwise(3, padding_mode="reflect"),
            19,
            "reflect padding of 9 does not fit its input of 9",
        ),
        (
            lambda: depthwise(3, padding_mode="circular"),
            21,
            "circular padding of 10 does not fit its input of 9",
        ),
    ],
)
def test_a_layer_that_cannot_take_the_size_is_skipped_with_the_reason_or_refused_if_strict(
    build, size, reason
):
    model = Net(lambda: [depthwise(), build()])
    plan = plan_of(model, dilated_size=size)
    assert [layer.name for layer in plan.layers] == ["layer1.0", "layer2.0"]
    skipped = {skip.name: skip.reason for skip in plan.skipped}
    assert list(skipped) == ["stem", "layer1.1", "layer2.1"], "in the order of the model"
    assert reason in skipped["layer1.1"]
    with pytest.raises(PlanError, match=f"^layer1.1: .*{reason}.* \\(and 1 more layer\\)$"):
        plan_of(model, dilated_size=size, strict=True)
    with pytest.raises(PlanError, match=reason):  # nothing is left
        plan_of(Net(lambda: [build()]), dilated_size=size)


# The size "auto".


@pytest.mark.parametrize("name", ["convnext_tiny", "mixnet_s", "resnet18"])
def test_windows_grow_as_far_as_the_limits_allow(name):
    convs = convs_of(name)
    plan = plan_conversion(convs)
    (growth,) = {growth for layer in plan.layers for growth in layer.growths}
    assert growth >= 2

    def is_usual(plan):
        """Whether windows and MACs are within the limits of `auto`."""
        largest = max(max(layer.dilated_size) for layer in plan.layers)
        added_percent = 100 * (predict_report(plan).macs.after / convs.macs - 1)
        return largest <= MAX_WINDOW and added_percent <= MAX_ADDED_COST_PERCENT

    assert is_usual(plan) or growth == 2
    for larger in range(growth + 2, MAX_WINDOW + 1, 2):
        assert not is_usual(plan_conversion(convs, dilated_size=f"+{larger}"))


@pytest.mark.parametrize(
    ("conv", "rule", "window"),
    [
        (depthwise(7), "", (11, 11)),
        (depthwise((3, 5)), "", (7, 9)),
        (depthwise(3, dilation=(2, 1)), "", (9, 7)),
        (depthwise((1, 3), dilation=2), "", (1, 9)),  # the side of 1 has no dilation
    ],
)
def test_a_growth_adds_cells_to_the_extent_of_each_side(conv, rule, window):
    assert windows(conv, "+4", rule)[0] == window
    assert windows(conv, "auto", f"dilated_size: +4, {rule}")[0] == window


def test_auto_chooses_no_growth_that_a_layer_refuses():
    """Reflect padding of 4 does not fit a map of 4 cells; the MACs would allow windows of 17."""
    costly = nn.Conv2d(3, 64, 7, padding=3)
    strided = depthwise(3, 64, stride=8, padding=1)
    model = nn.Sequential(costly, strided, depthwise(3, 64, padding=1, padding_mode="reflect"))
    plan = plan_of(model, (3, 32, 32), dilated_size="auto")
    assert [layer.dilated_size for layer in plan.layers] == [(7, 7), (7, 7)]


def test_a_growth_converts_kernels_of_both_parities():
    plan = plan_of(Net(lambda: [depthwise(3), depthwise(4)]), dilated_size="+2", strict=True)
    assert {layer.dilated_size for layer in plan.layers} == {(5, 5), (6, 6)}
    assert plan.growth_of_mixed_kernels == 2


def test_rules_that_state_sizes_keep_them_and_leave_the_others_to_auto():
    convs = convs_of("efficientnet_b0")
    rules = {
        "format": 1,
        "rules": [
            {"match": {"kernel_size": [5, 5]}, "dilated_size": 9},
            {"match": {"kind": "depthwise"}},
        ],
    }
    plan = plan_conversion(convs, rules)
    assert {(layer.kernel_size, layer.dilated_size) for layer in plan.layers} == {
        ((5, 5), (9, 9)),
        ((3, 3), (5, 5)),
    }
