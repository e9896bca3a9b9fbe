"""From sites and rules to a conversion plan: which layer replaces which convolution, and what is
tied.
"""

import contextlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..depthwise.geometry import (
    check_cells,
    check_window,
    extent,
    grown_padding,
    padded_cells,
    size_text,
)
from ..errors import NothingMatchesError, PlanError, RuleError, listed, one_line, shown
from ..layers.interpolation import find_interpolation
from ..networks.sites import ConvSite, ModelConvs, OldConv, Skipped, kinds_of_convs
from ..options import (
    AUTO,
    ERROR,
    EXACT,
    INTERPOLATIONS,
    MOST_SLOWER,
    MOST_WINDOW,
    SCOPES,
    TIES,
    PlanOptions,
    Scope,
    Tie,
    takes_plan_options,
)
from .budget import UNSOLVED, parse_percent, solve_counts
from .plan import ConversionPlan, LayerCounts, LayerPlan, named_owners, taken_from
from .rules import AUTO_RULES, Rule, RuleSet, choose_rules, claim_sites, load_rules


@takes_plan_options
def plan_conversion(
    convs: ModelConvs,
    rules: RuleSet | str | Path | Mapping[str, Any] = AUTO,
    *,
    model: str | None = None,
    model_args: dict[str, Any] | None = None,
    **planning: Any,
) -> ConversionPlan:
    """Decide what becomes of every convolution.

    Args:
        convs: What `find_convs` found.
        rules: A rule set, its name, file or mapping, or "auto": the first of AUTO_RULES that claims
            a convolution.
        dilated_size: Window for rules that state none; an integer leaves sides of 1 in a longer
            kernel as they are. "auto" takes the largest, 17 at most, that adds at most 15 % to the
            model's MACs; where none does, the smallest that is larger than the kernels.
        kernel_count: Elements in a kernel for rules that state none. "auto" solves for the budget.
            "exact" takes as many as the old kernel has cells, whatever the budget; the layers can
            then start as the same function. `LayerCounts` gives the counts of existing elements;
            the layers to convert must be those it names.
        scope: One count for the model (also "auto"), for each stage, or for each layer (a tie group
            counts as one layer). "error" needs the model's kernels: only `convert_` and the command
            line plan with it.
        tie: "stage" shares positions among layers of one stage and shape, "none" gives every layer
            its own.
        budget: Percent of the replaced weights that new weights, positions and sigmas may use.
        interpolation: For rules that state none; bilinear without it.
        strict: Refuse a matching convolution that cannot take the size, instead of skipping it.
        model, model_args: How to build the model again, for a checkpoint.

    Raises:
        RuleError: A rule that claims no convolution, or an option that all rules overrule.
        PlanError: Sizes, counts or a budget that do not fit; names values that do.
        NothingMatchesError: No rule claims anything; says what the model has instead.
    """
    return make_plan(
        convs, PlanOptions(rules=rules, **planning), model=model, model_args=model_args
    )


def make_plan(
    convs: ModelConvs,
    options: PlanOptions,
    *,
    model: str | None = None,
    model_args: dict[str, Any] | None = None,
) -> ConversionPlan:
    """As `plan_conversion`."""
    counts = None
    if isinstance(options.kernel_count, LayerCounts):
        counts, options = options.kernel_count, replace(options, kernel_count=AUTO)
    elif options.scope == ERROR and options.kernel_count == AUTO:
        raise PlanError(
            f"scope {ERROR!r} measures what trained kernels lose; convert_ and dcls-convert MODEL "
            "can"
        )
    _check_options(options)
    scope: Scope = "model" if options.scope == AUTO else options.scope
    share = parse_percent(options.budget)
    try:
        arguments = dict(
            json.loads(json.dumps(model_args or {}, allow_nan=False))
        )  # tuples become lists
    except (TypeError, ValueError) as error:
        raise PlanError(f"model_args cannot be kept in a JSON file: {one_line(error)}") from error
    rules = options.rules
    if not isinstance(rules, RuleSet):
        rules = choose_rules(convs.sites) if rules == AUTO else load_rules(rules)
    rule_of, skipped = claim_convs(rules, convs)
    check_overruled(rules, options)
    if options.kernel_count == EXACT:
        _check_exact(rules, options.interpolation)
    if options.dilated_size == AUTO:
        options = replace(options, dilated_size=_recommended_size(convs, rules, rule_of))
    drafts: list[LayerPlan] = []
    refused: list[Skipped] = []
    for site in (site for site in convs.sites if site.name in rule_of):
        try:
            drafts.append(_draft(site, rules, rule_of[site.name], options))
        except PlanError as error:
            refused.append(Skipped(name=site.name, type=site.type, reason=str(error)))
    if refused and (options.strict or not drafts):
        more = f" ({len(refused) - 1} more like it)" if len(refused) > 1 else ""
        raise PlanError(f"{refused[0].name}: {refused[0].reason}{more}")
    skipped += refused
    if counts is not None:
        drafts = _with_counts(drafts, counts, options.tie, skipped)
    groups = _group_layers(drafts) if options.tie == "stage" else {}
    group_of = {draft.name: name for name, members in groups.items() for draft in members}
    tied = [replace(draft, tie_group=group_of.get(draft.name)) for draft in drafts]
    layers, units = solve_counts(tied, scope, share)
    order = [site.name for site in convs.sites] + [skip.name for skip in convs.skipped]
    in_order = tuple(sorted(skipped, key=lambda skip: order.index(skip.name)))
    patterned = [rules.label(index) for index, rule in enumerate(rules.rules) if rule.stage_pattern]
    stages_from = ", ".join(
        [convs.stages_from, *(f"the pattern of rule {label!r}" for label in patterned)]
    )
    return ConversionPlan(
        **taken_from(convs, ConversionPlan) | {"skipped": in_order, "stages_from": stages_from},
        model=model,
        model_args=arguments,
        rules=rules.source,
        rules_text=rules.text,
        scope=scope,
        tie=options.tie,
        share=share,
        layers=layers,
        tie_groups=named_owners(layers),
        budget=units,
        folded=False,
    )


