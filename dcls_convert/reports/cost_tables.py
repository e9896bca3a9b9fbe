"""Tables of parameters and MACs before and after, of layers, stages and the whole model."""

from collections.abc import Iterable, Sequence

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
# Texts for the first columns, the layers of a row, and their parameters as text.
Row = tuple[list[str], Layers, str]


def stage_table(layers: Layers) -> Table:
    """Return a table with the costs of each stage, in the order of the layers."""
    layers_of: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        layers_of.setdefault(layer.stage or "(no stage)", []).append(layer)
    rows: list[Row] = []
    for stage, members in layers_of.items():
        rows.append(([stage, str(len(members))], members, before_after(params_of(members))))
    return _table([Column("Stage"), Column("Layers")], rows)


def layer_table(layers: Layers) -> Table:
    """Return a table with the costs of each layer.

    A star marks parameters that include positions which other layers share.
    """
    rows: list[Row] = []
    for layer in layers:
        is_shared = layer.tie_group is not None and layer.position_params > 0
        params = before_after(params_of([layer]))
        rows.append(([layer.name], [layer], f"{params}*" if is_shared else f"{params} "))
    return _table([Column("Layer")], rows)


def _table(first_columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    """Return a table with the kernels and costs of the layers of each row."""
    all_layers: list[LayerPlan] = []
    all_macs: list[int | None] = []
    for _, layers, _ in rows:
        all_layers += layers
        all_macs += [macs_of(layers).before, macs_of(layers).after]
    write_macs, unit = in_one_unit(all_macs)
    error_field = shown_error(all_layers)
    columns = [
        *first_columns,
        Column("Kernel", left=True, words=True),
        Column("Count"),
        Column("Parameters"),
        Column(f"MACs{unit}"),
        Column("Error"),
    ]
    table = Table(columns)
    for texts, layers, params in rows:
        kernels = range_text((layer.kernel_size for layer in layers), size_text)
        table.add(
            *texts,
            f"{kernels} → {windows_text(layers)}",
            range_text(layer.kernel_count for layer in layers),
            params,
            before_after(macs_of(layers), write_macs),
            _mean_of_known(getattr(layer, error_field) for layer in layers),
        )
    return table


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
    params: ParamsChange, macs: MacsChange, replaced: Change, params_untouched: int
) -> Table:
    """Return a table with the parameters and MACs of the whole model.

    `replaced` are the parameters of the layers, `params_untouched` those outside of them.
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
    add("  replaced layers", replaced, "dim")
    add("  everything else", unchanged, "dim")
    add("MACs", macs, "bold", percent(macs))
    return table
