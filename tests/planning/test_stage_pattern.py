"""Stages by a rule's own pattern, which takes linear time whatever it is."""

import pytest
import timm

from dcls_convert import convert_
from dcls_convert.errors import RuleError
from dcls_convert.planning.rules import parse_rules
from dcls_convert.planning.stage_pattern import stage_by_pattern

STRUCTURE = "output stride and module path"


@pytest.mark.parametrize(
    ("pattern", "name", "stage"),
    [
        (r"blocks\.\d+", "body.blocks.12.conv", "blocks.12"),
        (r"(\w+)\.(\d+)", "body.blocks.12.conv", "blocks.12"),
        (r"blocks\.(?:(?P<early>[0-3])|(?P<late>\d+))\.", "blocks.3.conv", "early"),
        (r"blocks\.(?:(?P<early>[0-3])|(?P<late>\d+))\.", "blocks.12.conv", "late"),
        (r"x*", "body", None),
    ],
)
def test_what_a_pattern_finds_is_the_stage(pattern, name, stage):
    assert stage_by_pattern(pattern, name) == stage


PATTERN = """
format: 1
rules:
  - name: halves
    match: {kind: depthwise}
    stage_pattern: 'blocks\\.(?:(?P<first>\\d)|(?P<second>\\d\\d))\\.'
"""


def test_a_rule_says_what_a_stage_is():
    model = timm.models.ConvMixer(dim=8, depth=12, kernel_size=5)
    report = convert_(model, rules=parse_rules(PATTERN), dilated_size=9, input_size=(3, 64, 64))
    assert report.stages_from == f"{STRUCTURE}, the pattern of rule 'halves'"
    assert [layer.stage for layer in report.layers] == ["first"] * 10 + ["second"] * 2
    assert [group.name for group in report.plan.tie_groups] == ["first", "second"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage_pattern: '('", r"rules\[0\].stage_pattern: '\(' is not a regular expression: "),
        ("stage_pattern: ''", r"rules\[0\].stage_pattern: found ''; allowed is a regular expression"),
        ("stage_pattern: x\n    skip: not now", "a rule that skips cannot also state stage_pattern"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(text, message):
    with pytest.raises(RuleError, match=message):
        parse_rules(f"format: 1\nrules:\n  - match: {{kind: depthwise}}\n    {text}\n")


@pytest.mark.parametrize("pattern", ["(.+)+(.+)+(.+)+!", "(a|aa)+$", "(" * 200 + "a" + ")+" * 200, r"(\w*)*\."])
def test_a_pattern_takes_linear_time(pattern):
    """Python's own engine needs longer than the universe is old for some of these."""
    assert set(stage_by_pattern(pattern, 10_000 * "a" + ":") or "") <= {"a", "."}


@pytest.mark.parametrize("pattern", ["a{99999999999}(", "(a{1000}){1000}", "(?<=a)b", "(?=a)b", r"(a)\1", "[z-a]"])
def test_a_pattern_of_another_language_is_refused(pattern):
    with pytest.raises(RuleError, match=r"stage_pattern: .* is not a regular expression: "):
        parse_rules(f"format: 1\nrules:\n  - stage_pattern: '{pattern}'\n")