def _group_layers(drafts: Sequence[LayerPlan]) -> dict[str, list[LayerPlan]]:
    """Drafts of one stage and shape, by the group's name; their old kernels are alike: one grid
    starts them all.
    """
    by_key: dict[tuple[object, ...], list[LayerPlan]] = {}
    for draft in drafts:
        if draft.stage is not None:
            old = (draft.kernel_size, draft.dilation)
            key = (
                draft.stage,
                draft.position_shape,
                draft.dilated_size,
                draft.dense_axes,
                draft.interpolation,
                *old,
            )
            by_key.setdefault(key, []).append(draft)
    groups = [members for members in by_key.values() if len(members) > 1]
    in_stage = Counter(members[0].stage for members in groups)
    named: dict[str, list[LayerPlan]] = {}
    for members in groups:
        first = members[0]
        name = str(first.stage)
        if in_stage[first.stage] > 1:
            name += f"/{first.out_channels}x{first.in_channels // first.groups}"
        if name in named:
            name += f"/{size_text(first.kernel_size)}"
        alike = sum(other == name or other.startswith(f"{name}/") for other in named)
        named[f"{name}/{alike + 1}" if alike else name] = members
    return named


def _with_counts(
    drafts: Sequence[LayerPlan], known: LayerCounts, tie: Tie, skipped: Sequence[Skipped]
) -> list[LayerPlan]:
    """The drafts with their counts; PlanError where drafts and counts are not of the same layers."""
    names = {name for draft in drafts for name in draft.names}
    for name in (name for name in known.counts if name not in names):
        reason = next(
            (skip.reason for skip in skipped if skip.name == name),
            "the model has no such convolution",
        )
        raise PlanError(
            f"{known.source}: has elements for {shown(name)}, which would not be converted: "
            f"{reason}"
        )
    missing = [draft.name for draft in drafts if not known.counts.keys() & set(draft.names)]
    if missing:
        raise PlanError(
            f"{known.source}: has no elements for {listed(missing, 1)}, which would be converted"
        )
    count_of = {
        draft.name: next(known.counts[n] for n in draft.names if n in known.counts)
        for draft in drafts
    }
    for draft in drafts:
        if draft.kernel_count not in (UNSOLVED, count_of[draft.name]):
            stated = f"rule {draft.rule!r} states {draft.kernel_count}"
            raise PlanError(
                f"{known.source}: {draft.name} has {count_of[draft.name]} elements in a kernel, "
                f"but {stated}"
            )
    # Layers that would be a tie group if their counts were the same.
    shared = tie == "stage" and not known.solved
    alike = (
        _group_layers([replace(draft, kernel_count=UNSOLVED) for draft in drafts]) if shared else {}
    )
    for group, (first, *others) in alike.items():
        for other in others:
            if count_of[other.name] != count_of[first.name]:
                raise PlanError(
                    f"{known.source}: layers of {group} cannot share positions, since their kernel "
                    "counts differ: "
                    f"{first.name} has {count_of[first.name]}, {other.name} has "
                    f"{count_of[other.name]}; use --tie none"
                )
    return [replace(draft, kernel_count=count_of[draft.name]) for draft in drafts]


