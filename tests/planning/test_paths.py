"""Paths of modules in rules, and those that a message names as the nearest."""

import pytest

from dcls_convert.errors import NothingMatchesError
from dcls_convert.planning.paths import matches_path

from ..rules import rules_of
from .nets import Net, plan_of


def rules(*paths):
    return rules_of({"match": {"path": list(paths), "kind": "depthwise"}})


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
