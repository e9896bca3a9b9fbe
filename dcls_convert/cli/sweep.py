"""`dcls-convert sweep`: sizes and counts side by side, and the command of the recommended size."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..atomic_output import check_output, new_file, reason_not_a_file
from ..errors import PlanError
from ..options import (
    AUTO,
    CPU_BATCH,
    GPU_BATCH,
    HOW_MANY_ELEMENTS,
    MAX_ADDED_COST_PERCENT,
    MAX_COUNT,
    MAX_PERCENT,
    MAX_SIDE,
    MIN_PERCENT,
    TIMING_SECONDS,
    command_line,
)
from ..picture_output import check_picture
from ..text import shortened
from . import console
from .network_options import NetworkOptions, changed_options, expand_options, refuse
from .shared_options import Csv, Force, Json
from .typer_options import OUTPUT, SECONDS_PER_DAY, number, number_parser, option, parse_window

if TYPE_CHECKING:
    from ..choosing.results import Combination, SweepRow

TIMES = "Times"
MAX_ROWS = 1000
MAX_BATCH = 65_536


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
TIMED_BATCH = number(
    int,
    1,
    MAX_BATCH,
    TIMES,
    "Images per batch.",
    metavar="N",
    show_default=f"{CPU_BATCH} on the CPU, else {GPU_BATCH}",
)
SECONDS_HELP = "Time for all measurements together; at least three rounds are made."
TIME = number(
    int, 1, SECONDS_PER_DAY, TIMES, SECONDS_HELP, metavar="N", show_default=str(TIMING_SECONDS)
)
SLOWER_HELP = (
    "Cost that the recommended size may add, in percent: of a training step with --time, "
    "otherwise of the MACs."
)
TIME_HELP = "Measure a forward pass and a training step of every row and of the original, in turn."
PICTURE_HELP = "Draw cost and gain; needs matplotlib, the extra plot."


@functools.partial(expand_options, omit=("dilated_size", "kernel_count", "budget"))
def sweep(
    network_options: NetworkOptions,
    sizes: Annotated[Any, SIZES] = None,
    counts: Annotated[Any, COUNTS] = None,
    budgets: Annotated[Any, BUDGETS] = None,
    time: Annotated[bool, option(TIMES, TIME_HELP, "--time")] = False,
    device: Annotated[
        str | None,
        option(TIMES, "Device: cuda, cuda:1.", metavar="NAME", show_default="cpu"),
    ] = None,
    batch_size: Annotated[int | None, TIMED_BATCH] = None,
    amp: Annotated[bool, option(TIMES, "Use bfloat16 autocast.", "--amp")] = False,
    seconds: Annotated[int | None, TIME] = None,
    slower: Annotated[
        float, number(float, 0, MAX_PERCENT, OUTPUT, SLOWER_HELP, unit="%", metavar="PERCENT")
    ] = MAX_ADDED_COST_PERCENT,
    picture: Annotated[
        Path | None, option(OUTPUT, PICTURE_HELP, metavar="FILE.png|svg|pdf")
    ] = None,
    force: Force = False,
    json_: Json = False,
    csv: Csv = False,
) -> None:
    """Compare windows, and counts or budgets: parameters, MACs, times, and errors of outputs.

    One row each; the last line is the command for the recommended size.
    """
    rows = len(sizes or [None]) * len(counts or budgets or [None])
    scoped = network_options.options.scope != AUTO
    needs_time = {
        "--device": device,
        "--batch-size": batch_size,
        "--amp": amp,
        "--seconds": seconds,
    }
    refuse(
        (json_ and csv, "--json and --csv exclude each other"),
        (counts is not None and budgets is not None, "--counts and --budgets exclude each other"),
        (counts and scoped, "--counts states the counts, so --scope would have no effect"),
        (force and picture is None, "--force has no effect without --picture"),
        (rows > MAX_ROWS, f"{rows:,} rows are asked for; {MAX_ROWS:,} are allowed"),
    )
    for name, value in needs_time.items():
        refuse((value and not time, f"{name} is for --time"))
    request = network_options.request()
    if picture is not None:
        check_picture(picture, "--picture")
        check_output(picture, force=force, reason_to_keep=reason_not_a_file)
    with console.steps(network_options.model, "planning") as notify:
        from ..choosing.make_sweep import combinations, default_sizes, make_sweep
        from ..choosing.timing import timing_settings
        from ..conversion.loaded import LoadedNetwork
        from ..depthwise import choices
        from ..views.sweep import SweepView, draw_sweep, sweep_csv

        timing = None
        if time:
            timing = timing_settings(device, batch_size, seconds, amp=amp)
        loaded = LoadedNetwork(request, notify=notify, note=console.note)
        requested = combinations(sizes or default_sizes(loaded), counts, budgets)
        sweep = make_sweep(
            loaded,
            requested,
            functools.partial(_command, network_options),
            timing=timing,
            max_added_percent=slower,
        )
    if json_:
        console.write(sweep.to_json())
    elif csv:
        console.write(sweep_csv(sweep))
    else:
        algorithm_lines = []  # which algorithms depthwise layers were timed with on a GPU
        for algorithm_choice in choices():
            if algorithm_choice.device != "cpu":
                algorithm_lines.append(f" {algorithm_choice}")
        console.show(SweepView(sweep), *algorithm_lines, wide=True)
        if sweep.choice.row is not None:
            console.show("", f"    {sweep.rows[sweep.choice.row].command}")
    if picture is not None:
        with new_file(picture, force=force) as partial:
            partial.write_bytes(draw_sweep(sweep, picture.suffix))
        console.message(f"{network_options.model}: wrote {picture}")
    if sweep.interrupted:
        raise KeyboardInterrupt
    if not any(row.status == "done" for row in sweep.rows):
        reason = _first_reason(sweep.rows)
        raise PlanError(f"no row was finished; the first problem: {reason}")


def _first_reason(rows: Sequence["SweepRow"]) -> str | None:
    """Say why the first failed row failed; if none did, why the first combination does not fit."""
    for row in rows:
        if row.status == "failed":
            return row.reason
    first_combination = rows[1]  # rows[0] is the original
    return first_combination.reason


def _command(network_options: NetworkOptions, combination: "Combination") -> str:
    """Return the command that converts as a row of the sweep does."""
    values = changed_options(network_options)
    values["dilated_size"] = combination.size
    values["kernel_count"] = combination.kernel_count
    if combination.budget is not None:
        values["budget"] = f"{combination.budget:.12g}%"
    values |= changed_options(network_options.options)
    return command_line(network_options.model, values)