def _draft(site: ConvSite, rules: RuleSet, index: int, options: PlanOptions) -> LayerPlan:
    """A layer without its tie group; its kernel count is UNSOLVED if neither rule nor option states
    one.
    """
    rule = rules.rules[index]
    size: Any = rule.dilated_size or options.dilated_size or rules.defaults.dilated_size
    window, dense_axes = _window(site, size, rule)
    old_cells = math.prod(
        side for axis, side in enumerate(site.kernel_size) if axis not in dense_axes
    )
    stated = rule.kernel_count or (
        old_cells if options.kernel_count == EXACT else options.kernel_count
    )
    return LayerPlan(
        **taken_from(site, LayerPlan) | {"stage": rule.stage_of(site.name) or site.stage},
        dilated_size=window,
        dense_axes=dense_axes,
        interpolation=rule.interpolation or options.interpolation or INTERPOLATIONS[0],
        kernel_count=UNSOLVED if stated == AUTO else int(stated),
        tie_group=None,
        rule=rules.label(index),
    )


def _check_exact(rules: RuleSet, interpolation: str | None) -> None:
    exact = [name for name in INTERPOLATIONS if find_interpolation(name).exact_on_cells]
    for index, rule in enumerate(rules.rules):
        if rule.kernel_count not in (None, AUTO):
            raise RuleError(
                f"{rules.source}: rule {rules.label(index)!r} states kernel_count "
                f"{rule.kernel_count}, "
                "but an exact start needs as many elements as the old kernel has cells"
            )
        used = rule.interpolation or interpolation or INTERPOLATIONS[0]
        if rule.skip is None and used not in exact:
            raise PlanError(
                f"{used} interpolation spreads an element over several cells, wherever it lies; "
                f"an exact start needs {' or '.join(exact)}"
            )


def _recommended_size(convs: ModelConvs, rules: RuleSet, rule_of: Mapping[str, int]) -> int | None:
    """For "auto"; None where rules state all sizes."""
    converted = [
        (site, rules.rules[rule_of[site.name]]) for site in convs.sites if site.name in rule_of
    ]
    free = [site for site, rule in converted if not rule.dilated_size]
    if rules.defaults.dilated_size or not free:
        return None
    sizes = larger_sizes(free)
    most = (convs.macs or 0) * MOST_SLOWER / 100
    within = [
        size for size in sizes if size <= MOST_WINDOW and _added_macs(converted, size) <= most
    ]
    return max(within, default=sizes[0])


def larger_sizes(convs: Sequence[OldConv]) -> list[int]:
    """Nine windows, each two cells larger than the one before; the first is the least that none of
    the kernels exceeds.

    It is larger than the smallest of them. Where extents are both odd and even, those that are more
    common count.
    """
    extents = [max(map(extent, conv.kernel_size, conv.dilation)) for conv in convs]
    parity = statistics.mode(size % 2 for size in extents)
    alike = [size for size in extents if size % 2 == parity]
    first = max(*alike, min(alike) + 2)
    return [first + 2 * step for step in range(9)]


def _added_macs(converted: Sequence[tuple[ConvSite, Rule]], size: int) -> float:
    """By windows of that size, where a site can take it and its rule states none; infinite where
    MACs are not known.
    """
    added = 0.0
    for site, rule in converted:
        with contextlib.suppress(PlanError):
            window, _ = _window(site, rule.dilated_size or size, rule)
            before, after = site.macs(site.kernel_size), site.macs(window)
            added += math.inf if before is None or after is None else after - before
    return added


def _check_options(options: PlanOptions) -> None:
    size, count = options.dilated_size, options.kernel_count
    sides = size if isinstance(size, Sequence) else [size]
    if size != AUTO and (not sides or any(type(side) is not int or side < 1 for side in sides)):
        raise PlanError(
            f"dilated size {shown(repr(size))} must be a positive integer, or one for each side"
        )
    for name, allowed in (
        ("scope", SCOPES),
        ("tie", TIES),
        ("interpolation", (None, *INTERPOLATIONS)),
    ):
        if (value := getattr(options, name)) not in allowed:
            raise PlanError(
                f"{name}={shown(repr(value))} must be one of {', '.join(filter(None, allowed))}"
            )
    if count not in (AUTO, EXACT) and (type(count) is not int or count < 1):
        raise PlanError(
            f"kernel count {shown(repr(count))} must be a positive integer, auto or exact"
        )


