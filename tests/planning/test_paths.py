"""Paths of modules in rules and in `ConversionPlan.without`, and plans without some layers."""

import pytest

from dcls_convert.errors import NothingMatchesError, PlanError
from dcls_convert.planning.paths import matches_path
from dcls_convert.planning.plan import ConversionPlan

from .nets import Net, plan_of


def rules(*paths):
    return {"format": 1, "rules": [{"match": {"path": list(paths), "kind": "depthwise"}}]}


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("enc1", {"enc1", "enc1.0", "enc1.0.conv"}, {"enc10", "enc10.0", "stem.enc1"}),
        ("enc1.0", {"enc1.0", "enc1.0.conv"}, {"enc1", "enc1.01"}),
        ("*.conv", {"enc1.0.conv", "stem.conv"}, {"conv", "stem.conv.inner"}),
        ("enc[12].0", {"enc1.0", "enc2.0"}, {"enc3.0", "enc1.0.conv"}),
    ],
)
def test_a_plain_path_matches_all_inside_it_and_a_pattern_whole_names(pattern, matched, others):
    assert {name for name in matched | others if matches_path([name], [pattern])} == matched


def test_a_rule_matches_any_of_its_paths_and_if_none_is_right_the_nearest_are_named():
    plan = plan_of(Net(), rules=rules("layer1.0", "layer2.?"))
    names = ["layer1.0", "layer2.0", "layer2.1", "layer2.2"]
    assert [layer.name for layer in plan.layers] == names
    with pytest.raises(NothingMatchesError, match=r"no path is lajer1, the nearest are layer1"):
        plan_of(Net(), rules=rules("lajer1"))


# A plan without some layers.


def test_a_plan_without_some_layers_is_the_same_for_all_others():
    whole = plan_of(Net())
    part = whole.without("layer2.*")
    assert part.layers == whole.layers[:3] == whole.without("layer2").layers
    assert part.budget.limit == sum(layer.dense_weights for layer in part.layers)
    assert ConversionPlan.from_json(part.to_json()) == part
    reasons = {skip.name: skip.reason for skip in part.skipped}
    assert reasons["layer2.1"] == "left out of the plan by layer2.*"
    # A layer that is left alone in its tie group gets its own positions.
    alone = whole.without(["layer1.1", "layer2"])
    assert [layer.tie_group for layer in alone.layers] == [None, None]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("layer3", "the plan has no layer layer3; the nearest are layer2, layer1"),
        (["layer1", "layer2"], "without layer1, layer2, no layer of the plan would remain"),
    ],
)
def test_unknown_layers_and_all_layers_at_once_cannot_be_left_out(paths, message):
    with pytest.raises(PlanError, match=message):
        plan_of(Net()).without(paths)
