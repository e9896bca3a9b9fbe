"""Plans, and what is done with them: ties, windows, books, and models that stay as they are when something is wrong."""

import copy
import json
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from dcls_convert.errors import CheckpointError, DclsConvertError, PlanError
from dcls_convert.layers.dcls_conv import DclsConv2d, DclsConvNd
from dcls_convert.networks.sites import find_convs
from dcls_convert.planning.plan import plan_from_json
from dcls_convert.planning.planner import plan_conversion
from dcls_convert.planning.rules import parse_rules
from dcls_convert.planning.tie_groups import common_parent
from dcls_convert.reports.report import measure_report, predict_report
from dcls_convert.surgery.convert import convert_
from dcls_convert.surgery.fold import fold_to_dense_
from dcls_convert.surgery.start import apply_plan_

FLOAT64_ATOL = 1e-12  # some thousand roundings of 2e-16, of values of order 1
IMAGE = (4, 9, 14)
EVERYTHING = parse_rules("format: 1\nrules: [{}]")

laws = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small here: more threads only wait for each other, for seconds where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def depthwise(size=3, channels=4, **options):
    return nn.Conv2d(channels, channels, size, **({"padding": "same", "groups": channels} | options))


class Net(nn.Module):
    """A stem and two stages; `convs` is a function, so that each of its calls makes new ones."""

    def __init__(self, convs=lambda: [depthwise(), depthwise(), depthwise(5)]):
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 1)
        self.layer1, self.layer2 = nn.Sequential(*convs()), nn.Sequential(*convs())

    def forward(self, x):
        return self.layer2(self.layer1(self.stem(x)))


class Shared(nn.Module):
    """One convolution at two places, beside others; or two of the same shape."""

    def __init__(self, shared=True):
        super().__init__()
        self.first = depthwise()
        self.stages = nn.ModuleList([nn.Sequential(self.first if shared else depthwise()), nn.Sequential(depthwise())])
        self.stages.append(self.stages[0])

    def forward(self, x):
        for stage in self.stages:
            x = stage(self.first(x))
        return x


def plan_of(module, input_size=IMAGE, /, dilated_size=7, **options):
    return plan_conversion(find_convs(module, input_size), dilated_size=dilated_size, **options)


def on_meta(build, *arguments):
    with torch.device("meta"):
        return build(*arguments)


def fingerprint(model):
    """Types, modes and every tensor: what must not change where something is refused."""
    modules = {name: (id(m), type(m), m.training) for name, m in model.named_modules(remove_duplicate=False)}
    tensors = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    return modules, tensors


def assert_unchanged(model, before):
    modules, tensors = fingerprint(model)
    assert modules == before[0]
    assert tensors.keys() == before[1].keys()
    assert all(
        now == then and (tensor.is_meta or torch.equal(tensor, old))
        for (now, tensor), (then, old) in zip(tensors.values(), before[1].values(), strict=True)
    )


# JSON.

JSON_PLANS = {
    "tied": lambda: plan_of(Net()),
    "gaussian, per stage, share": lambda: plan_of(Net(), interpolation="gaussian", scope="stage", budget="233.333333"),
    "untied, without MACs": lambda: plan_of(Net(), None, tie="none", scope="layer"),
    "shared": lambda: plan_of(Shared(), kernel_count=4),
    "with arguments": lambda: plan_of(Net(), model="timm:x", model_args={"depths": [1, 2], "drop": 0.1, "act": None}),
    "with a tuple among the arguments": lambda: plan_of(Net(), model="timm:x", model_args={"img_size": (9, 14)}),
}


@pytest.mark.parametrize("name", JSON_PLANS)
def test_a_plan_survives_json(name):
    plan = JSON_PLANS[name]()
    again = plan_from_json(plan.to_json(), "plan.json")
    assert again.hash == plan.hash
    assert again.to_json() == plan.to_json()
    assert again == plan
    assert plan_from_json(json.dumps(plan.to_dict()), "plan.json") == plan


