"""Predicates of rules: which convolutions a rule matches."""

from dataclasses import replace

import pytest

from dcls_convert.planning.claims import match_rules
from dcls_convert.planning.rules import Match, SiteTest

from ..rules import rules_of
from .nets import SITE


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
        (how,) = [part for part in field.metadata if isinstance(part, SiteTest)]
        assert hasattr(SITE, how.attribute or predicate)


def test_a_convolution_outside_of_stages_matches_no_stage_pattern():
    outside = replace(SITE, stage=None)
    _, reasons = match_rules(rules_of({"match": {"stage": "*"}}), [outside])
    assert "stage is none" in reasons[SITE.name]
    assert match_rules(rules_of({}), [outside])[0] == {SITE.name: 0}
