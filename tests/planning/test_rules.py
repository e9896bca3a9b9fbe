"""Rule files: which convolution a rule claims, what it then says, and that none can be wrong in silence."""

import copy
import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dcls_convert.errors import NothingMatchesError, RuleError
from dcls_convert.networks.sites import ConvSite, find_convs
from dcls_convert.planning.planner import plan_conversion
from dcls_convert.planning.rules import builtin_rules, choose_rules, claim_sites, load_rules, parse_rules, rules_schema

from .nets import convs_of

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
    output_size=(4, 7),
    input_extent=(8, 7),
    output_positions=28,
)


def rules_of(*rules, **top):
    """A rule set from plain values."""
    return parse_rules(yaml.safe_dump({"format": 1, "rules": list(rules), **top}))


class Net(nn.Module):
    """A stem, a stage with depthwise convolutions of two sizes and a dense one, and a stage with one of each."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.ModuleList([self.depthwise(3), self.depthwise(5), nn.Conv2d(4, 4, 3, padding=1)])
        self.layer2 = nn.ModuleList([self.depthwise(3), nn.Conv2d(4, 8, (1, 3), padding=(0, 1))])

    @staticmethod
    def depthwise(size):
        return nn.Conv2d(4, 4, size, padding=size // 2, groups=4)

    def forward(self, x):
        for conv in [self.stem, *self.layer1, *self.layer2]:
            x = conv(x)
        return x


def net():
    return find_convs(Net(), (3, 9, 14))


# Predicates.


@pytest.mark.parametrize(
    ("key", "holds", "fails"),
    [
        ("path", "stages.*", "blocks.*"),
        ("path", "shared.d?", "shared.?"),  # any of its names
        ("path", ["nothing", "*.dw"], ["nothing", "*.DW"]),
        ("stage", "*", "stages.?.*"),
        ("stage", ["stages.0", "stages.1"], ["stages.0", "stages.2"]),
        ("type", "Conv?d", "Conv3d"),
        ("stem", False, True),
        ("kind", "depthwise", "dense"),
        ("kind", ["dense", "depthwise"], ["dense", "grouped"]),
        ("dims", 2, 1),
        ("kernel_size", [3, 5], [5, 3]),
        ("kernel_size", {"min": 5}, {"min": 6}),  # the largest side
        ("kernel_size", {"min": 5, "max": 5}, 5),
        ("stride", [2, 1], 2),
        ("dilation", [1, 3], [3, 1]),
        ("in_channels", 8, 16),
        ("out_channels", 16, 8),
        ("out_channels", {"max": 16}, {"max": 15}),
    ],
)
def test_a_predicate_holds_or_says_what_it_found(key, holds, fails):
    claims = claim_sites(rules_of({"match": {key: holds}}), [SITE])
    assert claims.rule_of == {SITE.name: 0}
    assert claims.reasons == {}
    claims = claim_sites(rules_of({"name": "wrong", "match": {key: fails}}), [SITE])
    assert claims.rule_of == {}
    (reason,) = claims.reasons.values()
    assert reason.startswith(f"not matched (rule 'wrong': {key} is ")


@pytest.mark.parametrize("key", ["kernel_size", "stride", "dilation"])
@pytest.mark.parametrize("sizes", [(3,), (3, 3), (3, 3, 3)])
def test_an_integer_stands_for_all_axes(key, sizes):
    site = replace(SITE, **{key: sizes})
    assert claim_sites(rules_of({"match": {key: 3}}), [site]).rule_of
    assert not claim_sites(rules_of({"match": {key: 2}}), [site]).rule_of


@pytest.mark.parametrize("pattern", ["*", "stages.*", ["*"]])
def test_no_pattern_is_the_stage_of_what_is_outside_of_stages(pattern):
    (reason,) = claim_sites(rules_of({"match": {"stage": pattern}}), [replace(SITE, stage=None)]).reasons.values()
    assert "stage is none" in reason


def test_a_rule_without_match_claims_everything():
    assert claim_sites(rules_of({}), [replace(SITE, stage=None)]).rule_of == {SITE.name: 0}


# Which rule.


def test_the_first_rule_that_matches_claims():
    rules = rules_of(
        {"name": "small", "match": {"kind": "depthwise", "kernel_size": 3, "stage": "layer1"}},
        {"name": "depthwise", "match": {"kind": "depthwise"}},
        {"name": "dense", "match": {"stage": "layer*"}},
    )
    claimed = {"layer1.0": 0, "layer1.1": 1, "layer1.2": 2, "layer2.0": 1, "layer2.1": 2}
    assert claim_sites(rules, net().sites).rule_of == claimed
    plan = plan_conversion(net(), rules, dilated_size=9)
    assert {layer.name: layer.rule for layer in plan.layers}["layer2.0"] == "depthwise"
    assert [(skip.name, skip.reason) for skip in plan.skipped] == [("stem", "not matched (none of 3 rules)")]


def test_a_rule_that_skips_gives_its_reason():
    rules = rules_of({"match": {"stage": "layer2"}, "skip": "too late to matter"}, {"match": {"kind": "depthwise"}})
    plan = plan_conversion(net(), rules, dilated_size=9)
    assert [layer.name for layer in plan.layers] == ["layer1.0", "layer1.1"]
    missed, late = "not matched (none of 2 rules)", "too late to matter"
    reasons = {skip.name: skip.reason for skip in plan.skipped}
    assert reasons == {"stem": missed, "layer1.2": missed, "layer2.0": late, "layer2.1": late}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"skip": "all of it"}], "rules: its rules skip all that they match; nothing would be converted"),
        (
            [{"match": {"kind": "depthwise"}}, {"name": "never", "match": {"kind": "grouped"}}],
            "rules: rule 'never' claims nothing: no convolution of the model matches it",
        ),
        (
            [{"match": {"kind": "depthwise"}}, {"match": {"kernel_size": 5}}],
            "rules: rule 'rules[1]' claims nothing: earlier rules claim all that it matches",
        ),
    ],
)
def test_a_rule_that_converts_nothing_is_an_error_that_names_it(rules, message):
    with pytest.raises((RuleError, NothingMatchesError), match=f"^{re.escape(message)}$"):
        plan_conversion(net(), rules_of(*rules), dilated_size=9)


def test_where_nothing_matches_the_model_is_described_and_a_rule_set_suggested():
    with pytest.raises(NothingMatchesError) as error:
        plan_conversion(net(), rules_of({"match": {"kind": "grouped"}}), dilated_size=9)
    message = str(error.value)
    for part in ("1 dense 3x3 in the stem", "2 depthwise 3x3", "1 dense 3x3;", "1 depthwise 5x5"):
        assert part in message
    assert "rules 'depthwise' would match 3" in message
    assert "rules 'conv3x3' would match 1" in message
    assert error.value.exit_code == 3


# What it says: the rule, else the option, else the default.

CLAIMS = {"match": {"kind": "depthwise", "kernel_size": 3}}
OTHERS = {"match": {"kind": "depthwise"}}  # leaves the options something to be for
LEFT = {"dilated_kernel_size": 9}


@pytest.mark.parametrize(
    ("key", "rule", "option", "default", "wanted"),
    [
        ("dilated_size", None, None, 11, (11, 11)),
        ("dilated_size", [7, 9], (5, 7), [9, 9], (7, 9)),
        ("dilated_size", None, (5, 7), [9, 9], (5, 7)),
        ("kernel_count", None, 3, None, 3),
        ("kernel_count", 2, 3, None, 2),
        ("kernel_count", 2, "auto", None, 2),
        ("interpolation", None, None, None, "bilinear"),
        ("interpolation", None, "gaussian", None, "gaussian"),
        ("interpolation", "triangle", "gaussian", None, "triangle"),
    ],
)
def test_a_rule_overrules_an_option_and_an_option_a_default(key, rule, option, default, wanted):
    rule_key = {"dilated_size": "dilated_kernel_size"}.get(key, key)
    top = {"defaults": {rule_key: default}} if default else {}
    rules = rules_of(CLAIMS | ({rule_key: rule} if rule else {}), OTHERS, **top)
    options = {"dilated_size": 9} if key != "dilated_size" else {}
    options |= {} if option is None else {key: option}
    plan = plan_conversion(net(), rules, **options)
    assert {getattr(layer, key) for layer in plan.layers if layer.kernel_size == (3, 3)} == {wanted}


@pytest.mark.parametrize(
    ("stated", "option", "message"),
    [
        ({"dilated_kernel_size": 9}, {"dilated_size": 11}, "states its own dilated_kernel_size, so the dilated size"),
        ({"kernel_count": 3}, {"kernel_count": 5}, "states its own kernel_count, so the kernel count"),
    ],
)
def test_an_option_that_no_rule_leaves_open_is_refused(stated, option, message):
    rules = rules_of(CLAIMS | LEFT | stated, {"match": {"kind": "dense"}, "skip": "dense"})
    with pytest.raises(RuleError, match=f"{message} given has no effect"):
        plan_conversion(net(), rules, **option)


# The sets that come with the package.


@pytest.mark.parametrize(
    ("model", "auto", "depthwise", "conv3x3", "dense3x3"),
    [
        ("resnet18", "conv3x3", 0, 16, 16),
        ("nfnet_f0", "conv3x3", 0, 24, 2),
        ("efficientnet_b0", "depthwise", 16, 0, 0),
        ("test_efficientnet", "depthwise", 2, 3, 3),  # its first stages are dense
        ("vit_base_r50_s16_224", "conv3x3", 0, 16, 16),  # what timm calls its stem is a ResNet
    ],
)
def test_the_built_in_sets_claim_what_they_are_for(model, auto, depthwise, conv3x3, dense3x3):
    sites = convs_of(model).sites
    assert choose_rules(sites).source == auto
    for name, count in [("depthwise", depthwise), ("conv3x3", conv3x3), ("dense3x3", dense3x3)]:
        claimed = claim_sites(load_rules(name), sites).rule_of
        assert len(claimed) == count
        assert all(site.stage is not None for site in sites if site.name in claimed)
    plan = plan_conversion(convs_of(model))
    assert plan.rules == auto
    assert {layer.dilated_size for layer in plan.layers} == {{"depthwise": (17, 17), "conv3x3": (7, 7)}[auto]}


def test_auto_takes_depthwise_convolutions_of_at_least_3_where_there_are_any():
    small = [replace(SITE, kernel_size=size) for size in [(1, 1), (2, 2)]]
    assert choose_rules([*small, replace(SITE, kind="dense")]).source == "conv3x3"
    assert choose_rules([replace(SITE, kind="dense", kernel_size=(1, 3, 3))]).source == "dense3x3x3"
    assert choose_rules([*small, replace(SITE, kernel_size=(1, 3))]).source == "depthwise"


@pytest.mark.parametrize("name", builtin_rules())
def test_a_built_in_set_is_loaded_by_name_or_file_with_its_text(name):
    path = builtin_rules()[name]
    rules = load_rules(name)
    assert (rules.source, rules.text) == (name, path.read_text(encoding="utf-8"))
    assert load_rules(path).rules == rules.rules
    assert load_rules(str(path)).source == str(path)
    assert rules.description


# What is refused, in one line with the place.

VALID = """
format: 1
description: everything that can be said
defaults: {dilated_kernel_size: [9, 7]}
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
  dilated_kernel_size: 9
  kernel_count: 4
  interpolation: gaussian
  dense_axes: [0]
