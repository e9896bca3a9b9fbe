"""`dcls-convert MODEL`: plan, convert, report, and write a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..files import PLOT_LIBRARY, can_plot, check_folder
from ..options import AUTO, ERROR, EXACT, AuthorsVersion, Init, PlanOptions, Positions
from ..output import check_output
from ..progress import silent
from . import console
from .arguments import (
    MOST_SEED,
    OUTPUT,
    WHAT,
    WHERE,
    Force,
    Json,
    Network,
    Quiet,
    number,
    option,
    refuse,
    with_records,
)
from .completion import complete_files

if TYPE_CHECKING:
    from ..pipeline.conversion import Conversion, Job
    from ..planning.plan import ConversionPlan

PLAN_HELP = "Carry out the plan of a checkpoint, on other weights of the same model."
INIT_HELP = (
    "random; fit: closest to the old kernels; largest: at their largest cells; "
    "exact: at all cells, for the same outputs at more parameters; "
    "auto: fit for trained weights, else random."
)
POSITIONS_HELP = (
    "Random positions: normal, N(0, 0.5 cells); kernel and uniform, "
    "spread over the old kernel or the window."
)
HTML_HELP = (
    "Add a page of pictures to the checkpoint, and positions to its model card (extra plot)."
)
VERSION = option(
    WHERE,
    "Version of the authors' layers in a checkpoint of theirs without SIG.",
    show_default="v0, as released",
)
CHECKPOINT = option(
    OUTPUT,
    "Checkpoint to write.",
    "--output",
    "-o",
    metavar="FOLDER",
    show_default="./MODEL-dclsSIZE[-INIT]",
)
DEVICE = option(
    WHERE, "Fit and compare on this device, such as cuda.", metavar="NAME", show_default="cpu"
)
VERBOSE = option(
    OUTPUT, "Report every layer and why; -vv: name all others.", "--verbose", "-v", count=True
)


@with_records
def convert(
    network: Network,
    plan: Annotated[
        Path | None, option(WHAT, PLAN_HELP, metavar="FOLDER", autocompletion=complete_files)
    ] = None,
    init: Annotated[Init, option(WHERE, INIT_HELP)] = "auto",
    positions: Annotated[Positions, option(WHERE, POSITIONS_HELP)] = "normal",
    authors_version: Annotated[AuthorsVersion | None, VERSION] = None,
    device: Annotated[str | None, DEVICE] = None,
    seed: Annotated[
        int, number(int, 0, MOST_SEED, WHERE, "Seed of all random values.", metavar="N")
    ] = 0,
    output: Annotated[Path | None, CHECKPOINT] = None,
    html: Annotated[bool, option(OUTPUT, HTML_HELP, "--html")] = False,
    force: Force = False,
    dry_run: Annotated[
        bool, option(OUTPUT, "Report only: no weights, no download.", "--dry-run")
    ] = False,
    json_: Json = False,
    verbose: Annotated[int, VERBOSE] = 0,
    quiet: Quiet = False,
) -> None:
    """Replace a model's convolutions, report, and write a checkpoint."""
    trained = network.trained
    calibrated = network.calibrate is not None
    by_error = network.options.scope == ERROR
    planned = network.options != PlanOptions() or network.input_size is not None
    may_fit = init in (AUTO, "fit")
    keeps_kernels = init != "random" and (trained or init == EXACT)
    needs_a_run = {
        "--force": force,
        "--output": output,
        "--html": html,
        "--calibrate": calibrated,
    }
    for name, value in needs_a_run.items():
        refuse((dry_run and value, f"{name} has no effect with --dry-run"))
    refuse(
        (
            dry_run and by_error,
            "--scope error measures what kernels lose; --dry-run reads none",
        ),
        (quiet and verbose > 0, "--quiet and --verbose exclude each other"),
        (
            json_ and verbose > 0,
            "--json and --verbose exclude each other; the JSON has every layer",
        ),
        (quiet and dry_run and not json_, "--quiet with --dry-run would print nothing"),
        (
            init in ("largest", "fit") and not trained,
            f"--init {init} needs trained kernels: --pretrained or --checkpoint",
        ),
        (
            calibrated and not (trained and may_fit),
            "--calibrate is for --init fit, with --pretrained or --checkpoint",
        ),
        (
            positions != "normal" and keeps_kernels,
            "--positions is for random positions, --init auto or exact keeps those of old kernels; "
            "use --init random",
        ),
        (
            authors_version and network.checkpoint is None,
            "--authors-version describes the file of --checkpoint",
        ),
        (
            plan is not None and planned,
            "--plan carries out a plan as it is: omit the options that make one",
        ),
        (by_error and not may_fit, "--scope error is for --init fit"),
    )
    network.check()
    if output is not None:
        check_output(output, force=force, foreign=_not_of_a_checkpoint)
    if plan is not None:
        check_folder(plan)
    with console.steps(network.model, "planning", quiet=quiet) as notify:
        from ..checkpoints.folder import read_plan
        from ..compare.timing import check_device
        from ..reports.report import predict_report
        from ..views.report import next_steps, report_view

        job = network.job(
            init=init,
            positions=positions,
            authors_version=authors_version,
            device=None if device is None else str(check_device(device)),
            seed=seed,
            offline=dry_run,
            notify=notify,
            note=silent if quiet else console.note,
        )
        measures_first = calibrated or by_error
        if output is None and plan is None and not dry_run and measures_first:
            # Only to know the default folder before minutes of measuring.
            plan_for_name = job.plan(replace(network.options, scope="model"))
            default_output = _default_output(job, plan_for_name)
            check_output(default_output, force=force, foreign=_not_of_a_checkpoint)
        conversion_plan = job.plan() if plan is None else job.plan_again(read_plan(plan))
        report = predict_report(conversion_plan)
        steps = []
        if not dry_run:
            output = output or _default_output(job, conversion_plan)
            done = _carry_out(job, conversion_plan, output, force=force, html=html)
            report = replace(done.report, output=str(output))
            steps = next_steps(job, done, output)
    if json_:
        console.write(report.to_json())
    elif quiet:
        console.show(str(output))
    else:
        console.show(report_view(replace(report, outcome=None), verbose=verbose), *steps)


