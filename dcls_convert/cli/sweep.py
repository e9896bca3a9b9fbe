"""`dcls-convert sweep`: sizes and counts side by side, and the command of the recommended size."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import PlanError
from ..options import (
    HOW_MANY_ELEMENTS,
    MAX_ADDED_COST_PERCENT,
    MAX_COUNT,
    MAX_PERCENT,
    MAX_SIDE,
    MIN_PERCENT,
    command_line,
)
from ..text import shortened
from . import console
from .network_options import NetworkOptions, changed_options, expand_options, refuse
from .shared_options import Json
from .typer_options import OUTPUT, number, number_parser, option, parse_window

if TYPE_CHECKING:
    from ..choosing.results import Combination

MAX_ROWS = 1000
# Options of `convert` that differ from row to row, or that change no costs.
OMITTED = {
    *("dilated_size", "kernel_count", "budget", "scope"),
    *("calibrate", "images", "mean", "std"),
}


def list_option(
    parse: Callable[[str], Any], expected: str, help: str, *, metavar: str, step: int = 1
) -> Any:
    """Return an option whose value is a list of values that `parse` reads, and of ranges.

    With a step of 2, "7..11,17" becomes [7, 9, 11, 17], and "7..11..4" becomes [7, 11].
    """

    def parse_list(text: str) -> list[Any]:
        values: list[Any] = []
        for part in text.split(","):
            try:
                bounds = [parse(bound) for bound in part.split("..")]
            except typer.BadParameter:
                bounds = []
            if len(bounds) == 1:
                values.append(bounds[0])
            elif len(bounds) in (2, 3) and all(isinstance(bound, int) for bound in bounds):
                values += _numbers_between(part, *bounds, default_step=step)
            else:
                raise typer.BadParameter(f"'{shortened(part)}' is not a list of {expected}")
        return list(dict.fromkeys(values))

    return option(HOW_MANY_ELEMENTS, help, metavar=metavar, parser=parse_list)


def _numbers_between(
    part: str, first: int, last: int, step: int | None = None, *, default_step: int
) -> range:
    """Return the numbers from first to last.

    Raises:
        typer.BadParameter: `part`, the text of the range, runs backwards or has too many values.
    """
    if last < first:
        raise typer.BadParameter(f"'{part}' runs backwards; give {last}..{first}")
    numbers = range(first, last + 1, step or default_step)
    if len(numbers) > MAX_ROWS:
        raise typer.BadParameter(f"'{part}' has {len(numbers):,} values; {MAX_ROWS:,} are allowed")
    return numbers


def _parse_size(text: str) -> int | str | tuple[int, ...]:
    """Parse "17" and "17x17" into 17, "17x9" into (17, 9); a growth such as "+4" stays text."""
    size = parse_window(text)
    if isinstance(size, tuple) and len(set(size)) == 1:
        return size[0]
    return size


SIZES = list_option(
    _parse_size,
    f"sizes from 1 to {MAX_SIDE}: 7..23 (steps of 2), 7..23..4 (steps of 4), 7,9,13, 17x9, "
    "or growths: +2,+4",
    "Windows: 7..23 tries 7, 9, ..., 23 (odd kernels need odd windows); "
    "7..23..4 tries 7, 11, ..., 23; +2,+4 are growths.",
    metavar="A..B|N,N",
    step=2,  # the window and the old kernel must both be odd or both be even
)
COUNTS = list_option(
    number_parser(int, 1, MAX_COUNT),
    f"counts from 1 to {MAX_COUNT}, such as 20,34 or 20..40..5",
    "Elements per kernel: 20,34 or 20..40..5 (default: as many as the budget allows).",
    metavar="N,N",
)
BUDGETS = list_option(
    number_parser(float, MIN_PERCENT, MAX_PERCENT, unit="%"),
    f"percentages from {MIN_PERCENT} to {MAX_PERCENT}, such as 60%,80%,100%",
    "Budgets in percent of the weights replaced: 60%,80%,100%.",
    metavar="P,P",
)
ADDED_MACS = number(
    float,
    0,
    MAX_PERCENT,
    OUTPUT,
    "MACs that the recommended size may add, in percent.",
    unit="%",
    metavar="PERCENT",
)


@functools.partial(expand_options, omit=OMITTED)
def sweep(
    network_options: NetworkOptions,
    sizes: Annotated[Any, SIZES] = None,
    counts: Annotated[Any, COUNTS] = None,
    budgets: Annotated[Any, BUDGETS] = None,
    added_macs: Annotated[float, ADDED_MACS] = MAX_ADDED_COST_PERCENT,
    json_: Json = False,
) -> None:
    """Compare windows, and counts or budgets, by parameters and MACs.

    One row each; the last line is the command for the recommended size.
    """
    rows = len(sizes or [None]) * len(counts or budgets or [None])
    refuse(
        (counts is not None and budgets is not None, "--counts and --budgets exclude each other"),
        (rows > MAX_ROWS, f"{rows:,} rows are asked for; {MAX_ROWS:,} are allowed"),
    )
    request = network_options.request(offline=True)
    with console.steps(network_options.model, "planning") as notify:
        from ..choosing.make_sweep import combinations, default_sizes, make_sweep
        from ..conversion.loaded import LoadedNetwork
        from ..views.sweep import sweep_view

        loaded = LoadedNetwork(request, notify=notify, note=console.note)
        requested = combinations(sizes or default_sizes(loaded), counts, budgets)
        command = functools.partial(_command, network_options)
        sweep = make_sweep(loaded, requested, command, max_added_percent=added_macs)
    if json_:
        console.write(sweep.to_json())
    else:
        console.show(sweep_view(sweep), wide=True)
        if sweep.choice.command is not None:
            console.show("", f"    {sweep.choice.command}")
    if all(row.reason is not None for row in sweep.rows[1:]):
        raise PlanError(f"no size fits; the first problem: {sweep.rows[1].reason}")


def _command(network_options: NetworkOptions, combination: "Combination") -> str:
    """Return the command that converts as a row of the sweep does."""
    values = changed_options(network_options)
    values["dilated_size"] = combination.size
    values["kernel_count"] = combination.kernel_count
    if combination.budget is not None:
        values["budget"] = f"{combination.budget:.12g}%"
    values |= changed_options(network_options.options)
    return command_line(network_options.model, values)