def test_the_hash_is_that_of_the_content():
    plan = plan_of(Net(), model="timm:x", model_args={"a": 1, "b": 2})
    assert plan_of(Net(), model="timm:x", model_args={"b": 2, "a": 1}).hash == plan.hash
    changes = [
        {"rules": "other"},
        {"share": Fraction(1, 3)},
        {"model_args": {"a": 1}},
        {"layers": (replace(plan.layers[0], kernel_count=plan.layers[0].kernel_count + 1), *plan.layers[1:])},
        {"skipped": ()},
    ]
    assert len({plan.hash, *(replace(plan, **change).hash for change in changes)}) == 1 + len(changes)


def nodes(value, path=()):
    """Every mapping and every leaf of a JSON value, with the path to it."""
    if isinstance(value, dict):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from nodes(inner, (*path, key))
    if not isinstance(value, dict | list):
        yield path, value


def accepted(data):
    """Whether such a plan is read; where it is not, one line is to name the file."""
    message = None
    try:
        plan_from_json(json.dumps(data), "folder/plan.json")
    except CheckpointError as error:
        message = str(error)
    assert message is None or re.fullmatch("folder/plan.json: [^\n]+", message)
    return message is None


def changed(data, path, value):
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return data


PLAN = plan_of(Net(), scope="stage", interpolation="gaussian", model="timm:x").to_dict()


def test_the_plan_that_is_damaged_below_is_read():
    assert accepted(PLAN)
    assert all(PLAN[key] for key in ("layers", "tie_groups", "skipped", "budget"))


def test_an_unknown_field_is_refused_wherever_it_stands():
    places = [path for path, value in nodes(PLAN) if isinstance(value, dict) and path != ("model_args",)]
    assert len(places) > 10
    # What a tie group shares is a mapping of names: another one there is a field like the others, until it is used.
    assert [path for path in places if accepted(changed(PLAN, (*path, "comment"), 1))] == []


def test_a_missing_field_is_refused_wherever_it_stood():
    missing = []
    for path, value in nodes(PLAN):
        if isinstance(value, dict) and path not in [("model_args",)] and "parameters" not in path:
            for key in value:
                data = copy.deepcopy(PLAN)
                inner = data
                for step in path:
                    inner = inner[step]
                del inner[key]
                missing += [(*path, key)] if accepted(data) else []
    assert missing == [("format",), ("model_args",)]  # which have a default


@pytest.mark.parametrize(
    ("of", "into"),
    [
        (int, str),
        (int, lambda value: value + 0.5),
        (int, bool),
        (int, lambda value: None),
        (bool, lambda value: int(value)),
        (str, lambda value: 3),
        (str, lambda value: [value]),
        (str, lambda value: {}),
    ],
    ids=["number as text", "half", "number as truth", "no number", "truth as number", "number", "list", "mapping"],
)
def test_a_value_of_another_type_is_refused_wherever_it_stands(of, into):
    leaves = [(path, value) for path, value in nodes(PLAN) if type(value) is of]
    assert leaves
    # A fraction may be written as a number, and what need not be known may be missing.
    optional = {"share", "exact_count", "output_positions", "params_before", "macs", "kernel_count"}
    taken = [path for path, value in leaves if accepted(changed(PLAN, path, into(value))) and path[-1] not in optional]
    assert taken == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"plan"', "{}", '{"format": 2}', "\0", b"\xff\xfe"])
def test_what_is_no_plan_is_refused_in_one_line(text):
    with pytest.raises(CheckpointError, match=r"^folder/plan.json: [^\n]+$"):
        plan_from_json(text, "folder/plan.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("layers", -1, "tie_group"), "nowhere"),
        (("layers", -1, "kernel_count"), -1),
        (("layers", -1, "dilated_size"), [8, 8]),
        (("layers", -1, "dilated_size"), [7]),
        (("layers", -1, "dense_axes"), [5]),
        (("layers", -1, "interpolation"), "cubic"),
        (("layers", -1, "names"), []),
        (("layers", -1, "names"), ["layer1.9"]),
        (("tie_groups", -1, "owner"), "layer9"),
    ],
    ids=str,
)
def test_a_plan_that_contradicts_itself_is_refused_before_the_model_changes(path, value):
    model = Net()
    before = fingerprint(model)
    data = changed(plan_of(model).to_dict(), path, value)
    with pytest.raises(DclsConvertError):
        apply_plan_(model, plan_from_json(json.dumps(data), "plan.json"))
    assert_unchanged(model, before)


