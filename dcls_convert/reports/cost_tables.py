"""Tables of parameters and MACs before and after, of layers, stages and the whole model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..geometry import size_text
from ..tables import Column, Table
from ..text import range_text
from .costs import Change, LayerReport, MacsChange, ParamsChange
from .number_text import before_after, in_one_unit, percent, with_separators


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTotals:
    """Totals of one or more replaced layers, such as those of a stage or of the whole model."""

    layers: tuple[LayerReport, ...]
    name: str = ""

    @property
    def kernels(self) -> str:
        """ "7x7 → 17x17"."""
        return f"{range_text(self._each('kernel_size'), size_text)} → {self.windows}"

    @property
    def windows(self) -> str:
        """ "17x17", or "9x9..17x17"."""
        return range_text(self._each("dilated_size"), size_text)

    @property
    def counts(self) -> str:
        """ "34", or "29..40"."""
        return range_text(self._each("kernel_count"))

    @property
    def params(self) -> Change:
        """Parameters with biases and positions.

        Shared positions count in the first layer that uses them.
        """
        return _change_of_sums(self._each("params_before"), self._each("params_after"))

    @property
    def macs(self) -> Change:
        """MACs for one image; unknown if the model could not be traced."""
        return _change_of_sums(self._each("macs_before"), self._each("macs_after"))

    @property
    def kernel_error(self) -> float | None:
        """The mean relative error of the kernels; None if no trained kernels were fitted."""
        return _mean_of_known(self._each("fit_error"))

    @property
    def output_error(self) -> float | None:
        """The mean relative error of the layers' outputs; None without a calibration."""
        return _mean_of_known(self._each("output_error"))

    def _each(self, field: str) -> list[Any]:
        """Return the value of a field in each layer."""
        return [getattr(layer, field) for layer in self.layers]


def _mean_of_known(errors: Sequence[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    if not known:
        return None
    return sum(known) / len(known)


def _change_of_sums(before: Sequence[int | None], after: Sequence[int | None]) -> Change:
    """Return the sums before and after; unknown if any of the numbers is unknown."""
    sum_before = 0
    sum_after = 0
    for count_before, count_after in zip(before, after, strict=True):
        if count_before is None or count_after is None:
            return Change()
        sum_before += count_before
        sum_after += count_after
    return Change(before=sum_before, after=sum_after)


def stage_rows(layers: Iterable[LayerReport]) -> list[LayerTotals]:
    """Return a row for each stage, in the order of the layers."""
    stages: dict[str, list[LayerReport]] = {}
    for layer in layers:
        stages.setdefault(layer.stage or "(no stage)", []).append(layer)
    rows = []
    for name, members in stages.items():
        rows.append(LayerTotals(name=name, layers=tuple(members)))
    return rows


STAGE_COLUMNS: list[Column[LayerTotals]] = [
    Column("Stage", lambda row: row.name),
    Column("Layers", lambda row: len(row.layers)),
    Column("Kernel", lambda row: row.kernels, left=True),
    Column("Count", lambda row: row.counts),
]


def stage_table(layers: Iterable[LayerReport]) -> Table[LayerTotals]:
    """Return a table with the costs of each stage."""
    return _costs_table(STAGE_COLUMNS, stage_rows(layers), lambda row: before_after(row.params))


def layer_table(layers: Iterable[LayerReport]) -> Table[LayerTotals]:
    """Return a table with the costs of each layer."""
    rows = [LayerTotals(name=layer.name, layers=(layer,)) for layer in layers]
    name_column: Column[LayerTotals] = Column("Layer", lambda row: row.name)
    columns = [name_column, *STAGE_COLUMNS[2:]]  # without the stages' names and layer counts
    return _costs_table(columns, rows, _layer_params)


def _layer_params(row: LayerTotals) -> str:
    """Return a layer's parameters, with a star if they include its tie group's positions."""
    (layer,) = row.layers
    params = before_after(row.params)
    if layer.tie_group is not None and layer.position_params > 0:
        return f"{params}*"
    return f"{params} "


def _costs_table(
    columns: Sequence[Column[LayerTotals]],
    rows: Sequence[LayerTotals],
    write_params: Callable[[LayerTotals], str],
) -> Table[LayerTotals]:
    """Return a table of these columns, followed by parameters, MACs and errors.

    `write_params` returns the text of a row's parameters.
    """
    macs: list[int | None] = []
    for row in rows:
        macs += [row.macs.before, row.macs.after]
    write_macs, unit = in_one_unit(macs)
    costs: list[Column[LayerTotals]] = [
        Column("Parameters", write_params),
        Column(f"MACs{unit}", lambda row: before_after(row.macs, write_macs)),
        _error_column(rows),
    ]
    return Table([*columns, *costs], rows)


def _error_column(rows: Sequence[LayerTotals]) -> Column[LayerTotals]:
    """Return a column of output errors if there are any, otherwise of kernel errors.

    There are output errors after a calibration, which fits the outputs and not the kernels.
    """
    if any(row.output_error is not None for row in rows):
        return Column("Error", lambda row: row.output_error, "{:.3f}".format)
    return Column("Error", lambda row: row.kernel_error, "{:.3f}".format)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """A row of the whole model's table."""

    name: str
    change: Change
    is_part: bool = False  # part of the row above; shown dim, and without a percentage


def model_table(
    params: ParamsChange, macs: MacsChange, layers: tuple[LayerReport, ...], untouched: int
) -> Table[ModelCost]:
    """Return a table with the parameters and MACs of the whole model.

    `untouched` is the number of parameters outside of the layers.
    """
    replaced = LayerTotals(layers=layers).params
    unchanged = Change(before=untouched, after=untouched)
    rows = [
        ModelCost(name="Parameters", change=params),
        ModelCost(name="  replaced layers", change=replaced, is_part=True),
        ModelCost(name="  everything else", change=unchanged, is_part=True),
        ModelCost(name="MACs", change=macs),
    ]

    def change_in_percent(row: ModelCost) -> str | None:
        if row.is_part:
            return None
        return percent(row.change)

    def style(row: ModelCost) -> str:
        return "dim" if row.is_part else "bold"

    columns: list[Column[ModelCost]] = [
        Column("Whole model", lambda row: row.name),
        Column("Before", lambda row: with_separators(row.change.before)),
        Column("After", lambda row: with_separators(row.change.after)),
        Column("Change", lambda row: with_separators(row.change.delta, "+")),
        Column("", change_in_percent),
    ]
    return Table(columns, rows, style=style)
