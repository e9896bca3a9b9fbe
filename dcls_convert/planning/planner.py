"""From sites and rules to a plan: which layer replaces which convolution, and what is tied."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..depthwise.geometry import (
    Padding,
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
    DEFAULT_INTERPOLATION,
    ERROR,
    EXACT,
    INTERPOLATION_NAMES,
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

# A draft is a LayerPlan that has no tie group yet, and whose kernel count may still be UNSOLVED.

SIZES_TO_TRY = 9  # windows that `larger_sizes` gives


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
        rules: A rule set, its name, file or mapping, or "auto": the first of AUTO_RULES that
            claims a convolution.
        dilated_size: Window for rules that state none; an integer leaves sides of 1 in a longer
            kernel as they are. "auto" takes the largest, 17 at most, that adds at most 15 % to the
            model's MACs. If every window adds more, it takes the smallest that is larger than the
            kernels.
        kernel_count: Elements in a kernel for rules that state none. "auto" solves for the budget.
            "exact" takes as many as the old kernel has cells, whatever the budget; the layers can
            then start as the same function. `LayerCounts` gives the counts of existing elements; it
            must name exactly the layers that are converted.
        scope: One count for the model (also "auto"), for each stage, or for each layer (a tie group
            counts as one layer). "error" needs the model's kernels: only `convert_` and the command
            line plan with it.
        tie: "stage" shares positions among layers of one stage and shape, "none" gives every layer
            its own.
        budget: Percent of the replaced weights that new weights, positions and sigmas may use.
        interpolation: For rules that state none; the default is bilinear.
        strict: Refuse a matching convolution that cannot take the size, instead of skipping it.
        model, model_args: How to build the model again, for a checkpoint.

    Raises:
        RuleError: A rule that claims no convolution, or an option that all rules overrule.
        PlanError: Sizes, counts or a budget that do not fit; names values that do.
        NothingMatchesError: No rule claims anything; says what the model has instead.
    """
    options = PlanOptions(rules=rules, **planning)
    return make_plan(convs, options, model=model, model_args=model_args)