# Ties.

SHAPES = [
    {"size": 3},
    {"size": 5},
    {"size": (3, 5)},
    {"size": 3, "dilation": 2},
    {"size": 3, "groups": 2},
    {"size": 3, "groups": 1},
    {"size": 3, "bias": False},
]


class Tree(nn.Module):
    """Convolutions in blocks in stages: `stages.{stage}.{block}.{index}`."""

    def __init__(self, stages):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.ModuleList(depthwise(**SHAPES[shape]) for shape in block) for block in blocks)
            for blocks in stages
        )


trees = st.lists(
    st.lists(st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=3), min_size=1, max_size=3),
    min_size=1,
    max_size=2,
)


@given(stages=trees, interpolation=st.sampled_from(["bilinear", "gaussian"]), scope=st.sampled_from(["model", "layer"]))
@laws
def test_layers_are_tied_where_stage_and_shape_are_the_same_and_nowhere_else(stages, interpolation, scope):
    model = on_meta(Tree, stages)
    plan = plan_of(model, None, dilated_size=9, rules=EVERYTHING, interpolation=interpolation, scope=scope, budget=1000)
    found = {layer.name: layer for layer in plan.layers}
    wanted = {}
    for name, conv in model.named_modules():
        if isinstance(conv, nn.Conv2d):
            key = (name.split(".")[1], conv.weight.shape, conv.kernel_size, conv.dilation)
            wanted.setdefault(key, set()).add(name)
    assert {frozenset(group.layers) for group in plan.tie_groups} == {
        frozenset(names) for names in wanted.values() if len(names) > 1
    }
    assert len({group.name for group in plan.tie_groups}) == len(plan.tie_groups)
    for group in plan.tie_groups:
        assert {found[name].tie_group for name in group.layers} == {group.name}
        assert len({found[name].kernel_count for name in group.layers}) == 1
    tied = {name for group in plan.tie_groups for name in group.layers}
    assert {layer.name for layer in plan.layers if layer.tie_group is None} == found.keys() - tied


@given(stages=trees, interpolation=st.sampled_from(["bilinear", "triangle"]))
@laws
def test_a_tied_parameter_has_one_name_on_the_lowest_module_that_holds_its_layers(stages, interpolation):
    model = on_meta(Tree, stages)
    plan = plan_of(model, None, dilated_size=9, rules=EVERYTHING, interpolation=interpolation, budget=1000)
    for group in plan.tie_groups:
        layers = {model.get_submodule(name) for name in group.layers}
        owner = model.get_submodule(group.owner)
        assert layers <= set(owner.modules())
        assert not any(layers <= set(child.modules()) for child in owner.children())
        assert set(group.parameters) == {"positions"} | ({"sigma"} if interpolation == "triangle" else set())
    places = [(group.owner, name) for group in plan.tie_groups for name in group.parameters.values()]
    assert len(set(places)) == len(places)
    apply_plan_(model, plan)
    for group in plan.tie_groups:
        for own, owners in group.parameters.items():
            parameter = model.get_submodule(group.owner)._parameters[owners]
            assert all(getattr(model.get_submodule(name), own) is parameter for name in group.layers)
    layers = [layer for layer in model.modules() if isinstance(layer, DclsConvNd)]
    assert len({layer.positions for layer in layers}) == len(plan.tie_groups) + sum(
        not layer.is_tied for layer in layers
    )
    assert len(model.state_dict()) == len(list(model.parameters())), "every tensor has one name"


