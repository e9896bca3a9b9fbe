"""Rule files: what they hold, and that each mistake is an error of one line."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dcls_convert.errors import DclsConvertError, RuleError
from dcls_convert.file_checks import builtin_rules
from dcls_convert.networks.find_convs import find_convs
from dcls_convert.planning.plan import ConversionPlan
from dcls_convert.planning.planner import plan_conversion
from dcls_convert.planning.rule_files import load_rules, parse_rules, rules_schema
from dcls_convert.planning.rules import Match, Rule

from .nets import IMAGE, Net

CONVS = find_convs(Net(), IMAGE)


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
def test_any_file_is_refused_in_one_line_or_gives_rules_that_survive_writing(text):
    try:
        rules = parse_rules(text, source="my.yaml")
    except RuleError as error:
        one_line(error)
        return
    assert parse_rules(rules.text).rules == rules.rules
    try:
        plan = plan_conversion(CONVS, rules)
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
