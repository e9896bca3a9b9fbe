"""Which layers of a plan share their positions."""

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert.conversion.apply_plan import apply_plan_
from dcls_convert.planning.layer_plan import position_groups
from dcls_convert.planning.plan import ConversionPlan

from ..rules import rules_of
from .nets import Net, depthwise, on_meta, plan_of

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
    options = {"dilated_size": 9, "rules": rules_of({"padding": "any"}), "budget": 1000}
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
    rules = rules_of(
        {"match": {"path": "layer*.0"}, "grow": "back"},
        {"match": {"path": "layer*.1"}, "grow": ["back", "ahead"]},
        {"match": {"path": "layer*.[23]"}, "grow": "back"},
    )
    model = Net(lambda: [depthwise() for _ in range(4)])
    plan = plan_of(model, rules=rules)
    assert {tuple(layer.name[-1] for layer in group) for group in tied(plan)} == {("0", "2", "3")}
    assert ConversionPlan.from_dict(plan.to_dict()) == plan
