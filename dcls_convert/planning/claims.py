"""Decide which rule claims which convolution, and refuse rules that claim nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import NothingMatchesError, PlanError, RuleError
from ..geometry import Direction
from ..networks.sites import ConvSite, ModelConvs, count_conv_kinds
from ..options import AUTO, EXACT
from ..text import short_list, shortened
from .paths import matches_path, nearest_paths
from .plan_options import PlanOptions
from .rule_files import load_rules
from .rules import Rule, RuleSet

AUTO_RULES = ("depthwise", "conv3x3", "dense3x3x3", "conv1d")  # in the order of `auto`

NOT_MATCHED = "not matched"  # begins the reason for a site that no rule claims


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthLimit:
    """Why a window must not grow to both sides along an axis, and to which side it may."""

    reason: str
    side: Direction | None  # None if to neither


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A convolution, and the rule that converts it."""

    site: ConvSite
    rule: Rule
    label: str  # name of the rule, for messages and the plan
    default_size: int | Sequence[int] | str | None  # of the rule file, if it states one
    # By axis: the limits that measurements with trial windows have shown.
    growth_limits: Mapping[int, GrowthLimit] = field(default_factory=dict)

    @property
    def states_growth(self) -> bool:
        """True if the rule says to which sides windows grow, whatever was measured."""
        return self.rule.grow is not None or self.rule.padding == "any"

    def size(self, option: int | Sequence[int] | str | None) -> Any:
        """Return the window as stated: by the rule, or else by the option, or else by the file."""
        return self.rule.dilated_size or option or self.default_size


def choose_rules(
    stated: RuleSet | str | Path | Mapping[str, Any], sites: Sequence[ConvSite]
) -> RuleSet:
    """Return the rule set that an option states.

    "auto" is the first rule set of AUTO_RULES that claims a convolution, or conv3x3 if none does.
    """
    if isinstance(stated, RuleSet):
        return stated
    if stated != AUTO:
        return load_rules(stated)
    for name in AUTO_RULES:
        rules = load_rules(name)
        for site in sites:
            if any(rule.match.mismatch(site) is None for rule in rules.rules):
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
        mismatches = [rule.match.mismatch(site) for rule in rules.rules]
        if None in mismatches:
            rule_of[site.name] = mismatches.index(None)
            continue
        reason = f"none of {len(mismatches)} rules"
        if len(mismatches) == 1:
            reason = f"rule {rules.label(0)!r}: {mismatches[0]}"
        reasons[site.name] = f"{NOT_MATCHED} ({reason})"
    return rule_of, reasons


def assign_rules(rules: RuleSet, convs: ModelConvs) -> tuple[list[Claim], dict[str, str]]:
    """Decide which rule converts which site, and say why the other sites stay.

    Returns:
        A claim for each site that is converted; and the reasons for the others, by name.

    Raises:
        PlanError: The model is itself a convolution.
        RuleError: A rule claims no site, or has a path that no site has.
        NothingMatchesError: No site would be converted.
    """
    for site in convs.sites:
        if not site.name:
            raise PlanError(
                "the model is itself a convolution, which cannot be replaced in place; "
                f"use DclsConv{site.dims}d.from_conv"
            )
    rule_of, reasons = match_rules(rules, convs.sites)
    if not rule_of:
        raise NothingMatchesError(_why_nothing_matches(rules, convs))
    claims = []
    for site in convs.sites:
        if site.name not in rule_of:
            continue
        index = rule_of[site.name]
        rule = rules.rules[index]
        if rule.skip is not None:
            reasons[site.name] = rule.skip
            continue
        claims.append(
            Claim(
                site=site,
                rule=rule,
                label=rules.label(index),
                default_size=rules.defaults.dilated_size,
            )
        )
    if not claims:
        raise NothingMatchesError(
            f"{rules.source}: its rules skip all that they match; nothing would be converted"
        )
    for index, rule in enumerate(rules.rules):
        if index not in rule_of.values():
            reason = _why_unused(rule, convs)
            raise RuleError(f"{rules.source}: rule {rules.label(index)!r} claims nothing: {reason}")
        near = _near_paths(rule.match.paths, convs)
        if near:  # of several paths, one is misspelt
            raise RuleError(f"{rules.source}: rule {rules.label(index)!r}{near}")
    return claims, reasons


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
        if not matches_path(names, [pattern]):
            unknown.append(pattern)
    if not unknown:
        return ""
    near = short_list(nearest_paths(unknown, names), 6)
    return f"; no path is {' or '.join(map(shortened, unknown))}, the nearest are {near}"


def _why_unused(rule: Rule, convs: ModelConvs) -> str:
    """Say why a rule claims no site: earlier rules claim its matches, or it matches none."""
    for site in convs.sites:
        if rule.match.mismatch(site) is None:
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
                "delete the key from each rule that should follow the option"
            )
