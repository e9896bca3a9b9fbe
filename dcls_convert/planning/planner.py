"""Draft a plan from sites and rules: the new layers, and which of them share positions."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack

from ..errors import NothingMatchesError, PlanError, RuleError, check_argument
from ..geometry import Direction, along_learnt_axes
from ..layers.interpolation import find_interpolation
from ..networks.sites import ONE_SIDE, AllowedWindows, ConvSite, ModelConvs, OldConv, Skipped
from ..networks.source import ModelSource
from ..options import (
    AUTO,
    DEFAULT_INTERPOLATION,
    ERROR_SCOPE,
    EXACT,
    INTERPOLATION_NAMES,
    parse_percent,
)
from ..running.input_spec import image_inputs
from ..text import count_text, one_line, short_list
from .claims import Claim, GrowthLimit, assign_rules, choose_rules, refuse_overridden_options
from .kernel_counts import UNSOLVED, check_counts
from .layer_plan import LayerPlan
from .plan import ConversionPlan, DraftPlan
from .plan_options import PlanArguments, PlanOptions
from .rules import Rule, RuleSet
from .tie_groups import with_tie_groups
from .windows import (
    NoWindowError,
    choose_window,
    notes_on_classes,
    notes_on_windows,
    recommended_size,
    window_to_try,
)

# Tried to see whether windows may grow to both sides, if "auto" is to choose the size afterwards.
SIZE_TO_TRY = "+4"


def plan_conversion(
    convs: ModelConvs,
    rules: RuleSet | str | Path | Mapping[str, Any] = AUTO,
    *,
    model: str | None = None,
    model_args: dict[str, Any] | None = None,
    **options: Unpack[PlanArguments],
) -> ConversionPlan:
    """Decide what becomes of every convolution.

    Args:
        convs: What `find_convs` found.
        rules: A rule set, its name, file or mapping, or "auto": the first rule set of AUTO_RULES
            that claims a convolution.
        model, model_args: How to build the model again, for a folder.
        options: dilated_size, kernel_count, scope, tie, budget, interpolation and strict, as in
            `convert_`. The scope "error" needs the model's kernels, so only `convert_` and the
            command line plan with it.

    Raises:
        RuleError: A rule claims no convolution, or all rules overrule an option.
        PlanError: Sizes, counts or a budget do not fit; the message names values that do.
        NothingMatchesError: No rule claims anything; the message says what the model has instead.
    """
    check_argument("convs", convs, ModelConvs)
    source = None
    if model is not None:
        source = ModelSource(name=model, args=model_args or {})
    stated = PlanOptions(rules=rules, **options)
    if stated.scope == ERROR_SCOPE:
        raise PlanError(
            f"scope {ERROR_SCOPE!r} needs the trained kernels, which are not given here; "
            "use convert_ or dcls-convert MODEL"
        )
    return draft_plan(convs, stated, source).with_counts()


def draft_plan(
    convs: ModelConvs,
    options: PlanOptions,
    source: ModelSource | None = None,
    *,
    known_counts: Mapping[str, int] | None = None,
) -> DraftPlan:
    """Decide which layers there are, their windows, and which of them share positions.

    A layer whose count no rule and no option states is UNSOLVED.

    Args:
        convs: What `find_convs` found.
        options: The options. The scope does not matter here: it says how counts are chosen.
        source: How to build the model again; None if only its user can.
        known_counts: Counts of elements that exist already, by names of layers.

    Raises:
        RuleError, PlanError, NothingMatchesError: See `plan_conversion`.
    """
    rules = choose_rules(options.rules, convs.sites)
    layers, skipped, overruled = _plan_layers(convs, rules, options)
    if known_counts is not None:
        layers = _with_known_counts(layers, known_counts)
    if options.tie == "stage":
        layers = with_tie_groups(layers)
    share = parse_percent(options.budget)
    check_counts(layers, share)
    converted = {layer.name for layer in layers}
    notes = notes_on_windows(layers)
    notes += notes_on_classes([site for site in convs.sites if site.name in converted])
    example_inputs = None
    if convs.input_size is None or convs.inputs != image_inputs(convs.input_size):
        example_inputs = convs.inputs
    return DraftPlan(
        input_size=convs.input_size,
        example_inputs=example_inputs,
        params=convs.params,
        macs=convs.macs,
        macs_note=convs.macs_note,
        not_measured=convs.not_measured,
        notes=tuple(notes),
        overruled=overruled,
        outputs_look=None if convs.dependence is None else convs.dependence.outputs_look,
        skipped=tuple(skipped),
        stages_from=_stages_from(convs, rules),
        model=None if source is None else source.name,
        model_args=_json_arguments(source),
        rules=Path(rules.source).name,  # without the folder: a plan has no paths of a machine
        rules_text=rules.text,
        tie=options.tie,
        share=share,
        layers=tuple(layers),
    )


def _with_known_counts(
    layers: Sequence[LayerPlan], known_counts: Mapping[str, int]
) -> list[LayerPlan]:
    """Return the layers, with known counts in place of UNSOLVED."""
    counted = []
    for layer in layers:
        for name in layer.names:
            if layer.kernel_count == UNSOLVED and name in known_counts:
                layer = replace(layer, kernel_count=known_counts[name])
        counted.append(layer)
    return counted


def _json_arguments(source: ModelSource | None) -> dict[str, Any]:
    """Return a source's arguments as a JSON file gives them back: tuples become lists."""
    if source is None:
        return {}
    try:
        return dict(json.loads(json.dumps(source.args, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise PlanError(f"model_args cannot be kept in a JSON file: {one_line(error)}") from error


def _stages_from(convs: ModelConvs, rules: RuleSet) -> str:
    """Say how the stages were found: in the model, and by the patterns of rules."""
    sources = [convs.stages_from]
    for index, rule in enumerate(rules.rules):
        if rule.stage_pattern:
            sources.append(f"the pattern of rule {rules.label(index)!r}")
    return ", ".join(sources)


def _check_exact(rules: RuleSet, interpolation: str | None) -> None:
    """Raise an error if new layers could not start as exactly the old function."""
    exact_names = [
        name for name in INTERPOLATION_NAMES if find_interpolation(name).is_exact_on_cells
    ]
    for index, rule in enumerate(rules.rules):
        if rule.kernel_count not in (None, AUTO):
            raise RuleError(
                f"{rules.source}: rule {rules.label(index)!r} "
                f"states kernel_count {rule.kernel_count}, "
                "but an exact start needs as many elements as the old kernel has cells"
            )
        chosen = rule.interpolation or interpolation or DEFAULT_INTERPOLATION
        if rule.skip is None and chosen not in exact_names:
            raise PlanError(
                f"{chosen} interpolation spreads an element over several cells, wherever it lies; "
                f"an exact start needs {' or '.join(exact_names)}"
            )


def _plan_layers(
    convs: ModelConvs, rules: RuleSet, options: PlanOptions
) -> tuple[list[LayerPlan], list[Skipped], tuple[str, ...]]:
    """Draft the layers.

    Returns:
        The drafts; the convolutions that stay, in the model's order; and sentences on what rules
        overrule.

    Raises:
        PlanError: A site cannot take its size, and either `strict` is set or no site can.
        RuleError, PlanError: A rule's count, or an interpolation, makes an exact start impossible.
        RuleError, PlanError, NothingMatchesError: See `assign_rules`.
    """
    claims, reasons = assign_rules(rules, convs)
    refuse_overridden_options(rules, options)
    if options.kernel_count == EXACT:
        _check_exact(rules, options.interpolation)
    drafts, errors = _allowed_layers(claims, convs, options)
    reasons |= {name: str(error) for name, error in errors.items()}
    if errors and (options.strict or not drafts):
        name = next(iter(errors))
        message = f"{name}: {reasons[name]}"
        if len(errors) > 1:
            message += f" (and {count_text(len(errors) - 1, 'more layer')})"
        if convs.not_measured is not None and not drafts:
            message += f"; the network was not measured: {convs.not_measured}"
        none_may_grow = all(isinstance(error, NoWindowError) for error in errors.values())
        if none_may_grow and not drafts:
            raise NothingMatchesError(message)
        raise PlanError(message)
    skipped = []
    for site in convs.sites:
        if site.name in reasons:
            skipped.append(Skipped(name=site.name, type=site.type, reason=reasons[site.name]))
    stated = {claim.site.name for claim in claims if claim.states_growth}
    overruled = _what_rules_overrule(
        convs.dependence, [draft for draft in drafts if draft.name in stated]
    )
    return drafts, [*skipped, *convs.skipped], overruled


def _allowed_layers(
    claims: Sequence[Claim], convs: ModelConvs, options: PlanOptions
) -> tuple[list[LayerPlan], dict[str, PlanError]]:
    """Draft layers whose windows the network allows; also return why other sites have no layer.

    If the network does not allow a window, the window grows to one side, or its layer is dropped.
    "auto" may then find another size, so the network is measured again.
    """
    stated = {claim.site.name for claim in claims if claim.states_growth}
    if convs.dependence is not None:
        forbidden = _forbidden_axes_if_all_grow_to_both_sides(claims, convs.dependence, options)
        claims = _with_growth_limits(claims, forbidden)
    while True:
        drafts: list[LayerPlan] = []
        errors: dict[str, PlanError] = {}
        size: Any = options.dilated_size
        if size == AUTO:
            size = recommended_size(claims, convs.macs)
        for claim in claims:
            try:
                drafts.append(_plan_layer(claim, size, options))
            except PlanError as error:
                errors[claim.site.name] = error
        measured = [draft for draft in drafts if draft.name not in stated]
        forbidden = _forbidden_axes(convs.dependence, measured)
        if not forbidden:
            return drafts, errors
        claims = _with_growth_limits(claims, forbidden)


def _forbidden_axes(
    dependence: AllowedWindows | None, drafts: Sequence[LayerPlan]
) -> dict[str, dict[int, str]]:
    """Return the axes along which windows of drafts must not grow as planned, and why."""
    if dependence is None:
        return {}
    windows = {draft.name: draft.dilated_size for draft in drafts}
    grow = {draft.name: draft.grow_of_axes for draft in drafts if draft.grow}
    return dependence.broken_by(windows, grow)


def _forbidden_axes_if_all_grow_to_both_sides(
    claims: Sequence[Claim], dependence: AllowedWindows, options: PlanOptions
) -> dict[str, dict[int, str]]:
    """Return the axes along which windows must not grow to both sides, and why.

    Windows of convolutions whose padding is off centre are tried, too: in a causal network, such
    windows may grow back.
    """
    windows = {}
    for claim in claims:
        if claim.states_growth:
            continue
        size: Any = options.dilated_size
        if size == AUTO:
            size = claim.default_size or SIZE_TO_TRY
        with contextlib.suppress(PlanError):  # raised again for the draft
            windows[claim.site.name] = window_to_try(claim, size)
    found = {}
    for name, reasons in dependence.broken_by(windows).items():
        # Another reason, such as padding that is too wide, may not hold for the planned window.
        found[name] = {axis: reason for axis, reason in reasons.items() if reason == ONE_SIDE}
    return found


def _with_growth_limits(
    claims: Sequence[Claim], forbidden: Mapping[str, Mapping[int, str]]
) -> list[Claim]:
    """Return the claims, with limits for axes along which their windows broke a law.

    Along an axis, a window that must not grow to both sides grows back, then ahead (a causal
    network may convolve a map that it has reversed), and at last not at all. So a plan is found
    after at most three measurements for each axis.
    """
    limited = []
    for claim in claims:
        limits = dict(claim.growth_limits)
        for axis, reason in forbidden.get(claim.site.name, {}).items():
            side: Direction | None = None
            if axis not in limits:
                side = "back" if reason == ONE_SIDE else None
            elif limits[axis].side == "back":
                side = "ahead"
            limits[axis] = GrowthLimit(reason=reason, side=side)
        limited.append(replace(claim, growth_limits=limits))
    return limited


def _what_rules_overrule(
    dependence: AllowedWindows | None, drafts: Sequence[LayerPlan]
) -> tuple[str, ...]:
    """Return sentences on windows that grow because rules say so, though the network forbids it."""
    names_of: dict[str, list[str]] = {}
    for name, reasons in _forbidden_axes(dependence, drafts).items():
        for reason in dict.fromkeys(reasons.values()):
            names_of.setdefault(reason, []).append(name)
    return tuple(f"{short_list(names)}: {reason}" for reason, names in names_of.items())


def _plan_layer(
    claim: Claim, size: int | Sequence[int] | str | None, options: PlanOptions
) -> LayerPlan:
    """Draft a layer without a tie group; its count is UNSOLVED if no rule or option states one.

    Args:
        claim: The site, and the rule that claims it.
        size: The window if the rule states none; None if the rules or their defaults state all.
        options: The options of the plan.
    """
    site = claim.site
    rule = claim.rule
    window, dense_axes, grow = choose_window(claim, size)
    from_site = {field.name: getattr(site, field.name) for field in fields(OldConv)}
    from_site["stage"] = rule.stage_of(site.name) or site.stage
    count = _stated_count(site, dense_axes, rule, options)
    return LayerPlan(
        **from_site,
        dilated_size=window,
        dense_axes=dense_axes,
        interpolation=rule.interpolation or options.interpolation or DEFAULT_INTERPOLATION,
        kernel_count=count,
        count_is_stated=count != UNSOLVED,
        tie_group=None,
        rule=claim.label,
        grow=grow,
    )


def _stated_count(
    site: ConvSite, dense_axes: Sequence[int], rule: Rule, options: PlanOptions
) -> int:
    """Return the kernel count that the rule states, or else the option; UNSOLVED for "auto".

    With the option "exact", no rule states a number: `_check_exact` has refused it.
    """
    if options.kernel_count == EXACT:
        return math.prod(along_learnt_axes(site.kernel_size, dense_axes))
    stated: Any = rule.kernel_count or options.kernel_count
    if stated == AUTO:
        return UNSOLVED
    return int(stated)
