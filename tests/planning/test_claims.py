"""Which rule claims which convolution, and whose values apply."""

import re
from dataclasses import replace

import pytest
from torch import nn

from dcls_convert.errors import NothingMatchesError, RuleError
from dcls_convert.networks.find_convs import find_convs
from dcls_convert.planning.claims import choose_rules, match_rules
from dcls_convert.planning.planner import plan_conversion
from dcls_convert.planning.rule_files import load_rules, parse_rules

from ..rules import rules_of
from .nets import SITE, convs_of, depthwise, plan_of


@pytest.fixture(scope="module")
def net():
    """A stem, a stage with two depthwise convolutions and a dense one, a stage with one of each.

    The depthwise convolutions of the first stage have different sizes.
    """
    model = nn.Sequential()
    model.stem = nn.Conv2d(3, 4, 3, padding=1)
    model.layer1 = nn.Sequential(depthwise(3), depthwise(5), nn.Conv2d(4, 4, 3, padding=1))
    model.layer2 = nn.Sequential(depthwise(3), nn.Conv2d(4, 8, (1, 3), padding=(0, 1)))
    return find_convs(model, (3, 9, 14))


def test_the_first_rule_that_matches_claims(net):
    rules = rules_of(
        {"name": "small", "match": {"kind": "depthwise", "kernel_size": 3, "stage": "layer1"}},
        {"name": "depthwise", "match": {"kind": "depthwise"}},
        {"name": "late", "match": {"stage": "layer2"}, "skip": "too late to matter"},
    )
    assert match_rules(rules, net.sites)[0] == {
        "layer1.0": 0,
        "layer1.1": 1,
        "layer2.0": 1,
        "layer2.1": 2,
    }
    plan = plan_conversion(net, rules, dilated_size=9)
    assert {layer.name: layer.rule for layer in plan.layers}["layer2.0"] == "depthwise"
    missed = "not matched (none of 3 rules)"
    reasons = {skip.name: skip.reason for skip in plan.skipped}
    assert reasons == {"stem": missed, "layer1.2": missed, "layer2.1": "too late to matter"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"skip": "all of it"}], "its rules skip all that they match"),
        (
            [{"name": "never", "match": {"kind": "grouped"}}, {"match": {"kind": "depthwise"}}],
            "rule 'never' claims nothing: no convolution of the model matches it",
        ),
        (
            [{"match": {"kind": "depthwise"}}, {"match": {"kernel_size": 5}}],
            r"rule 'rules\[1\]' claims nothing: earlier rules claim all that it matches",
        ),
        (
            [{"match": {"kind": "grouped"}}],
            "it has 2 depthwise 3x3, .*; rules 'depthwise' would match 3; rules 'conv3x3' would",
        ),
    ],
)
def test_a_rule_that_converts_nothing_is_an_error_that_names_it(net, rules, message):
    with pytest.raises((RuleError, NothingMatchesError), match=message):
        plan_conversion(net, rules_of(*rules), dilated_size=9)


def test_the_error_for_a_network_without_a_built_in_set_has_a_rule_that_matches():
    model = nn.Sequential(nn.Conv2d(1, 4, 9), nn.Conv2d(4, 4, 5, padding=2), nn.Conv2d(4, 4, 1))
    convs = find_convs(model)
    with pytest.raises(NothingMatchesError) as error:
        plan_conversion(convs, "conv3x3")
    match = re.search("a rule file with `(.*)` would match 1", str(error.value))[1]
    assert match_rules(parse_rules(f"format: 1\nrules: [{{{match}}}]"), convs.sites)[0] == {"1": 0}


CLAIMS = {"match": {"kind": "depthwise", "kernel_size": 3}}
OTHERS = {"match": {"kind": "depthwise"}}  # states nothing, so options have an effect


@pytest.mark.parametrize(
    ("key", "rule", "option", "default", "expected"),
    [
        ("dilated_size", None, None, 11, (11, 11)),
        ("kernel_count", None, 3, None, 3),
        ("kernel_count", 2, "auto", None, 2),
        ("interpolation", None, "gaussian", None, "gaussian"),
        ("interpolation", "triangle", "gaussian", None, "triangle"),
    ],
)
def test_a_rule_overrules_an_option_and_an_option_a_default(
    net, key, rule, option, default, expected
):
    top = {"defaults": {key: default}} if default else {}
    rules = rules_of(CLAIMS | ({key: rule} if rule else {}), OTHERS, **top)
    options = {} if key == "dilated_size" else {"dilated_size": 9}
    options |= {} if option is None else {key: option}
    plan = plan_conversion(net, rules, **options)
    assert {getattr(layer, key) for layer in plan.layers if layer.kernel_size == (3, 3)} == {
        expected
    }


def test_an_option_that_no_rule_leaves_open_is_refused(net):
    rules = rules_of(CLAIMS | {"kernel_count": 3}, {"match": {"kind": "dense"}, "skip": "dense"})
    message = "^rules: every rule states its own kernel_count, so the option has no effect; delete"
    with pytest.raises(RuleError, match=message):
        plan_conversion(net, rules, dilated_size=9, kernel_count=5)


def test_layers_of_a_stage_by_pattern_are_tied():
    rules = rules_of({"name": "halves", "stage_pattern": r"(?:(?P<first>0)|(1))\."})
    model = nn.Sequential(nn.Sequential(depthwise(), nn.Sequential(depthwise())), depthwise())
    plan = plan_of(model, None, rules=rules)
    assert plan.stages_from.endswith(", the pattern of rule 'halves'")
    assert [layer.tie_group for layer in plan.layers] == ["first", "first", None]


@pytest.mark.parametrize(
    ("model", "auto", "depthwise", "conv3x3"),
    [
        ("resnet18", "conv3x3", 0, 16),
        ("efficientnet_b0", "depthwise", 16, 0),
        ("test_efficientnet", "depthwise", 2, 3),  # its first stages are dense
        # timm counts its ResNet as the stem.
        pytest.param("vit_base_r50_s16_224", "conv3x3", 0, 16, marks=pytest.mark.slow),
    ],
)
def test_the_built_in_rule_sets_claim_what_they_are_made_for(model, auto, depthwise, conv3x3):
    sites = convs_of(model).sites
    for name, count in [("depthwise", depthwise), ("conv3x3", conv3x3)]:
        claimed, _ = match_rules(load_rules(name), sites)
        assert len(claimed) == count
        assert all(site.stage is not None for site in sites if site.name in claimed)
    plan = plan_conversion(convs_of(model))
    assert plan.rules == auto


def test_auto_prefers_depthwise_convolutions_with_a_side_of_at_least_3():
    small = replace(SITE, kernel_size=(2, 2))
    dense = replace(SITE, kind="dense")
    volume = replace(dense, kernel_size=(1, 3, 3))
    series = replace(dense, kernel_size=(3,))
    sites = (SITE, dense, volume, series)
    chosen = [choose_rules("auto", [small, site]).source for site in sites]
    assert chosen == ["depthwise", "conv3x3", "dense3x3x3", "conv1d"]
