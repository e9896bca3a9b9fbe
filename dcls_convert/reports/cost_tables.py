"""Tables of parameters and MACs before and after: by layer, by stage, and in total."""

from collections.abc import Iterable, Sequence

from ..geometry import size_text
from ..planning.layer_plan import LayerPlan
from ..tables import Table
from ..text import range_text
from .costs import (
    Change,
    before_after,
    in_one_unit,
    macs_of,
    params_of,
    percent,
    with_separators,
)


def cost_table(layers: Sequence[LayerPlan], *, by_stage: bool) -> Table:
    """Return a table with the kernels and costs of each stage, or of each layer.

    A star marks a layer's parameters if they include positions that other layers share.
    """
    rows: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        name = layer.stage or "(no stage)" if by_stage else layer.name
        rows.setdefault(name, []).append(layer)
    all_macs: list[int | None] = []
    for members in rows.values():
        macs = macs_of(members)
        all_macs += [macs.before, macs.after]
    write_macs, unit = in_one_unit(all_macs)
    table = Table(
        "Stage" if by_stage else "Layer",
        "Layers",
        "Kernel",
        "Count",
        "Parameters",
        f"MACs{unit}",
        "Error",
        words="Kernel",
    )
    error_field = shown_error(layers)
    for name, members in rows.items():
        kernels = range_text((layer.kernel_size for layer in members), size_text)
        params = before_after(params_of(members))
        if not by_stage:
            params += "*" if has_shared_positions(members[0]) else " "
        table.add(
            name,
            str(len(members)) if by_stage else None,
            f"{kernels} → {windows_text(members)}",
            range_text(layer.kernel_count for layer in members),
            params,
            before_after(macs_of(members), write_macs),
            _mean_of_known(getattr(layer, error_field) for layer in members),
        )
    return table


def has_shared_positions(layer: LayerPlan) -> bool:
    """True if the layer's parameters include positions that other layers share."""
    return layer.tie_group is not None and layer.position_params > 0


def windows_text(layers: Sequence[LayerPlan]) -> str:
    """Return the layers' windows: "17x17", or "9x9..17x17"."""
    return range_text((layer.dilated_size for layer in layers), size_text)


def shown_error(layers: Sequence[LayerPlan]) -> str:
    """Return the name of the field with the error to show.

    After a calibration, show the error of the outputs, because outputs were fitted and not kernels.
    """
    if any(layer.output_error is not None for layer in layers):
        return "output_error"
    return "fit_error"


def _mean_of_known(errors: Iterable[float | None]) -> str:
    """Return the mean of the known errors; empty if none is known."""
    known = [error for error in errors if error is not None]
    if not known:
        return ""
    return f"{sum(known) / len(known):.3f}"


def model_table(params: Change, macs: Change, replaced: Change, params_untouched: int) -> Table:
    """Return a table with the parameters and MACs of the whole model.

    `replaced` counts the parameters of the layers, `params_untouched` all other parameters.
    """
    table = Table("Whole model", "Before", "After", "Change", "")

    def add(name: str, change: Change, style: str, in_percent: str = "") -> None:
        table.add(
            name,
            with_separators(change.before),
            with_separators(change.after),
            with_separators(change.delta, "+"),
            in_percent,
            style=style,
        )

    unchanged = Change(before=params_untouched, after=params_untouched)
    add("Parameters", params, "bold", percent(params))
    add("  replaced layers", replaced, "dim")
    add("  everything else", unchanged, "dim")
    add("MACs", macs, "bold", percent(macs))
    return table
