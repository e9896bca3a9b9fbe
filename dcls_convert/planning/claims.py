"""Decide which rule claims which convolution, and refuse rules that claim nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import NothingMatchesError, PlanError, RuleError
from ..networks.sites import ConvSite, ModelConvs, Skipped, count_conv_kinds
from ..options import AUTO, EXACT
from ..text import short_list, shortened
from .paths import any_matches_path, nearest_paths
from .plan_options import PlanOptions
from .rule_files import load_rules
from .rules import Rule, RuleSet

AUTO_RULES = ("depthwise", "conv3x3", "dense3x3x3")  # in the order in which `auto` tries them

NOT_MATCHED = "not matched"  # begins the reason for a site that no rule claims


def load_or_choose_rules(
    rules: RuleSet | str | Path | Mapping[str, Any], convs: ModelConvs
) -> RuleSet:
    """Load the rule set that an option states; "auto" chooses one for the convolutions."""
    if isinstance(rules, RuleSet):
        return rules
    if rules == AUTO:
        return choose_rules(convs.sites)
    return load_rules(rules)


def choose_rules(sites: Sequence[ConvSite]) -> RuleSet:
    """Return the first of AUTO_RULES that claims a convolution, or conv3x3 if none does."""
    for name in AUTO_RULES:
        rules = load_rules(name)
        rule_of, _ = match_rules(rules, sites)
        if rule_of:
            return rules
    return load_rules("conv3x3")


def match_rules(rules: RuleSet, sites: Sequence[ConvSite]) -> tuple[dict[str, int], dict[str, str]]:
    """Give each site to the first rule that matches it.

    Returns:
        Two mappings from names of sites: to the index of the rule that claims the site, or to the
        reason why no rule does. Every site is in one of the two.
    """
    rule_of: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for site in sites:
        index = _first_match(rules, site)
        if index is None:
            reasons[site.name] = f"{NOT_MATCHED} ({_why_unclaimed(rules, site)})"
        else:
            rule_of[site.name] = index
    return rule_of, reasons


def _first_match(rules: RuleSet, site: ConvSite) -> int | None:
    for index, rule in enumerate(rules.rules):
        if rule.match.matches(site):
            return index
    return None


def _why_unclaimed(rules: RuleSet, site: ConvSite) -> str:
    """Say why no rule matches a site: what fails in the only rule, or that all rules fail."""
    if len(rules.rules) > 1:
        return f"none of {len(rules.rules)} rules"
    return f"rule {rules.label(0)!r}: {rules.rules[0].match.mismatch(site)}"


def assign_rules(rules: RuleSet, convs: ModelConvs) -> tuple[dict[str, int], list[Skipped]]:
    """Decide which rule converts which site, and say why the other convolutions stay.

    Returns:
        The index of the converting rule, by the site's name; and the convolutions that stay.

    Raises:
        PlanError: The model is itself a convolution.
        RuleError: A rule claims no site.
        NothingMatchesError: No site would be converted.
    """
    # Index of the rule, by the site's name.
    rule_of_claimed, reasons = match_rules(rules, convs.sites)
    skipped = list(convs.skipped)
    rule_of_converted: dict[str, int] = {}  # without sites whose rule skips them
    for site in convs.sites:
        if not site.name:
            raise PlanError(
                "the model is itself a convolution, which cannot be replaced in place; "
                f"use DclsConv{site.dims}d.from_conv"
            )
        reason = reasons.get(site.name) or rules.rules[rule_of_claimed[site.name]].skip
        if reason is None:
            rule_of_converted[site.name] = rule_of_claimed[site.name]
        else:
            skipped.append(Skipped(name=site.name, type=site.type, reason=reason))
    if not rule_of_claimed:
        raise NothingMatchesError(_why_nothing_matches(rules, convs))
    if not rule_of_converted:
        raise NothingMatchesError(
            f"{rules.source}: its rules skip all that they match; nothing would be converted"
        )
    used = set(rule_of_claimed.values())
    for index, rule in enumerate(rules.rules):
        if index not in used:
            reason = _why_unused(rule, convs)
            raise RuleError(f"{rules.source}: rule {rules.label(index)!r} claims nothing: {reason}")
    return rule_of_converted, skipped


def _why_nothing_matches(rules: RuleSet, convs: ModelConvs) -> str:
    """Say what the model has instead, and which of the built-in rules would match."""
    kinds: list[str] = []
    for kind, count in count_conv_kinds(convs).most_common(4):
        kinds.append(f"{count} {kind}")
    contents = ", ".join(kinds) or "no convolution at all"
    message = f"nothing in the model matches rules {rules.source!r}; it has {contents}"
    patterns: list[str] = []
    for rule in rules.rules:
        patterns += rule.match.paths
    message += _near_paths(patterns, convs)
    for name in AUTO_RULES:
        rule_of, _ = match_rules(load_rules(name), convs.sites)
        if rule_of and name != rules.source:
            message += f"; rules {name!r} would match {len(rule_of)}"
    if "would match" not in message:
        message += _matching_rule(convs)
    return message


def _matching_rule(convs: ModelConvs) -> str:
    """Return a rule for the most frequent kernels behind the stem, for a message."""
    kernels = Counter(
        site.kernel_size for site in convs.sites if not site.stem and max(site.kernel_size) > 1
    )
    if not kernels:
        return ""
    ((kernel_size, count),) = kernels.most_common(1)
    sides = list(kernel_size) if len(set(kernel_size)) > 1 else kernel_size[0]
    match = f"{{dims: {len(kernel_size)}, kernel_size: {sides}}}"
    return f"; a rule file with `match: {match}` would match {count}"


def _near_paths(patterns: Sequence[str], convs: ModelConvs) -> str:
    """Name the model's paths that are nearest to patterns without a match, for a message."""
    names: list[str] = []
    for site in convs.sites:
        names += site.names
    unknown = []
    for pattern in patterns:
        if not any_matches_path(names, [pattern]):
            unknown.append(pattern)
    if not unknown:
        return ""
    near = short_list(nearest_paths(unknown, names), 6)
    return f"; no path is {' or '.join(map(shortened, unknown))}, the nearest are {near}"


def _why_unused(rule: Rule, convs: ModelConvs) -> str:
    """Say why a rule claims no site: earlier rules claim its matches, or it matches none."""
    if any(map(rule.match.matches, convs.sites)):
        return "earlier rules claim all that it matches"
    reason = "no convolution of the model matches it"
    reason += _near_paths(rule.match.paths, convs)
    if rule.match.stage is not None:
        stages: list[str] = []
        for site in convs.sites:
            if site.stage and site.stage not in stages:
                stages.append(site.stage)
        reason += f"; its stages are {', '.join(stages) or 'not known'}"
    return reason


def refuse_overridden_options(rules: RuleSet, options: PlanOptions) -> None:
    """Raise RuleError if an option has no effect because every rule states its own value."""
    converting = [rule for rule in rules.rules if rule.skip is None]
    for option in fields(options):
        key = option.name
        # The planner's `_check_exact` refuses an exact start if a rule states a count.
        if key not in Rule.model_fields or getattr(options, key) in (option.default, EXACT):
            continue
        if all(getattr(rule, key) is not None for rule in converting):
            raise RuleError(
                f"{rules.source}: every rule states its own {key}, so the option has no effect; "
                "omit it in a rule that should use the option"
            )