@pytest.mark.parametrize(
    ("names", "parent"),
    [
        (["a.b.c", "a.b.d"], "a.b"),
        (["a.b.c", "a.bb.c"], "a"),
        (["a.b", "a.b.c"], "a"),  # a module cannot own what it shares with its child's parent
        (["a", "b.c"], ""),
        (["a.b.c"], "a.b"),
    ],
)
def test_common_parent_is_the_lowest_module_above_all(names, parent):
    assert common_parent(names) == parent


def test_layers_outside_of_stages_and_with_tie_none_have_positions_of_their_own():
    model = nn.Module()
    model.first, model.second = depthwise(), depthwise()
    assert plan_of(model, None).tie_groups == ()
    plan = plan_of(Net(), tie="none")
    assert plan.tie_groups == ()
    assert {layer.tie_group for layer in plan.layers} == {None}


# Windows.


def windows(conv, size, rule="{}"):
    """The window and dense axes that one convolution gets."""
    rules = parse_rules(f"format: 1\nrules: [{rule}]")
    (layer,) = plan_of(nn.Sequential(conv), None, dilated_size=size, rules=rules, budget=10_000).layers
    return layer.dilated_size, layer.dense_axes


@pytest.mark.parametrize(
    ("kernel", "size", "rule", "window", "dense_axes"),
    [
        (3, 17, "{}", (17, 17), ()),
        ((3, 5), (9, 17), "{}", (9, 17), ()),
        ((3, 5), 17, "{}", (17, 17), ()),
        ((1, 7), 17, "{}", (1, 17), (0,)),
        ((7, 1), 17, "{}", (17, 1), (1,)),
        ((1, 7), (1, 9), "{}", (1, 9), (0,)),
        ((1, 7), (9, 9), "{}", (9, 9), ()),  # asked for by name
        ((3, 5), 17, "{dense_axes: [0]}", (3, 17), (0,)),
        ((3, 5), 17, "{dense_axes: [1]}", (17, 5), (1,)),
        ((3, 5), (3, 17), "{dense_axes: [0]}", (3, 17), (0,)),
        (1, 9, "{}", (9, 9), ()),
        (4, 8, "{}", (8, 8), ()),
        ((3, 4), (5, 8), "{}", (5, 8), ()),
        ((3,), 9, "{}", (9,), ()),
        ((1, 3, 5), 9, "{}", (1, 9, 9), (0,)),
        ((3, 3, 5), (3, 7, 9), "{dense_axes: [0]}", (3, 7, 9), (0,)),
    ],
)
def test_an_integer_leaves_sides_of_1_and_dense_axes_as_they_are(kernel, size, rule, window, dense_axes):
    dims = len(kernel) if isinstance(kernel, tuple) else 2
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](4, 4, kernel, groups=4)
    assert windows(conv, size, rule) == (window, dense_axes)


def test_the_dilation_of_a_side_of_1_means_nothing():
    assert windows(depthwise((1, 3), dilation=2), 9) == ((1, 9), (0,))


@pytest.mark.parametrize(
    ("conv", "size", "rule", "message"),
    [
        (depthwise(3), 8, "{}", "must be odd as the kernel 3 is, or the output would shift; use 7 or 9"),
        (depthwise(4), 7, "{}", "must be even as the kernel 4 is, or the output would shift; use 6 or 8"),
        (depthwise(7), 5, "{}", "is smaller than the kernel 7 that it replaces; use 7 or more"),
        (depthwise(3, dilation=4), 7, "{}", "kernel 3 with dilation 4, extent 9, that it replaces; use 9 or more"),
        (depthwise((3, 4)), 7, "{}", r"window 7 \(axis 1 of 7x7\) must be even"),
        (depthwise((3, 4)), (7, 9), "{}", r"window 9 \(axis 1 of 7x9\) must be even"),
        (depthwise(3), (7,), "{}", "the size 7 is for 1-D, this convolution is 2-D"),
        (depthwise(3), (7, 7, 7), "{}", "the size 7x7x7 is for 3-D, this convolution is 2-D"),
        (depthwise(3), 7, "{dense_axes: [0, 1]}", "all its axes are dense; nothing would be learnt"),
        (depthwise((1, 7)), 9, "{dense_axes: [1]}", "all its axes are dense"),
        (depthwise(3), (5, 7), "{dense_axes: [0]}", "dense axis 0 must keep its size 3"),
        (depthwise(3, dilation=(2, 1)), 9, "{dense_axes: [0]}", "dense axis 0 must keep its size 3, undilated"),
        (depthwise(3), None, "{}", "no dilated size is stated"),
    ],
)
def test_a_window_that_no_convolution_can_take_is_refused_with_what_would_do(conv, size, rule, message):
    with pytest.raises(PlanError, match=f"^0: .*{message}"):
        windows(conv, size, rule)