def _not_of_a_checkpoint(path: Path) -> str | None:
    # Imports torch, so it is imported only if the output exists already.
    from ..checkpoints.folder import not_of_a_checkpoint

    return not_of_a_checkpoint(path)


def _carry_out(
    job: "Job", plan: "ConversionPlan", output: Path, *, force: bool, html: bool
) -> "Conversion":
    """Convert, and write the checkpoint."""
    from ..checkpoints.save import save_converted
    from ..views.plot import picture_files

    check_output(output, force=force, foreign=_not_of_a_checkpoint)
    done = job.convert(plan)
    job.notify(f"writing {output}")
    if html and not can_plot():
        job.note(
            f"{PLOT_LIBRARY} is missing, so the model card has no picture: "
            f"pip install {PLOT_LIBRARY}"
        )
    pictures = picture_files(done.model, plan, output) if html else None
    # The job may have loaded the weights into its meta model; then it is none any more.
    meta = None if job.meta is done.model else job.meta
    save_converted(
        done.model.eval().cpu(),
        plan,
        output,
        report=done.report,
        force=force,
        pictures=pictures,
        meta=meta,
    )
    return done


def _default_output(job: "Job", plan: "ConversionPlan") -> Path:
    """The default folder: the model's name with the window's size and the initialisation.

    convnext_tiny-dcls17 or -dcls17x9; -dcls if the plan has several sizes; -dcls17-fit if
    elements are not random.
    """
    sizes = {layer.dilated_size for layer in plan.layers if not layer.dense_axes}
    if not sizes:
        sizes = {plan.layers[0].dilated_size}
    size = _short_size(*sizes) if len(sizes) == 1 else ""
    init = ""
    if job.how != "random" and job.elements is None:
        init = f"-{job.how}"
    assert job.source is not None
    _, _, name = job.source.name.rpartition(":")
    return Path(f"{Path(name).name}-dcls{size}{init}")


def _short_size(size: tuple[int, ...]) -> str:
    """ "17" for (17, 17), "17x9" for (17, 9)."""
    from ..depthwise.geometry import size_text

    if len(set(size)) == 1:
        return str(size[0])
    return size_text(size)
