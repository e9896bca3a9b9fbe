"""Tables of parameters and MACs before and after, of layers, stages and the whole model."""

from collections.abc import Callable, Iterable, Sequence

from ..geometry import size_text
from ..planning.layer_plan import LayerPlan
from ..tables import Column, Table
from ..text import range_text
from .costs import (
    Change,
    MacsChange,
    ParamsChange,
    before_after,
    in_one_unit,
    macs_of,
    params_of,
    percent,
    with_separators,
)

Layers = Sequence[LayerPlan]


def stage_table(layers: Layers) -> Table:
    """Return a table with the costs of each stage, in the order of the layers."""
    layers_of: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        layers_of.setdefault(layer.stage or "(no stage)", []).append(layer)
    columns, costs = _costs(list(layers_of.values()))
    table = Table([Column("Stage"), Column("Layers"), *columns])
    for stage, members in layers_of.items():
        table.add(stage, str(len(members)), *costs(members, before_after(params_of(members))))
    return table


def layer_table(layers: Layers) -> Table:
    """Return a table with the costs of each layer.

    A star marks parameters that include positions which other layers share.
    """
    columns, costs = _costs([[layer] for layer in layers])
    table = Table([Column("Layer"), *columns])
    for layer in layers:
        is_shared = layer.tie_group is not None and layer.position_params > 0
        params = before_after(params_of([layer]))
        table.add(layer.name, *costs([layer], f"{params}*" if is_shared else f"{params} "))
    return table


def _costs(rows: Sequence[Layers]) -> tuple[list[Column], Callable[[Layers, str], list[str]]]:
    """Return the columns of costs, and a function that writes them for the layers of a row.

    The function also takes the row's parameters as text.
    """
    macs: list[int | None] = []
    layers: list[LayerPlan] = []
    for row in rows:
        macs += [macs_of(row).before, macs_of(row).after]
        layers += row
    write_macs, unit = in_one_unit(macs)
    error_field = shown_error(layers)
    columns = [
        Column("Kernel", left=True),
        Column("Count"),
        Column("Parameters"),
        Column(f"MACs{unit}"),
        Column("Error"),
    ]

    def costs(row: Layers, params: str) -> list[str]:
        kernels = range_text((layer.kernel_size for layer in row), size_text)
        return [
            f"{kernels} → {windows_text(row)}",
            range_text(layer.kernel_count for layer in row),
            params,
            before_after(macs_of(row), write_macs),
            _mean_of_known(getattr(layer, error_field) for layer in row),
        ]

    return columns, costs


def windows_text(layers: Layers) -> str:
    """Return the layers' windows: "17x17", or "9x9..17x17"."""
    return range_text((layer.dilated_size for layer in layers), size_text)


def shown_error(layers: Layers) -> str:
    """Return the field with the error to show: after a calibration, that of the outputs.

    A calibration fits the outputs and not the kernels.
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


def model_table(
    params: ParamsChange, macs: MacsChange, layers: Layers, params_untouched: int
) -> Table:
    """Return a table with the parameters and MACs of the whole model.

    `params_untouched` is the number of parameters outside of the layers.
    """
    table = Table(
        [Column("Whole model"), Column("Before"), Column("After"), Column("Change"), Column("")]
    )

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
    add("  replaced layers", params_of(layers), "dim")
    add("  everything else", unchanged, "dim")
    add("MACs", macs, "bold", percent(macs))
    return table