def claim_convs(rules: RuleSet, convs: ModelConvs) -> tuple[dict[str, int], list[Skipped]]:
    """The rule of each site to convert, and what stays and why; an error for rules that claim or
    convert nothing.
    """
    index_of, reasons = claim_sites(rules, convs.sites)
    skipped = list(convs.skipped)
    rule_of: dict[str, int] = {}
    for site in convs.sites:
        if not site.name:
            raise PlanError(
                "the model is itself a convolution, which cannot be replaced in place; use "
                "DclsConv2d.from_conv"
            )
        reason = reasons.get(site.name) or rules.rules[index_of[site.name]].skip
        if reason is None:
            rule_of[site.name] = index_of[site.name]
        else:
            skipped.append(Skipped(name=site.name, type=site.type, reason=reason))
    if not index_of:
        kinds = kinds_of_convs(convs).most_common(4)
        has = ", ".join(f"{count} {kind}" for kind, count in kinds) or "no convolution at all"
        message = f"nothing in the model matches rules {rules.source!r}; it has {has}"
        for name in AUTO_RULES:
            claimed = len(claim_sites(load_rules(name), convs.sites)[0])
            if claimed and name != rules.source:
                message += f"; rules {name!r} would match {claimed}"
        raise NothingMatchesError(message)
    if not rule_of:
        raise NothingMatchesError(
            f"{rules.source}: its rules skip all that they match; nothing would be converted"
        )
    for index, rule in enumerate(rules.rules):
        if index not in index_of.values():
            shadowed = any(rule.match.misses(site) is None for site in convs.sites)
            why = (
                "earlier rules claim all that it matches"
                if shadowed
                else "no convolution of the model matches it"
            )
            if rule.match.stage is not None and not shadowed:
                stages = dict.fromkeys(site.stage for site in convs.sites if site.stage)
                why += f"; its stages are {', '.join(stages) or 'not known'}"
            raise RuleError(f"{rules.source}: rule {rules.label(index)!r} claims nothing: {why}")
    return rule_of, skipped


def check_overruled(rules: RuleSet, options: PlanOptions) -> None:
    """Refuse (RuleError) an option that has no effect, since every rule states a value of its own."""
    converting = [rule for rule in rules.rules if rule.skip is None]
    count = None if options.kernel_count in (AUTO, EXACT) else options.kernel_count
    for option, key, value in (
        (
            "dilated size",
            "dilated_size",
            None if options.dilated_size == AUTO else options.dilated_size,
        ),
        ("kernel count", "kernel_count", count),
        ("interpolation", "interpolation", options.interpolation),
    ):
        if value is not None and all(getattr(rule, key) is not None for rule in converting):
            raise RuleError(
                f"{rules.source}: every rule states its own {key}, so the {option} given has no "
                "effect"
            )


def _window(
    site: ConvSite, size: int | Sequence[int], rule: Rule
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The window of the new layer, and its dense axes; PlanError if the site cannot take this size."""
    sides = (size,) * site.dims if isinstance(size, int) else tuple(size)
    if len(sides) != site.dims:
        raise PlanError(
            f"the size {size_text(sides)} is for {len(sides)}-D, this convolution is {site.dims}-D"
        )
    stated = (
        site.kernel_size if isinstance(size, int) else sides
    )  # an integer leaves sides of 1 in a longer kernel
    dense = {axis for axis, side in enumerate(stated) if side == 1 < max(stated)}.union(
        rule.dense_axes or ()
    )
    if max(dense, default=0) >= site.dims:
        raise PlanError(
            f"the rule's dense axes {rule.dense_axes} are not all axes of a {site.dims}-D "
            "convolution"
        )
    if len(dense) == site.dims:
        raise PlanError("all its axes are dense; nothing would be learnt")
    if isinstance(size, int):
        sides = tuple(
            site.kernel_size[axis] if axis in dense else size for axis in range(site.dims)
        )
    check_window(site.kernel_size, site.dilation, sides, sorted(dense))
    padding = grown_padding(site.padding, site.kernel_size, site.dilation, sides, site.stride)
    check_cells(site.out_channels * site.in_channels // site.groups, sides)
    if site.padding_mode in ("reflect", "circular") and site.input_extent is not None:
        cells = padded_cells(padding, site.input_extent, sides, site.stride)
        for width, side in zip(map(max, cells), site.input_extent, strict=True):
            if width > side - (site.padding_mode == "reflect"):
                raise PlanError(
                    f"{site.padding_mode} padding of {width} does not fit its input of {side}"
                )
    return sides, tuple(sorted(dense))