- match: {kind: dense}
  skip: dense ones stay
"""


def rule(text):
    return f"format: 1\nrules: [{{{text}}}]"


def laughs(value, times):
    """A YAML text of some hundred bytes in which each line holds the one before several times over."""
    lines = ["a0: &a0 {b0: 1, c0: 2}"]
    for line in range(1, 30):
        inner = value.format(", ".join([f"*a{line - 1}"] * times))
        lines.append(f"a{line}: &a{line} " + (inner if value.startswith("[") else f"{{{inner}}}"))
    return "\n".join(lines)


WRONG_FILES = {
    # a misspelt or unknown key, at every level
    "defualts: {}\nformat: 1\nrules: [{}]": "unknown key 'defualts' (did you mean 'defaults'?)",
    "formt: 1\nrules: [{}]": "unknown key 'formt' (did you mean 'format'?)",  # rather than: format is missing
    rule("dilated_kernel_sise: 9"): "rules[0]: unknown key 'dilated_kernel_sise' (did you mean 'dilated_kernel_size'?)",
    rule("match: {kernel_size: {mim: 3}}"): "rules[0].match.kernel_size: unknown key 'mim' (did you mean 'min'?)",
    "format: 1\ndefaults: {kernel_count: 3}\nrules: [{}]": "defaults: unknown key 'kernel_count'; known: dilated_",
    # missing
    "rules: [{}]": "top level: format is missing",
    # values
    "format: 2\nrules: [{}]": "format: found 2; allowed is 1",
    "format: true\nrules: [{}]": "format: found True; allowed is 1",
    "format: 1\nrules: []": "rules: found []; allowed is a list of at least one rule",
    "format: 1\nrules: [3]": "rules[0]: found 3; allowed is a mapping with ",
    rule("skip: "): "rules[0].skip: found None; allowed is a text",  # it would be converted in silence
    rule("match: depthwise"): "rules[0].match: found 'depthwise'; allowed is a mapping",
    rule("match: {kind: depthwize}"): "rules[0].match.kind: found 'depthwize'; allowed is depthwise, grouped, dense",
    rule("match: {stem: 0}"): "rules[0].match.stem: found 0; allowed is true or false",
    rule("match: {kernel_size: [3, 3, 3, 3]}"): "rules[0].match.kernel_size: found [3, 3, 3, 3]; allowed is",
    rule("match: {kernel_size: {min: 5, max: 3}}"): "rules[0].match.kernel_size: min 5 is above max 3",
    rule("match: {kernel_size: {}}"): "rules[0].match.kernel_size: a range needs min, max or both",
    rule("dilated_kernel_size: 17x17"): "rules[0].dilated_kernel_size: found '17x17'; allowed is",
    rule("kernel_count: true"): "rules[0].kernel_count: found True; allowed is an integer from 1 to 1000000000",
    rule("interpolation: cubic"): "rules[0].interpolation: found 'cubic'; allowed is bilinear or triangle or gaussian",
    rule("dense_axes: 0"): "rules[0].dense_axes: found 0; allowed is a list",
    rule("skip: x, kernel_count: 3"): "rules[0]: a rule that skips cannot also state kernel_count",
    # YAML
    "format: 1\nformat: 1\nrules: [{}]": "line 2: not valid YAML: key 'format' stands twice",
    "format: 1\nrules: [": "line 2: not valid YAML",
    "": "is empty, but must be a mapping with format, description, defaults, rules",
    "\0": "not valid YAML",
    "!!python/object/apply:os.getcwd []": "line 1: not valid YAML",
    "{[format]: 1}": "",  # a list as a key
    "format: 1\nrules: &again [*again]": "rules[0]: found",  # holds itself
    "[" * 2000: "line 1: not valid YAML: more than 20 mappings and lists inside each other",
    "[" * 90_000: "line 1: not valid YAML: more than 20",
    "- " * 45_000: "line 1: not valid YAML: more than 20",
    "[0, " * 20 + "]" * 20 + " - " * 100_000: "not valid YAML: YAMLError: ",  # longer than any rule file
    rule("kernel_count: " + ":".join(["59"] * 3000)): "line 2: not valid YAML: an integer of ",
    rule("kernel_count: 0x" + "f" * 6000): "line 2: not valid YAML: an integer of 6002 digits; ",
    rule("kernel_count: !!int '0b" + "1" * 20_000 + "'"): "line 2: not valid YAML: an integer of ",
    rule("dilated_kernel_size: 10001"): "rules[0].dilated_kernel_size: found 10001; allowed is an integer",
    rule("kernel_count: 1000000001"): "rules[0].kernel_count: found 1000000001; allowed is",
    laughs("[{}]", 9): "line 5: not valid YAML: more than 10,000 values, with aliases written out",
    laughs("<<: [{}]", 9): "line 5: not valid YAML: more than 10,000 values",
    "rules: [" + "{}," * 12_000 + "]": "line 1: not valid YAML: more than 10,000 values",
    "1: 2\nformat: 1\nrules: [{}]": "unknown key '1'; known: format",
    rule("match: {1: 2}"): "rules[0].match",
    # what could not be written or shown again
    rule('name: "half a pair: \\ud800"'): "line 2: not valid YAML: 'half a pair: ",
    rule(f"kernel_count: {'9' * 5000}"): "line 2: not valid YAML: an integer of 5000 digits; ",
    rule(f"name: !{'x' * 5000} 1"): "line 2: not valid YAML: could not determine a constructor",
    f"format: {'x' * 5000}": "format: found 'xxxx",
    rule(r'kernel_count: "\e]0;title\a"'): "rules[0].kernel_count: found '",
    rule(r'"\e[2J": 1'): "rules[0]: unknown key '",
    rule(f"stage_pattern: '({'x' * 900}'"): "rules[0].stage_pattern: '(xxxx",
    rule(f"stage_pattern: '{'x' * 5000}'"): "rules[0].stage_pattern: found 'xxxx",
    rule(f"match: {{path: '{'*a' * 5000}'}}"): "rules[0].match.path: found '*a*a",
}


def one_line(message, source):
    assert message.startswith(f"{source}: "), message
    assert message.isprintable()
    assert len(message) < 350
    return message.removeprefix(f"{source}: ")


@pytest.mark.parametrize("text", WRONG_FILES, ids=lambda text: repr(text[:60]))
def test_a_wrong_file_is_refused_in_one_line_with_the_place(text):
    with pytest.raises(RuleError) as error:
        parse_rules(text, source="my.yaml")
    assert one_line(str(error.value), "my.yaml").startswith(WRONG_FILES[text])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("depthwize", "(did you mean 'depthwise'?)"),
        ("nowhere/rules.yaml", "are neither a file nor one of conv3x3, dense3x3, dense3x3x3, depthwise, auto"),
        (".", "neither a file nor one of"),
    ],
)
def test_rules_that_are_not_there_are_refused_with_those_that_are(source, message):
    with pytest.raises(RuleError, match=re.escape(message)) as error:
        load_rules(source)
    assert repr(source) in str(error.value)


def test_a_file_is_read_as_utf_8_with_or_without_its_mark(tmp_path):
    text = "format: 1\nrules: [{name: café}]"
    (path := tmp_path / "rules.yaml").write_text(text, encoding="utf-8-sig")
    assert (load_rules(path).label(0), load_rules(path).text) == ("café", text)
    path.write_text(text, encoding="utf-16")
    with pytest.raises(RuleError, match=r"rules.yaml: is not a UTF-8 text"):
        load_rules(path)


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    path = tmp_path / "rules.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(RuleError, match=r"rules.yaml: cannot be read: has 1,099,511,627,776 bytes; 400,000 "):
        load_rules(path)


def test_names_from_a_file_are_shown_cut_and_without_control_characters():
    name, long = "\x1b]0;title\x07", "x" * 980
    rules = parse_rules(yaml.safe_dump({"format": 1, "rules": [{"name": name + long, "match": {"path": name + long}}]}))
    (reason,) = claim_sites(rules, [SITE]).reasons.values()
    with pytest.raises(NothingMatchesError) as error:
        plan_conversion(net(), parse_rules(rules.text, source=name))
    for text in (rules.label(0), reason, str(error.value)):
        assert text.isprintable()
        assert len(text) < 500


def mappings(value, place=""):
    """Every mapping in a rule file, and its place as messages call it."""
    if isinstance(value, dict):
        yield value, place
        for key, inner in value.items():
            yield from mappings(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from mappings(inner, f"{place}[{index}]")


@st.composite
def misspellings(draw):
    """The valid file with one letter of one key left out, doubled, changed or swapped; the key, and its place."""
    data = copy.deepcopy(yaml.safe_load(VALID))
    mapping, place = draw(st.sampled_from(list(mappings(data))))
    key = draw(st.sampled_from(list(mapping)))
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from("abcxyz_-T 1"))
    edits = [key[at + 1 :], letter + key[at + 1 :], letter + key[at:], key[at:][1::-1] + key[at + 2 :]]
    wrong = key[:at] + draw(st.sampled_from(edits))
    allowed = {"format", "description", "defaults", "rules", "name", "match", "skip", "min", "max", *mapping}
    if wrong in allowed or not wrong:
        wrong = key + "s"
    entries = [(wrong if old == key else old, value) for old, value in mapping.items()]
    mapping.clear()
    mapping.update(entries)
    return yaml.safe_dump(data), wrong, place


def test_the_file_that_is_misspelt_below_is_valid():
    rules = parse_rules(VALID)
    assert len(rules.rules) == 2
    stated = rules.rules[0].match.model_dump()
    assert None not in stated.values(), "it is to state every predicate"
    assert len(list(mappings(yaml.safe_load(VALID)))) == 8


@given(misspellings())
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_no_misspelt_key_is_passed_over(case):
    text, wrong, place = case
    with pytest.raises(RuleError) as error:
        parse_rules(text, source="my.yaml")
    message = one_line(str(error.value), "my.yaml")
    assert message.startswith(f"{place}: unknown key {wrong!r}" if place else f"unknown key {wrong!r}")


# The schema, for editors.

BEYOND_A_SCHEMA = ("not valid YAML", "cannot also state", "stage_pattern")
BEYOND_A_SCHEMA_TOO = {  # relations between values, and keys that JSON does not have
    rule("skip: "),
    rule("match: {kernel_size: {min: 5, max: 3}}"),
    rule("match: {kernel_size: {}}"),
    "{[format]: 1}",
    "1: 2\nformat: 1\nrules: [{}]",
    rule("match: {1: 2}"),
    "format: 1\nrules: &again [*again]",
}


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(rules_schema())
    return jsonschema.Draft202012Validator(rules_schema())


def test_the_schema_takes_the_built_in_files_and_one_that_says_everything(validator):
    for text in [VALID, *(path.read_text(encoding="utf-8") for path in builtin_rules().values())]:
        assert list(validator.iter_errors(yaml.safe_load(text))) == []


@pytest.mark.parametrize(
    "text",
    [
        text
        for text, message in WRONG_FILES.items()
        if text not in BEYOND_A_SCHEMA_TOO and not any(part in message for part in BEYOND_A_SCHEMA)
    ],
    ids=lambda text: repr(text[:60]),
)
def test_the_schema_refuses_what_the_program_refuses(validator, text):
    assert list(validator.iter_errors(yaml.safe_load(text))) != []


def test_the_schema_takes_no_unknown_key_anywhere():
    objects = [part for part, _ in mappings(rules_schema()) if "properties" in part]
    assert len(objects) >= 4
    assert all(part["additionalProperties"] is False for part in objects)
