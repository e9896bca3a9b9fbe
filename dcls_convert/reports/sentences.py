"""Sentences about the changes of a plan, for the terminal and the model card."""

from collections import Counter

from ..geometry import size_text
from ..layers.interpolation import find_interpolation
from ..options import DEFAULT_INTERPOLATION, ERROR_SCOPE
from ..planning.plan import ConversionPlan
from ..text import count_text, range_text, short_list
from .cost_tables import shown_error
from .costs import MacsChange, ParamsChange

STAGES_NAMED = 4  # number of stages with tie groups that are named
FOLDING_SENTENCE = (
    "Folding the kernels into plain convolutions keeps the outputs and these MACs, "
    "saves the construction, and stores window-sized kernels."
)


def report_sentences(
    plan: ConversionPlan, params: ParamsChange, macs: MacsChange, *, verbose: bool
) -> list[str]:
    """Return sentences on the budget, positions and errors.

    With `verbose`, add sentences on the new kernels, MACs and maps.
    """
    lines = [_budget_sentence(plan)]
    if not plan.folded:
        lines.append(_positions_sentence(plan))
    if any(layer.grow for layer in plan.layers):
        lines.append(_sides_sentence(plan))
    if macs.note:
        lines.append(macs.note_sentence)
    if shown_error(plan.layers) == "output_error":
        lines.append(
            "Error: relative error of each layer's outputs on the images it was fitted to."
        )
    if verbose:
        lines.append(f"{_new_kernels(plan, params)}; stages from {plan.stages_from}.")
        if macs.delta is not None:
            lines.append(_macs_sentence(plan, params, macs))
        lines += _maps_sentence(plan)
    lines += _beyond_map_sentence(plan)
    return [*lines, *plan.notes]


def _beyond_map_sentence(plan: ConversionPlan) -> list[str]:
    """Say how many windows have cells that meet only padding, and how large their maps are."""
    maps = []
    for layer in plan.layers:
        if layer.exceeds_map and layer.input_extent is not None:
            maps.append(layer.input_extent)
    if not maps:
        return []
    subject = f"In {len(maps)} of {count_text(len(plan.layers), 'layer')}, outer cells meet"
    if len(maps) == len(plan.layers):
        subject = "Outer cells meet"
    return [f"{subject} only padding (maps of {range_text(maps, size_text)})."]


def _maps_sentence(plan: ConversionPlan) -> list[str]:
    """Say how large the layers' maps are, in the order of the layers; [] if unknown."""
    sizes: Counter[str] = Counter()
    for layer in plan.layers:
        if layer.input_extent is not None:
            sizes[size_text(layer.input_extent)] += 1
    maps = [f"{size} ({count_text(count, 'layer')})" for size, count in sizes.items()]
    if not maps:
        return []
    return [f"Maps at this input size: {', '.join(maps)}."]


def _budget_sentence(plan: ConversionPlan) -> str:
    """Say how much of the budget is used."""
    budget = plan.budget
    text = "Budget"
    if plan.scope == ERROR_SCOPE:
        text += " (counts by error)"
    if plan.folded:
        text += " before folding"
    text += ": "
    if budget.kernel_count is not None:
        text += f"{count_text(budget.kernel_count, 'element')} per kernel use "
    text += f"{budget.used:,} of {budget.limit:,} parameters (no biases)"
    if budget.used > budget.limit:
        text += f", OVER BUDGET by {budget.used - budget.limit:,}"
    return f"{text}."


def _positions_sentence(plan: ConversionPlan) -> str:
    """Say how many positions are shared, in which stages; and the interpolation, if unusual."""
    tied = [layer for layer in plan.layers if layer.tie_group is not None]
    names = sorted({layer.interpolation for layer in plan.layers})
    interpolation = ""
    if names != [DEFAULT_INTERPOLATION]:
        interpolation = f"; {' and '.join(names)} interpolation"
    if not tied:
        return f"No layers share their positions{interpolation}."
    groups = {layer.tie_group for layer in tied}
    verb = "shares" if len(groups) == 1 else "share"
    shared = sum(layer.position_params for layer in tied)
    sentence = f"{count_text(len(groups), 'tie group')} {verb} {shared:,} {_coordinates(plan)}"
    sentence += f" in {short_list(dict.fromkeys(layer.stage for layer in tied), STAGES_NAMED)}"
    if len(tied) < len(plan.layers):
        own = len(plan.layers) - len(tied)
        sentence += f" (not shared: {count_text(own, 'layer')})"
    return f"{sentence}{interpolation}."


def _sides_sentence(plan: ConversionPlan) -> str:
    """Say how many windows grow to one side, and whether the whole network looks one way."""
    parts = []
    for side in ("back", "ahead"):
        count = sum(side in layer.grow for layer in plan.layers)
        if count:
            verb = "grows" if count == 1 else "grow"
            parts.append(f"{count_text(count, 'layer')} {verb} {side} only")
    sentence = " and ".join(parts)
    if plan.outputs_look == "back":
        sentence += ": the network is causal"
    elif plan.outputs_look == "ahead":
        sentence += ": the network looks ahead only"
    return f"{sentence}."


def _new_kernels(plan: ConversionPlan, params: ParamsChange) -> str:
    weights = f"{params.weights:,} weights"
    if plan.folded:
        return f"Folded into plain convolutions: {weights}, one for every cell of the windows"
    return f"New kernels: {weights} and {params.positions:,} {_coordinates(plan)}"


def _coordinates(plan: ConversionPlan) -> str:
    if any(find_interpolation(layer.interpolation).has_sigma for layer in plan.layers):
        return "positions and sigmas"
    return "positions"


def _macs_sentence(plan: ConversionPlan, params: ParamsChange, macs: MacsChange) -> str:
    if macs.delta == 0:
        return "MACs stay the same: no window has more cells than the kernel that it replaces."
    reason = "although parameters do not"
    if (params.delta or 0) > 0:
        reason = "with the window"
    sentence = f"MACs rise {reason}: every window cell is multiplied, empty or not."
    if plan.folded:
        return sentence
    return f"{sentence} {FOLDING_SENTENCE}"
