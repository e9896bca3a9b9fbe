"""Rule files: which convolutions a rule claims, how they are converted, and that each mistake is an
error.
"""

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert.errors import DclsConvertError, NothingMatchesError, RuleError
from dcls_convert.file_checks import builtin_rules
from dcls_convert.networks.find_convs import find_convs
from dcls_convert.networks.sites import ConvSite
from dcls_convert.planning.claims import choose_rules, match_rules
from dcls_convert.planning.plan import ConversionPlan
from dcls_convert.planning.planner import plan_conversion
from dcls_convert.planning.rule_files import load_rules, parse_rules, rules_schema
from dcls_convert.planning.rules import How, Match, Rule

from .nets import convs_of, depthwise, plan_of

SITE = ConvSite(
    names=("stages.1.blocks.0.dw", "shared.dw"),
    type="Conv2d",
    kind="depthwise",
    stage="stages.1",
    stem=False,
    in_channels=8,
    out_channels=16,
    groups=8,
    kernel_size=(3, 5),
    stride=(2, 1),
    padding=(1, 2),
    dilation=(1, 3),
    padding_mode="zeros",
    bias=True,
    input_extent=(8, 7),
    output_positions=28,
)


def rules_of(*rules, **top):
    """A rule set from plain values."""
    return parse_rules(yaml.safe_dump({"format": 1, "rules": list(rules), **top}))


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


# Which rule claims a convolution.


@pytest.mark.parametrize(
    ("key", "holds", "fails"),
    [
        ("path", "stages.*", "blocks.*"),
        ("path", "shared.d?", "shared.?"),  # any of its names
        ("stage", "*", "stages.?.*"),
        ("stage", ["stages.0", "stages.1"], ["stages.0", "stages.2"]),
        ("stem", False, True),
        ("kind", "depthwise", "dense"),
        ("kind", ["dense", "depthwise"], ["dense", "grouped"]),
        ("dims", 2, 1),
        ("kernel_size", [3, 5], [5, 3]),
        ("kernel_size", {"min": 5}, {"min": 6}),  # the largest side
        ("stride", [2, 1], 2),  # an integer is for all axes
        ("dilation", [1, 3], [3, 1]),
        ("out_channels", {"max": 16}, {"max": 15}),
    ],
)
def test_a_predicate_holds_or_says_what_it_found(key, holds, fails):
    assert match_rules(rules_of({"match": {key: holds}}), [SITE]) == ({SITE.name: 0}, {})
    rule_of, reasons = match_rules(rules_of({"name": "wrong", "match": {key: fails}}), [SITE])
    assert rule_of == {}
    assert reasons[SITE.name].startswith(f"not matched (rule 'wrong': {key} is ")


def test_every_predicate_says_how_it_tests_a_convolution():
    for predicate, field in Match.model_fields.items():
        (how,) = [part for part in field.metadata if isinstance(part, How)]
        assert hasattr(SITE, how.attribute or predicate)


def test_a_convolution_outside_of_stages_matches_no_stage_pattern():
    outside = replace(SITE, stage=None)
    _, reasons = match_rules(rules_of({"match": {"stage": "*"}}), [outside])
    assert "stage is none" in reasons[SITE.name]
    assert match_rules(rules_of({}), [outside])[0] == {SITE.name: 0}


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
    assert match_rules(parse_rules(rule(match)), convs.sites)[0] == {"1": 0}


# Which value applies: the rule's, else the option's, else the default.

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


# Built-in rule sets.


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


# Mistakes, refused in one line with the place.

VALID = """
format: 1
description: everything that can be said
defaults: {dilated_size: [9, 7]}
rules:
- name: first
  match:
    path: ["layer1.*", "layer2.*"]
    stage: "*"
    type: Conv2d
    stem: false
    kind: [depthwise, grouped]
    dims: 2
    kernel_size: {min: 3, max: 5}
    stride: 1
    dilation: [1, 1]
    in_channels: {min: 4}
    out_channels: 4
  dilated_size: 9
  kernel_count: 4
  interpolation: gaussian
  dense_axes: [0]
- match: {kind: dense}
  skip: dense ones stay
"""


def rule(text):
    return f"format: 1\nrules: [{{{text}}}]"


