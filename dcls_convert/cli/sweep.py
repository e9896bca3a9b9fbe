"""`dcls-convert sweep`: sizes and counts side by side, and the command of the row to take."""

import functools
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import PlanError, shown
from ..files import check_picture
from ..options import MOST_COUNT, MOST_SIDE, SCOPES, PlanOptions
from ..planning.budget import LEAST_PERCENT, MOST_PERCENT
from . import console
from .arguments import (
    HOW_MANY,
    OUTPUT,
    Force,
    Images,
    InChans,
    InputSize,
    Json,
    Model,
    NumClasses,
    Pretrained,
    WeightsFile,
    check_network,
    number,
    option,
    parse_size,
    refuse,
    with_plan_options,
)

if TYPE_CHECKING:
    import torch

    from ..compare.sweep import Asked, TimingSettings

TIMES = "Times"
SWEPT = ("dilated_size", "kernel_count", "budget")
SIZE_STEP, COUNT_STEP = 2, 1  # in a..b; the window and the old kernel must both be odd or both be even
MOST_ROWS = 1000
MOST_SECONDS, MOST_BATCH = 86_400, 65_536
CPU_BATCH, GPU_BATCH = 1, 32
SECONDS = 60
SLOWER = 12  # percent; 17x17 windows in ConvNeXt-T, as in the paper, cost 11.6 % more MACs
WIDTH_IN_A_FILE = 160  # columns


def parse_range(text: str, step: int, most: int, what: str) -> list[int]:
    """ "7..11" -> [7, 9, 11] for a step of 2; "7..11..4" -> [7, 11]."""
    numbers = (
        [int(number) for number in text.split("..")] if re.fullmatch(r"[0-9]{1,10}(\.\.[0-9]{1,10}){1,2}", text) else []
    )
    first, last, step = (*numbers, step)[:3] if numbers else (0, 0, 0)
    if not 1 <= first <= most or not 1 <= last <= most or not step:
        raise typer.BadParameter(f"'{shown(text)}' is not {what}")
    if last < first:
        raise typer.BadParameter(f"'{text}' runs backwards; give {last}..{first}")
    if (last - first) // step >= MOST_ROWS:
        raise typer.BadParameter(f"'{text}' has {(last - first) // step + 1:,} values; {MOST_ROWS:,} are allowed")
    return list(range(first, last + 1, step))


def parse_sizes(text: str) -> list[Any]:
    """ "7..11,17x9" -> [7, 9, 11, (17, 9)]."""
    what = f"a list of sizes from 1 to {MOST_SIDE}: 7..23 (each second), 7..23..4 (each fourth), 7,9,13, or 17x9"
    sizes: list[Any] = []
    for part in text.split(","):
        if ".." in part:
            sizes += parse_range(part, SIZE_STEP, MOST_SIDE, what)
            continue
        try:
            size = parse_size(part)
        except typer.BadParameter:
            raise typer.BadParameter(f"'{shown(part)}' is not {what}") from None
        sizes.append(size[0] if isinstance(size, tuple) and len(set(size)) == 1 else size)
    return list(dict.fromkeys(sizes))


def parse_counts(text: str) -> list[int]:
    """ "20,34" -> [20, 34]."""
    what = f"a list of counts from 1 to {MOST_COUNT}, such as 20,34 or 20..40..5"
    parts = [part if ".." in part else f"{part}..{part}" for part in text.split(",")]
    counts = [parse_range(part, COUNT_STEP, MOST_COUNT, what) for part in parts]
    return list(dict.fromkeys(count for part in counts for count in part))


def parse_budgets(text: str) -> list[float]:
    """ "60%,100" -> [60.0, 100.0]."""
    budgets = []
    for part in text.split(","):
        digits = part.removesuffix("%")
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", digits) or not LEAST_PERCENT <= float(digits) <= MOST_PERCENT:
            allowed = f"percentages from {LEAST_PERCENT} to {MOST_PERCENT}, such as 60%,80%,100%"
            raise typer.BadParameter(f"'{shown(part)}' is not a list of {allowed}")
        budgets.append(float(digits))
    return list(dict.fromkeys(budgets))


SIZES_HELP = "Windows: 7..23 is each second size (sizes are odd or even as the old kernels), 7..23..4 each fourth."
COUNTS_HELP = "Elements in a kernel: 20,34 or 20..40..5. Without it, as many as the budget admits."
BUDGETS_HELP = "Budgets in percent of the weights replaced: 60%,80%,100%."
SLOWER_HELP = "Cost that the row to take may add, in percent: to the training step with --time, else to the MACs."
TIME_HELP = "Measure a forward pass and a training step of every row and of the original, which take turns."
BATCH_DEFAULT = f"{CPU_BATCH} on the CPU, else {GPU_BATCH}"
SECONDS_HELP = "For all measurements together; three rounds at least."
PICTURE_HELP = "Draw cost and gain; needs matplotlib, the extra plot."