@pytest.mark.parametrize("size", [0, -1, 7.0, "7", "7x7", True, (), (7, 0), (7.0, 7.0), (7, "7"), [[7]]], ids=repr)
def test_what_is_no_size_is_refused(size):
    with pytest.raises(PlanError, match=r"size|window"):
        plan_of(Net(), dilated_size=size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "block"}, "scope='block' must be one of model, stage, layer"),
        ({"tie": "all"}, "tie='all' must be one of stage, none"),
        ({"interpolation": "cubic"}, "interpolation='cubic' must be one of bilinear, triangle, gaussian"),
    ],
)
def test_an_unknown_option_is_refused_with_those_that_are_known(options, message):
    with pytest.raises(PlanError, match=message):
        plan_of(Net(), **options)


@pytest.mark.parametrize("padding", ["same", "valid", 0, (3, 1)])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("size", [(3, 7), (7, 9), (9, 9), (13, 3), (15, 15), (19, 17), (21, 19), (23, 33)])
def test_a_padding_that_does_not_fit_the_input_is_refused_and_any_other_runs(mode, padding, size):
    """Whether it fits is asked of torch, with the padding that keeps the output size."""
    conv = depthwise(3, padding=padding, padding_mode=mode)
    image = torch.zeros(1, *IMAGE)
    if padding == "same":
        sides = [((side - 1) // 2, side // 2) for side in size]
    else:
        before = (0, 0) if padding in ("valid", 0) else padding
        sides = [(pad + (side - 3) // 2,) * 2 for pad, side in zip(before, size, strict=True)]
    try:
        F.pad(image, [*sides[1], *sides[0]], mode="constant" if mode == "zeros" else mode)
        fits = True
    except RuntimeError:
        fits = False
    model = nn.Sequential(conv)
    if not fits:
        with pytest.raises(PlanError, match=f"^0: {mode} padding of .* does not fit its input of"):
            plan_of(model, dilated_size=size, rules=EVERYTHING)
        return
    wanted = conv(image).shape
    apply_plan_(model, plan_of(model, dilated_size=size, rules=EVERYTHING, budget=1000))
    assert model(image).shape == wanted


MIXED = {  # what cannot take a window at IMAGE that others can
    "even": (lambda: depthwise(4), 9, "must be even"),
    "large": (lambda: depthwise(11), 9, "is smaller than the kernel 11"),
    "dilated": (lambda: depthwise(3, dilation=5), 9, "extent 11"),
    "reflecting": (
        lambda: depthwise(3, padding_mode="reflect"),
        19,
        "reflect padding of 9 does not fit its input of 9",
    ),
}


@pytest.mark.parametrize("odd", MIXED)
def test_what_cannot_take_the_size_is_skipped_with_the_reason_or_refused_if_strict(odd):
    build, size, reason = MIXED[odd]
    model = Net(lambda: [depthwise(), build()])
    plan = plan_of(model, dilated_size=size)
    assert [layer.name for layer in plan.layers] == ["layer1.0", "layer2.0"]
    skipped = {skip.name: skip.reason for skip in plan.skipped}
    assert list(skipped) == ["stem", "layer1.1", "layer2.1"], "in the order of the model"
    assert reason in skipped["layer1.1"]
    with pytest.raises(PlanError, match=f"^layer1.1: .*{reason}.* \\(1 more like it\\)$"):
        plan_of(model, dilated_size=size, strict=True)
    with pytest.raises(PlanError, match=reason):  # nothing is left
        plan_of(Net(lambda: [build()]), dilated_size=size)


# Carrying out.


class OwnForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


def converted(model):
    apply_plan_(model, plan_of(model))
    return model


WRONG_MODELS = {
    "lacks a layer": lambda: Net(lambda: [depthwise(), depthwise()]),
    "no convolution": lambda: Net(lambda: [depthwise(), depthwise(), nn.Identity()]),
    "another dimension": lambda: Net(lambda: [depthwise(), depthwise(), nn.Conv1d(4, 4, 5, groups=4)]),
    "other channels": lambda: Net(lambda: [depthwise(), depthwise(), depthwise(5, channels=8)]),
    "a multiplier": lambda: Net(lambda: [depthwise(), depthwise(), nn.Conv2d(4, 8, 5, groups=4, padding=2)]),
    "other groups": lambda: Net(lambda: [depthwise(), depthwise(), depthwise(5, groups=2)]),
    "another kernel": lambda: Net(lambda: [depthwise(), depthwise(), depthwise(7)]),
    "another dilation": lambda: Net(lambda: [depthwise(), depthwise(), depthwise(5, dilation=2)]),
    "no bias": lambda: Net(lambda: [depthwise(), depthwise(), depthwise(5, bias=False)]),
    "own forward": lambda: Net(lambda: [depthwise(), depthwise(), OwnForward(4, 4, 5, groups=4, padding=2)]),
    "parametrised": lambda: Net(lambda: [depthwise(), depthwise(), parametrizations.weight_norm(depthwise(5))]),
    "weight_norm": lambda: Net(lambda: [depthwise(), depthwise(), weight_norm(depthwise(5))]),
    "converted": lambda: converted(Net()),
}


@pytest.mark.filterwarnings("ignore:.*deprecated in favor of:FutureWarning")
@pytest.mark.parametrize("wrong", WRONG_MODELS)
def test_a_plan_for_another_model_is_refused_and_the_model_unchanged(wrong):
    plan = plan_of(Net())
    model = WRONG_MODELS[wrong]()
    before = fingerprint(model)
    with pytest.raises(PlanError, match=r"^\w+.2: |^\w+.0: is a DclsConv2d, where the plan has a convolution$"):
        apply_plan_(model, plan)
    assert_unchanged(model, before)


@pytest.mark.parametrize("missing", [False, True], ids=["another object", "no module"])
def test_a_name_of_a_shared_object_that_is_not_that_object_is_refused(missing):
    """Or two convolutions would become one."""
    plan, model = plan_of(Shared()), Shared(shared=False)
    if missing:
        model.stages = nn.ModuleList([nn.Sequential(), nn.Sequential(depthwise())])
    before = fingerprint(model)
    with pytest.raises(PlanError):
        apply_plan_(model, plan)
    assert_unchanged(model, before)


def test_a_parameter_that_is_there_already_is_not_overwritten():
    model = Net()
    model.layer2.dcls_positions = nn.Parameter(torch.zeros(1))
    before = fingerprint(model)
    with pytest.raises(PlanError, match="layer2 already has a dcls_positions; is the model converted"):
        apply_plan_(model, plan_of(model))
    assert_unchanged(model, before)


@pytest.mark.parametrize("options", [{"init": "best"}, {"positions": "grid"}])
def test_an_unknown_way_to_start_is_refused_and_the_model_unchanged(options):
    model = Net()
    before = fingerprint(model)
    with pytest.raises(PlanError, match="must be one of"):
        apply_plan_(model, plan_of(model), **options)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("change", "model"),
    [(convert_, depthwise()), (fold_to_dense_, DclsConv2d(4, 4, kernel_count=3, dilated_kernel_size=7))],
    ids=["convert_", "fold_to_dense_"],
)
def test_a_model_that_is_itself_the_layer_cannot_be_changed_in_place_and_that_is_said(change, model):
    with pytest.raises(DclsConvertError):
        change(model)


def test_model_arguments_that_json_does_not_know_leave_no_model_half_done():
    """They are the user's own classes; a plan cannot hold them, but the conversion needs no more than the model."""
    model = timm.create_model("test_resnet", norm_layer=nn.BatchNorm2d)
    before = fingerprint(model)
    refused = False
    try:
        convert_(model)
    except DclsConvertError:
        refused = True
    if refused:
        assert_unchanged(model, before)
    assert any(isinstance(module, DclsConvNd) for module in model.modules()) is not refused


@pytest.mark.parametrize("build", [Shared, lambda: timm.create_model("coat_tiny")], ids=["shared", "coat_tiny"])
def test_a_shared_object_is_replaced_at_every_parent(build):
    model = on_meta(build)
    convs = find_convs(model)
    objects = {site.name: model.get_submodule(site.name) for site in convs.sites}
    assert any(len(site.names) > 1 for site in convs.sites)
    plan = plan_conversion(convs, dilated_size=7)
    apply_plan_(model, plan)
    for layer in plan.layers:
        found = {model.get_submodule(name) for name in layer.names}
        assert len(found) == 1
        assert isinstance(found.pop(), DclsConv2d)
    left = set(model.modules())
    assert not any(objects[layer.name] in left for layer in plan.layers)


@pytest.mark.parametrize("init", ["largest", "fit", "random"])
@pytest.mark.parametrize("interpolation", ["bilinear", "gaussian"])
def test_converting_depends_on_the_seed_alone_and_leaves_the_global_generator(init, interpolation):
    start = Net()

    def state(seed):
        model, generator = copy.deepcopy(start), torch.get_rng_state()
        convert_(model, dilated_size=7, input_size=IMAGE, interpolation=interpolation, init=init, seed=seed)
        assert torch.equal(torch.get_rng_state(), generator)
        torch.rand(5)  # the state of the global generator must not matter
        return model.state_dict()

    first, same, other = state(0), state(0), state(1)
    assert first.keys() == same.keys()
    assert all(torch.equal(first[name], same[name]) for name in first)
    differing = {name for name in first if not torch.equal(first[name], other[name])}
    positions = {name for name in first if "positions" in name}
    if init == "fit":  # from another start, other elements, unless the best start is one without chance
        replaced = {
            f"{layer.name}.weight" for layer in plan_conversion(find_convs(start, IMAGE), dilated_size=7).layers
        }
        assert differing <= positions | replaced
    else:
        assert differing == (positions if init == "random" else set())


# The books.

MODELS = {
    "net": (Net, IMAGE),
    "shared": (Shared, IMAGE),
    "without bias": (lambda: Net(lambda: [depthwise(bias=False), nn.Conv2d(4, 4, 3, padding=1)]), IMAGE),
    "1-D": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3, groups=4), nn.Conv1d(4, 4, 5, groups=4), nn.Linear(120, 2)),
        (4, 126),
    ),
    "3-D": (
        lambda: nn.Sequential(
            nn.Conv3d(4, 4, (1, 3, 3), groups=4, padding="same"),
            nn.Conv3d(4, 8, 3, groups=4, padding=1, stride=(1, 2, 1)),
        ),
        (4, 5, 9, 7),
    ),
    "test_convnext": (lambda: timm.create_model("test_convnext"), None),
    "test_efficientnet": (lambda: timm.create_model("test_efficientnet"), None),
    "resnet18": (lambda: timm.create_model("resnet18"), (3, 64, 64)),
    "coat_tiny": (lambda: timm.create_model("coat_tiny"), None),
}