def make_plan(
    convs: ModelConvs,
    options: PlanOptions,
    *,
    model: str | None = None,
    model_args: dict[str, Any] | None = None,
) -> ConversionPlan:
    """Decide what becomes of every convolution, from options that are a record already.

    Raises:
        RuleError, PlanError, NothingMatchesError: `plan_conversion` says when.
    """
    known_counts = None
    if isinstance(options.kernel_count, LayerCounts):
        known_counts = options.kernel_count
        options = replace(options, kernel_count=AUTO)
    elif options.scope == ERROR and options.kernel_count == AUTO:
        raise PlanError(
            f"scope {ERROR!r} measures what trained kernels lose; "
            "convert_ and dcls-convert MODEL can"
        )
    _check_options(options)
    scope: Scope = "model" if options.scope == AUTO else options.scope
    share = parse_percent(options.budget)
    arguments = _json_arguments(model_args)
    rules = _find_rules(options.rules, convs)
    rule_of, skipped = claim_convs(rules, convs)
    check_overruled(rules, options)

    drafts, refused = _draft_layers(convs, rules, rule_of, options)
    skipped += refused
    if known_counts is not None:
        drafts = _with_known_counts(drafts, known_counts, options.tie, skipped)
    if options.tie == "stage":
        drafts = _with_tie_groups(drafts)
    layers, units = solve_counts(drafts, scope, share)

    from_convs = taken_from(convs, ConversionPlan)
    from_convs["skipped"] = _in_model_order(skipped, convs)
    from_convs["stages_from"] = _stages_from(convs, rules)
    return ConversionPlan(
        **from_convs,
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


def _check_options(options: PlanOptions) -> None:
    size = options.dilated_size
    if size != AUTO:
        sides = size if isinstance(size, Sequence) else [size]
        if not sides or any(type(side) is not int or side < 1 for side in sides):
            raise PlanError(
                f"dilated size {shown(repr(size))} must be a positive integer, or one for each side"
            )
    choices = {"scope": SCOPES, "tie": TIES, "interpolation": (None, *INTERPOLATION_NAMES)}
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value not in allowed:
            names = ", ".join(filter(None, allowed))
            raise PlanError(f"{name}={shown(repr(value))} must be one of {names}")
    count = options.kernel_count
    if count not in (AUTO, EXACT) and (type(count) is not int or count < 1):
        raise PlanError(
            f"kernel count {shown(repr(count))} must be a positive integer, auto or exact"
        )


def _json_arguments(model_args: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments as a JSON file gives them back: tuples become lists."""
    try:
        return dict(json.loads(json.dumps(model_args or {}, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise PlanError(f"model_args cannot be kept in a JSON file: {one_line(error)}") from error


def _find_rules(rules: RuleSet | str | Path | Mapping[str, Any], convs: ModelConvs) -> RuleSet:
    if isinstance(rules, RuleSet):
        return rules
    if rules == AUTO:
        return choose_rules(convs.sites)
    return load_rules(rules)


def _in_model_order(skipped: Sequence[Skipped], convs: ModelConvs) -> tuple[Skipped, ...]:
    """The sites among them first, in the model's order, then those that `find_convs` skipped."""
    place_of: dict[str, int] = {}
    for place, site in enumerate(convs.sites):
        place_of[site.name] = place
    end = len(place_of)
    return tuple(sorted(skipped, key=lambda skip: place_of.get(skip.name, end)))


def _stages_from(convs: ModelConvs, rules: RuleSet) -> str:
    """How the stages were found: in the model, and by the patterns of rules."""
    sources = [convs.stages_from]
    for index, rule in enumerate(rules.rules):
        if rule.stage_pattern:
            sources.append(f"the pattern of rule {rules.label(index)!r}")
    return ", ".join(sources)


def claim_convs(rules: RuleSet, convs: ModelConvs) -> tuple[dict[str, int], list[Skipped]]:
    """Which rule converts which site, and what stays and why.

    Returns:
        The index of the rule, by the name of each site to convert; and the other convolutions.

    Raises:
        RuleError: A rule claims no site.
        NothingMatchesError: No site would be converted.
    """
    index_of, reasons = claim_sites(rules, convs.sites)
    skipped = list(convs.skipped)
    rule_of: dict[str, int] = {}
    for site in convs.sites:
        if not site.name:
            raise PlanError(
                "the model is itself a convolution, which cannot be replaced in place; "
                "use DclsConv2d.from_conv"
            )
        reason = reasons.get(site.name) or rules.rules[index_of[site.name]].skip
        if reason is None:
            rule_of[site.name] = index_of[site.name]
        else:
            skipped.append(Skipped(name=site.name, type=site.type, reason=reason))
    if not index_of:
        raise NothingMatchesError(_why_nothing_matches(rules, convs))
    if not rule_of:
        raise NothingMatchesError(
            f"{rules.source}: its rules skip all that they match; nothing would be converted"
        )
    used = set(index_of.values())
    for index, rule in enumerate(rules.rules):
        if index not in used:
            reason = _why_unused(rule, convs)
            raise RuleError(f"{rules.source}: rule {rules.label(index)!r} claims nothing: {reason}")
    return rule_of, skipped


def _why_nothing_matches(rules: RuleSet, convs: ModelConvs) -> str:
    """A message with what the model has instead, and which of the shipped rules would match."""
    commonest = kinds_of_convs(convs).most_common(4)
    has = ", ".join(f"{count} {kind}" for kind, count in commonest) or "no convolution at all"
    message = f"nothing in the model matches rules {rules.source!r}; it has {has}"
    for name in AUTO_RULES:
        rule_of, _ = claim_sites(load_rules(name), convs.sites)
        if rule_of and name != rules.source:
            message += f"; rules {name!r} would match {len(rule_of)}"
    return message


def _why_unused(rule: Rule, convs: ModelConvs) -> str:
    """Why a rule claims no site: earlier rules do, or it matches none."""
    if any(rule.match.matches(site) for site in convs.sites):
        return "earlier rules claim all that it matches"
    reason = "no convolution of the model matches it"
    if rule.match.stage is not None:
        stages = dict.fromkeys(site.stage for site in convs.sites if site.stage)
        reason += f"; its stages are {', '.join(stages) or 'not known'}"
    return reason


def check_overruled(rules: RuleSet, options: PlanOptions) -> None:
    """Refuse (RuleError) an option without effect, because every rule states its own value."""
    given: dict[str, str] = {}  # key of a rule -> the option's name in messages
    if options.dilated_size != AUTO:
        given["dilated_size"] = "dilated size"
    if options.kernel_count not in (AUTO, EXACT):
        given["kernel_count"] = "kernel count"
    if options.interpolation is not None:
        given["interpolation"] = "interpolation"
    converting = [rule for rule in rules.rules if rule.skip is None]
    for key, option in given.items():
        if all(getattr(rule, key) is not None for rule in converting):
            raise RuleError(
                f"{rules.source}: every rule states its own {key}, "
                f"so the {option} given has no effect"
            )


def _check_exact(rules: RuleSet, interpolation: str | None) -> None:
    """Refuse rules with which new layers could not start as exactly the old function."""
    exact = [name for name in INTERPOLATION_NAMES if find_interpolation(name).exact_on_cells]
    for index, rule in enumerate(rules.rules):
        if rule.kernel_count not in (None, AUTO):
            raise RuleError(
                f"{rules.source}: rule {rules.label(index)!r} "
                f"states kernel_count {rule.kernel_count}, "
                "but an exact start needs as many elements as the old kernel has cells"
            )
        used = rule.interpolation or interpolation or DEFAULT_INTERPOLATION
        if rule.skip is None and used not in exact:
            raise PlanError(
                f"{used} interpolation spreads an element over several cells, wherever it lies; "
                f"an exact start needs {' or '.join(exact)}"
            )


def _recommended_size(convs: ModelConvs, rules: RuleSet, rule_of: Mapping[str, int]) -> int | None:
    """The window for dilated size "auto"; None if the rules state all sizes."""
    if rules.defaults.dilated_size:
        return None
    converted: list[tuple[ConvSite, Rule]] = []
    without_size: list[ConvSite] = []
    for site in convs.sites:
        if site.name in rule_of:
            rule = rules.rules[rule_of[site.name]]
            converted.append((site, rule))
            if not rule.dilated_size:
                without_size.append(site)
    if not without_size:
        return None
    sizes = larger_sizes(without_size)
    most_added = (convs.macs or 0) * MOST_SLOWER / 100
    recommended = sizes[0]
    for size in sizes:
        if size <= MOST_WINDOW and _added_macs(converted, size) <= most_added:
            recommended = size
    return recommended


def larger_sizes(convs: Sequence[OldConv]) -> list[int]:
    """Nine windows for the kernels, each two cells larger than the one before.

    All have the parity that most kernels have. The first one is the smallest that holds every
    kernel of this parity and is larger than at least one of them.
    """
    extents = [max(map(extent, conv.kernel_size, conv.dilation)) for conv in convs]
    parity = statistics.mode(size % 2 for size in extents)
    of_this_parity = [size for size in extents if size % 2 == parity]
    first = max(*of_this_parity, min(of_this_parity) + 2)
    return list(range(first, first + 2 * SIZES_TO_TRY, 2))


def _added_macs(converted: Sequence[tuple[ConvSite, Rule]], size: int) -> float:
    """MACs that the new windows add, with this size where the rule states none.

    Sites that cannot take the size add nothing. Infinite if the MACs of a site are not known.
    """
    added = 0
    for site, rule in converted:
        try:
            window, _ = _window(site, rule.dilated_size or size, rule)
        except PlanError:
            continue
        before = site.macs(site.kernel_size)
        after = site.macs(window)
        if before is None or after is None:
            return math.inf
        added += after - before
    return added


def _draft_layers(
    convs: ModelConvs, rules: RuleSet, rule_of: Mapping[str, int], options: PlanOptions
) -> tuple[list[LayerPlan], list[Skipped]]:
    """Drafts of the layers, and the sites that cannot take their size.

    Raises:
        PlanError: A site cannot take its size, and either `strict` is set or no site can; or an
            exact start is asked for and impossible.
    """
    if options.kernel_count == EXACT:
        _check_exact(rules, options.interpolation)
    size: int | Sequence[int] | None = None
    if options.dilated_size == AUTO:
        size = _recommended_size(convs, rules, rule_of)
    else:
        size = options.dilated_size
    drafts: list[LayerPlan] = []
    refused: list[Skipped] = []
    for site in convs.sites:
        if site.name not in rule_of:
            continue
        try:
            drafts.append(_draft(site, rules, rule_of[site.name], size, options))
        except PlanError as error:
            refused.append(Skipped(name=site.name, type=site.type, reason=str(error)))
    if refused and (options.strict or not drafts):
        message = f"{refused[0].name}: {refused[0].reason}"
        if len(refused) > 1:
            message += f" ({len(refused) - 1} more like it)"
        raise PlanError(message)
    return drafts, refused


def _draft(
    site: ConvSite,
    rules: RuleSet,
    index: int,
    size: int | Sequence[int] | None,
    options: PlanOptions,
) -> LayerPlan:
    """A layer without tie group; its count is UNSOLVED if neither rule nor option states one.

    Args:
        index: Of the rule that claims the site.
        size: The window where the rule states none; None if rules or their defaults state all.
    """
    rule = rules.rules[index]
    stated_size: Any = rule.dilated_size or size or rules.defaults.dilated_size
    window, dense_axes = _window(site, stated_size, rule)
    from_site = taken_from(site, LayerPlan)
    from_site["stage"] = rule.stage_of(site.name) or site.stage
    return LayerPlan(
        **from_site,
        dilated_size=window,
        dense_axes=dense_axes,
        interpolation=rule.interpolation or options.interpolation or DEFAULT_INTERPOLATION,
        kernel_count=_stated_count(site, dense_axes, rule, options),
        tie_group=None,
        rule=rules.label(index),
    )


def _stated_count(
    site: ConvSite, dense_axes: Sequence[int], rule: Rule, options: PlanOptions
) -> int:
    """The kernel count that the rule, or else the option states; UNSOLVED for "auto"."""
    stated: Any = rule.kernel_count or options.kernel_count
    if stated == AUTO:
        return UNSOLVED
    if stated == EXACT:
        cells = 1
        for axis, side in enumerate(site.kernel_size):
            if axis not in dense_axes:
                cells *= side
        return cells
    return int(stated)


def _window(
    site: ConvSite, size: int | Sequence[int], rule: Rule
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The window of the new layer, and its dense axes.

    Raises:
        PlanError: The site cannot take this size.
    """
    if isinstance(size, int):
        dense_axes = _dense_axes(site, site.kernel_size, rule)
        sides = list(site.kernel_size)
        for axis in range(site.dims):
            if axis not in dense_axes:
                sides[axis] = size
        window = tuple(sides)
    else:
        window = tuple(size)
        if len(window) != site.dims:
            raise PlanError(
                f"the size {size_text(window)} is for {len(window)}-D, "
                f"this convolution is {site.dims}-D"
            )
        dense_axes = _dense_axes(site, window, rule)
    check_window(site.kernel_size, site.dilation, window, dense_axes)
    padding = grown_padding(site.padding, site.kernel_size, site.dilation, window, site.stride)
    check_cells(site.out_channels * site.in_channels // site.groups, window)
    _check_padding(site, window, padding)
    return window, dense_axes


def _dense_axes(site: ConvSite, sides: Sequence[int], rule: Rule) -> tuple[int, ...]:
    """Axes of side 1 beside a longer one, and those that the rule names."""
    dense = set(rule.dense_axes or ())
    longest = max(sides)
    for axis, side in enumerate(sides):
        if side == 1 and longest > 1:
            dense.add(axis)
    if max(dense, default=0) >= site.dims:
        raise PlanError(
            f"the rule's dense axes {rule.dense_axes} are not all axes "
            f"of a {site.dims}-D convolution"
        )
    if len(dense) == site.dims:
        raise PlanError("all its axes are dense; nothing would be learnt")
    return tuple(sorted(dense))


def _check_padding(site: ConvSite, window: Sequence[int], padding: Padding) -> None:
    """Refuse reflect and circular padding that is wider than torch allows for the input."""
    if site.padding_mode not in ("reflect", "circular") or site.input_extent is None:
        return
    cells = padded_cells(padding, site.input_extent, window, site.stride)
    for before_and_after, side in zip(cells, site.input_extent, strict=True):
        width = max(before_and_after)
        widest = side
        if site.padding_mode == "reflect":  # which does not repeat the border
            widest = side - 1
        if width > widest:
            raise PlanError(
                f"{site.padding_mode} padding of {width} does not fit its input of {side}"
            )


def _with_known_counts(
    drafts: Sequence[LayerPlan], known: LayerCounts, tie: Tie, skipped: Sequence[Skipped]
) -> list[LayerPlan]:
    """The drafts with the kernel counts of elements that exist already.

    Raises:
        PlanError: The elements are not those of exactly these layers, or contradict a rule, or
            layers of a tie group have different counts.
    """
    names: set[str] = set()
    for draft in drafts:
        names.update(draft.names)
    for name in known.counts:
        if name not in names:
            reason = "the model has no such convolution"
            for skip in skipped:
                if skip.name == name:
                    reason = skip.reason
            raise PlanError(
                f"{known.source}: has elements for {shown(name)}, "
                f"which would not be converted: {reason}"
            )
    count_of: dict[str, int] = {}
    missing: list[str] = []
    for draft in drafts:
        count = _known_count(draft, known)
        if count is None:
            missing.append(draft.name)
        else:
            count_of[draft.name] = count
    if missing:
        raise PlanError(
            f"{known.source}: has no elements for {listed(missing, 1)}, which would be converted"
        )
    for draft in drafts:
        if draft.kernel_count not in (UNSOLVED, count_of[draft.name]):
            raise PlanError(
                f"{known.source}: {draft.name} has {count_of[draft.name]} elements in a kernel, "
                f"but rule {draft.rule!r} states {draft.kernel_count}"
            )
    if tie == "stage" and not known.solved:
        _check_counts_can_be_tied(drafts, count_of, known.source)
    return [replace(draft, kernel_count=count_of[draft.name]) for draft in drafts]


def _known_count(draft: LayerPlan, known: LayerCounts) -> int | None:
    """The count stored under any of the layer's names."""
    for name in draft.names:
        if name in known.counts:
            return known.counts[name]
    return None


def _check_counts_can_be_tied(
    drafts: Sequence[LayerPlan], count_of: Mapping[str, int], source: str
) -> None:
    """Refuse different counts for layers that would be a tie group if their counts were equal."""
    without_counts = [replace(draft, kernel_count=UNSOLVED) for draft in drafts]
    for group, (first, *others) in _group_layers(without_counts).items():
        count = count_of[first.name]
        for other in others:
            if count_of[other.name] != count:
                raise PlanError(
                    f"{source}: layers of {group} cannot share positions, "
                    f"since their kernel counts differ: {first.name} has {count}, "
                    f"{other.name} has {count_of[other.name]}; use --tie none"
                )


def _with_tie_groups(drafts: Sequence[LayerPlan]) -> list[LayerPlan]:
    """The drafts, with the names of their tie groups."""
    group_of: dict[str, str] = {}
    for group, members in _group_layers(drafts).items():
        for member in members:
            group_of[member.name] = group
    return [replace(draft, tie_group=group_of.get(draft.name)) for draft in drafts]


def _group_layers(drafts: Sequence[LayerPlan]) -> dict[str, list[LayerPlan]]:
    """Drafts that can share positions, two or more, by a unique name of the group.

    They have the same stage, shape, window and interpolation, and the same geometry of the old
    kernel, so that one grid of first positions fits them all.
    """
    by_key: dict[tuple[object, ...], list[LayerPlan]] = {}
    for draft in drafts:
        if draft.stage is None:
            continue
        key = (
            draft.stage,
            draft.position_shape,
            draft.dilated_size,
            draft.dense_axes,
            draft.interpolation,
            draft.kernel_size,
            draft.dilation,
        )
        by_key.setdefault(key, []).append(draft)
    groups = [members for members in by_key.values() if len(members) > 1]
    groups_in_stage = Counter(members[0].stage for members in groups)
    named: dict[str, list[LayerPlan]] = {}
    for members in groups:
        first = members[0]
        name = _group_name(first, named, alone_in_stage=groups_in_stage[first.stage] == 1)
        named[name] = members
    return named


def _group_name(first: LayerPlan, taken: Mapping[str, object], *, alone_in_stage: bool) -> str:
    """The stage's name, with the channels, the kernel size and a number as far as it needs them."""
    name = str(first.stage)
    if not alone_in_stage:
        name += f"/{first.out_channels}x{first.in_channels // first.groups}"
    if name in taken:
        name += f"/{size_text(first.kernel_size)}"
    same_name = 0  # groups that have this name, with or without a number behind it
    for other in taken:
        if other == name or other.startswith(f"{name}/"):
            same_name += 1
    if same_name:
        name += f"/{same_name + 1}"
    return name