@functools.partial(with_plan_options, but=SWEPT)
def sweep(
    model: Model,
    *,
    sizes: Annotated[Any, option(HOW_MANY, SIZES_HELP, metavar="A..B|N,N", parser=parse_sizes)],
    pretrained: Pretrained = False,
    checkpoint: WeightsFile = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    counts: Annotated[Any, option(HOW_MANY, COUNTS_HELP, metavar="N,N", parser=parse_counts)] = None,
    budgets: Annotated[Any, option(HOW_MANY, BUDGETS_HELP, metavar="P,P", parser=parse_budgets)] = None,
    options: PlanOptions,
    calibrate: Images = None,
    time: Annotated[bool, option(TIMES, TIME_HELP, "--time")] = False,
    device: Annotated[str | None, option(TIMES, "As torch names it: cuda, cuda:1.", show_default="cpu")] = None,
    batch_size: Annotated[
        int | None, number(int, 1, MOST_BATCH, TIMES, "Images.", metavar="N", show_default=BATCH_DEFAULT)
    ] = None,
    amp: Annotated[bool, option(TIMES, "In bfloat16 autocast.", "--amp")] = False,
    seconds: Annotated[
        int | None, number(int, 1, MOST_SECONDS, TIMES, SECONDS_HELP, metavar="N", show_default=str(SECONDS))
    ] = None,
    input_size: InputSize = None,
    slower: Annotated[float, number(float, 0, MOST_PERCENT, OUTPUT, SLOWER_HELP, unit="%", metavar="PERCENT")] = SLOWER,
    picture: Annotated[Path | None, option(OUTPUT, PICTURE_HELP, metavar="FILE.png|svg|pdf")] = None,
    force: Force = False,
    json_: Json = False,
    csv: Annotated[bool, option(OUTPUT, "Print CSV.", "--csv")] = False,
) -> None:
    """Compare windows, and counts or budgets: parameters, MACs, times, and what trained kernels and outputs keep.

    A row each; the last line is the command of the row to take.
    """
    trained = pretrained or checkpoint is not None
    number_of_rows = len(sizes) * len(counts or budgets or [None])
    idle = {"--device": device, "--batch-size": batch_size, "--amp": amp, "--seconds": seconds}
    refuse(
        {
            "--json and --csv exclude each other": json_ and csv,
            "--counts and --budgets exclude each other": counts is not None and budgets is not None,
            "--counts states the counts, so --scope would have no effect": counts and options.scope != SCOPES[0],
            "--calibrate needs trained kernels: --pretrained or --checkpoint": calibrate is not None and not trained,
            "--force replaces the file of --picture": force and picture is None,
            f"{number_of_rows:,} rows are asked for; {MOST_ROWS:,} are allowed": number_of_rows > MOST_ROWS,
            **{f"{name} is for --time": bool(value) and not time for name, value in idle.items()},
        }
    )
    check_network(options, pretrained=pretrained, checkpoint=checkpoint, images=calibrate)
    if picture is not None:
        check_picture(picture, "--picture")
        from ..output import check_output, not_a_file

        check_output(picture, force=force, foreign=not_a_file)
    stated = {
        "pretrained": pretrained,
        "checkpoint": checkpoint,
        "num-classes": num_classes,
        "in-chans": in_chans,
        "calibrate": calibrate,
        "input-size": input_size and "x".join(map(str, input_size)),
    }
    with console.steps(model, quiet=False) as notify:
        notify("planning")  # which begins with imports of some seconds
        from ..compare.candidates import combinations, make_sweep
        from ..depthwise import choices
        from ..networks.source import resolve_model
        from ..pipeline import Job
        from ..records import write_json
        from ..views.sweep import SweepView, sweep_csv

        timing = _timing(device, batch_size, seconds or SECONDS, amp=amp) if time else None
        job = Job(
            source=resolve_model(model, num_classes=num_classes, in_chans=in_chans, pretrained=pretrained),
            pretrained=pretrained,
            weights=checkpoint,
            options=options,
            input_size=input_size,
            calibration=calibrate,
            notify=notify,
            note=console.note,
        )
        command = functools.partial(_command, model, options, stated)
        sweep = make_sweep(job, combinations(sizes, counts, budgets), command, timing=timing, slower=slower)
    if json_ or csv:
        console.write(write_json(sweep.to_dict()) if json_ else sweep_csv(sweep))
    else:
        taken = [] if sweep.choice.row is None else ["", f"    {sweep.rows[sweep.choice.row].command}"]
        console.show(SweepView(sweep), *[f" {choice}" for choice in choices()], least_width=WIDTH_IN_A_FILE)
        console.show(*taken)
    if picture is not None:
        from ..output import new_file
        from ..views.sweep_plot import draw_sweep

        with new_file(picture, force=force) as partial:
            partial.write_bytes(draw_sweep(sweep, picture.suffix))
        console.message(f"{model}: wrote {picture}")
    if sweep.interrupted:
        raise KeyboardInterrupt
    if not any(row.status == "done" for row in sweep.rows):
        raise PlanError(f"no row is done; of the first: {sweep.rows[1].reason}")


def _timing(
    device: str | None, batch: int | None, seconds: int, *, amp: bool
) -> tuple["TimingSettings", "torch.device"]:
    import torch

    from ..compare.sweep import TimingSettings
    from ..compare.timing import check_device, device_name

    place = check_device(device or "cpu")
    on_cpu = place.type == "cpu"
    settings = TimingSettings(
        device=device_name(place),
        batch=batch or (CPU_BATCH if on_cpu else GPU_BATCH),
        seconds=seconds,
        amp=amp,
        threads=torch.get_num_threads() if on_cpu else None,
        torch=torch.__version__,
    )
    return settings, place


def _command(model: str, options: PlanOptions, stated: dict[str, object], asked: "Asked") -> str:
    """The command that converts as a row."""
    planning = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.name not in SWEPT and getattr(options, field.name) != field.default
    }
    if "rules" in planning:
        planning["rules"] = planning["rules"].source
    size = asked.size if isinstance(asked.size, int) else "x".join(map(str, asked.size))
    budget = None if asked.budget is None else f"{asked.budget:.12g}%"
    words = ["dcls-convert", model]
    swept = {"dilated-size": size, "kernel-count": asked.kernel_count, "budget": budget}
    for name, value in (stated | swept | planning).items():
        if value is not None and value is not False:
            words += [f"--{name}"] + [str(value)] * (value is not True)
    return shlex.join(words)