@pytest.mark.parametrize(
    ("name", "interpolation"),
    [
        *((name, kind) for name in MODELS for kind in ("bilinear", "triangle", "gaussian") if name != "coat_tiny"),
        ("coat_tiny", "bilinear"),  # slow to trace
    ],
)
def test_the_report_of_the_plan_is_that_of_the_converted_model(name, interpolation):
    build, size = MODELS[name]
    model = on_meta(build)
    plan = plan_conversion(find_convs(model, size), dilated_size=9, interpolation=interpolation)
    predicted = predict_report(plan)
    apply_plan_(model, plan)
    measured = measure_report(model, plan)
    assert predicted == measured
    assert predicted.to_dict() == measured.to_dict()
    assert json.loads(predicted.to_json()) == predicted.to_dict()
    assert predicted.params.after == sum(parameter.numel() for parameter in model.parameters())
    for total, untouched, rows in [
        (
            predicted.params,
            predicted.params_untouched,
            [(row.params_before, row.params_after) for row in predicted.layers],
        ),
        (predicted.macs, predicted.macs_untouched, [(row.macs_before, row.macs_after) for row in predicted.layers]),
    ]:
        assert untouched >= 0
        assert total.before == untouched + sum(before for before, _ in rows)
        assert total.after == untouched + sum(after for _, after in rows)
        assert total.delta == total.after - total.before
    assert all(row.macs_after > row.macs_before for row in predicted.layers)
    assert predicted.params.weights + predicted.params.positions == predicted.budget.used <= predicted.budget.limit