# What is found, and a word of the message.
MISTAKES = {
    # misspelt, unknown or missing keys
    "formt: 1\nrules: [{}]": "unknown key 'formt' (did you mean 'format'?)",
    rule("dilated_sise: 9"): "rules[0]: unknown key 'dilated_sise' (did you mean",
    rule("match: {kernel_size: {mim: 3}}"): "rules[0].match.kernel_size: unknown key 'mim'",
    "rules: [{}]": "top level: format is missing",
    # values
    rule("match: {kind: depthwize}"): "rules[0].match.kind: found 'depthwize'; allowed is",
    rule("dilated_size: '+3'"): "rules[0].dilated_size: growth +3 must be even",
    rule("grow: before"): "rules[0].grow: found 'before'; allowed is both, back or ahead",
    rule("grow: [back, past]"): "rules[0].grow",
    "": "is empty, but must be a mapping with format, description, defaults, rules",
    f"format: {'x' * 5000}": "format: found 'xxxx",
}
# Relations between values, keys that JSON does not have, patterns, YAML.
MISTAKES_BEYOND_A_SCHEMA = {
    # Without the error, it would be converted in silence.
    rule("skip: "): "rules[0].skip: found None; allowed is a string",
    rule("match: {kernel_size: {min: 5, max: 3}}"): "rules[0].match.kernel_size: min 5 is above",
    rule("skip: x, kernel_count: 3"): "rules[0]: a rule that skips cannot also state kernel_count",
    rule("grow: back, padding: any"): "rules[0]: grow says to which sides windows grow; omit",
    rule("stage_pattern: '('"): "rules[0].stage_pattern: '(' is not a regular expression: ",
    "format: 1\nformat: 1\nrules: [{}]": "line 2: not valid YAML: duplicate key 'format'",
    "!!python/object/apply:os.getcwd []": "line 1: not valid YAML",
    "format: 1\nrules: &again [*again]": "rules[0]: found",  # holds itself
    "[" * 1_500: "not valid YAML: nested too deeply",
    # read by YAML as numbers
    rule("match: {path: 1.10}"): "rules[0].match.path: found 1.1 (if it is a string, quote it)",
}


def one_line(error):
    message = str(error)
    assert message.startswith("my.yaml: "), message
    assert message.isprintable()
    assert len(message) < 350
    return message.removeprefix("my.yaml: ")


@pytest.mark.parametrize(
    "text", MISTAKES | MISTAKES_BEYOND_A_SCHEMA, ids=lambda text: repr(text[:60])
)
def test_a_mistake_is_an_error_of_one_line_with_the_place(text):
    with pytest.raises(RuleError) as error:
        parse_rules(text, source="my.yaml")
    assert one_line(error.value).startswith((MISTAKES | MISTAKES_BEYOND_A_SCHEMA)[text])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("auto", "rules 'auto' are one of the built-in sets, chosen for a model"),
        ("depthwize", r"rules 'depthwize' are neither .* \(did you mean 'depthwise'\?\)"),
    ],
)
def test_what_is_no_rule_set_is_refused_with_those_that_are(source, says):
    with pytest.raises(RuleError, match=f"^{says}"):
        load_rules(source)


def test_a_growth_may_be_written_with_and_without_quotes():
    for written in ("+4", "'+4'"):
        rules = parse_rules(rule(f"dilated_size: {written}"))
        assert rules.rules[0].dilated_size == "+4"
        assert parse_rules(rules.text).rules == rules.rules


def test_a_file_is_utf_8_with_or_without_its_mark_and_of_at_most_a_megabyte(tmp_path):
    text = "format: 1\nrules: [{name: café}]"
    path = tmp_path / "rules.yaml"
    path.write_text(text, encoding="utf-8-sig")
    assert (load_rules(path).label(0), load_rules(path).text) == ("café", text)
    path.write_text(text, encoding="utf-16")
    with pytest.raises(RuleError, match=r"rules.yaml: is not a UTF-8 text"):
        load_rules(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(RuleError, match=r"bytes; at most 1,000,000 "):
        load_rules(path)


def mappings(value):
    """Every mapping in a rule file, the outer ones first."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from mappings(inner)


# Any file at all: other values and keys here and there.

texts = st.sampled_from(
    ["", "*", "\u202e", "a" * 300, "~", "9" * 5000, "auto", "gaussian", "+4"]
) | st.text(max_size=20)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 60)
    | st.sampled_from([10**9, 10**30, 2.5, float("nan")])
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def rule_texts(draw):
    data = yaml.safe_load(
        draw(st.sampled_from([VALID, *(path.read_text() for path in builtin_rules().values())]))
    )
    for _ in range(draw(st.integers(0, 3))):
        mapping = draw(st.sampled_from(list(mappings(data))))
        key = draw(st.sampled_from([*mapping, *Rule.model_fields, *Match.model_fields]))
        mapping[key] = draw(values)
    return yaml.safe_dump(data)


@given(text=rule_texts())
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_any_file_is_refused_in_one_line_or_gives_rules_that_survive_writing(net, text):
    try:
        rules = parse_rules(text, source="my.yaml")
    except RuleError as error:
        one_line(error)
        return
    assert parse_rules(rules.text).rules == rules.rules
    try:
        plan = plan_conversion(net, rules)
    except DclsConvertError:
        return
    assert ConversionPlan.from_dict(plan.to_dict()) == plan


# The schema, for editors.


def test_the_schema_takes_what_the_program_takes_and_refuses_what_it_refuses():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(rules_schema())
    validator = jsonschema.Draft202012Validator(rules_schema())
    for text in [
        VALID,
        rule("dilated_size: '+4'"),
        *(path.read_text(encoding="utf-8") for path in builtin_rules().values()),
    ]:
        assert parse_rules(text).rules
        assert validator.is_valid(yaml.safe_load(text))
    assert [text for text in MISTAKES if validator.is_valid(yaml.safe_load(text))] == []