def test_tied_positions_are_counted_in_the_first_layer_of_their_group():
    report = predict_report(plan_of(Net()))
    counted = {}
    for row in report.layers:
        counted.setdefault(row.tie_group or row.name, []).append(row.position_params > 0)
    assert sorted(counted.values(), key=len) == [[True], [True], [True, False], [True, False]]


def test_a_report_notices_a_model_that_is_not_what_was_planned():
    """It is measured, not repeated."""
    model = Net()
    plan = plan_of(model)
    apply_plan_(model, plan)
    model.layer1[0].bias = None
    model.stem = nn.Conv2d(4, 4, 3, padding=1)
    measured, predicted = measure_report(model, plan), predict_report(plan)
    assert measured.layers[0].params_after == predicted.layers[0].params_after - 4
    assert measured.params.after == predicted.params.after - 4 + 4 * 4 * 8
    assert measured.macs.after == predicted.macs.after + 9 * 14 * 4 * 4 * 8


# Folding.


def trained(model, seed=0):
    """In float64, with positions anywhere in the window and weights that are not those of the start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def outputs_of(model, size):
    with torch.no_grad():
        return model(torch.randn(2, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


FOLDED = {name: MODELS[name] for name in ("net", "shared", "without bias", "1-D", "3-D")}
FOLDED["test_convnext"] = (MODELS["test_convnext"][0], (3, 32, 48))


@pytest.mark.parametrize("interpolation", ["bilinear", "triangle", "gaussian"])
@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize(
    "fold",
    [lambda model: (model, fold_to_dense_(model)), lambda model: (reparameterize_model(model), None)],
    ids=["ours", "timm's"],
)
def test_folding_keeps_the_outputs(name, interpolation, fold):
    build, size = FOLDED[name]
    model = build()
    plan = plan_conversion(find_convs(model, size), dilated_size=7, interpolation=interpolation)
    apply_plan_(model, plan, init="random", positions="uniform")
    trained(model)
    wanted = outputs_of(model, size)
    folded, count = fold(model)
    assert not any(isinstance(module, DclsConvNd) for module in folded.modules())
    torch.testing.assert_close(outputs_of(folded, size), wanted, rtol=FLOAT64_ATOL, atol=FLOAT64_ATOL)
    if count is not None:
        assert count == len(plan.layers)
        assert not [key for key in folded.state_dict() if "positions" in key or "sigma" in key]
        assert fold_to_dense_(folded) == 0
    assert {tuple(folded.get_submodule(layer.name).kernel_size) for layer in plan.layers} == {
        layer.dilated_size for layer in plan.layers
    }


def test_folding_a_part_leaves_the_rest_as_it_was():
    """Its tied positions belong to layers outside of the part as well."""
    model = Net()
    convert_(model, dilated_size=7, input_size=IMAGE)
    wanted = outputs_of(trained(model), IMAGE)
    part = nn.Sequential(model.layer1[0], model.layer1[2])
    assert fold_to_dense_(part) == 2
    torch.testing.assert_close(outputs_of(model, IMAGE), wanted, rtol=0, atol=0)
