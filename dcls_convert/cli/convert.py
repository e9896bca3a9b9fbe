"""`dcls-convert MODEL`: plan, convert, report, and write a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..files import PLOT_LIBRARY, can_plot, check_folder, check_working_folder
from ..options import AUTO, ERROR, EXACT, AuthorsVersion, Init, PlanOptions, Positions
from . import console
from .arguments import (
    MOST_SEED,
    OUTPUT,
    WHAT,
    WHERE,
    Force,
    Images,
    InChans,
    InputSize,
    Json,
    Model,
    NumClasses,
    Pretrained,
    Quiet,
    WeightsFile,
    check_network,
    number,
    option,
    refuse,
    with_plan_options,
)
from .completion import complete_checkpoints

if TYPE_CHECKING:
    from ..pipeline import Job
    from ..planning.plan import ConversionPlan

PLAN_HELP = "Carry out the plan of a checkpoint, on other weights of the same model."
INIT_HELP = (
    "random; fit: closest to the old kernels; largest: at their largest cells; exact: at all cells, for the same "
    "outputs at more parameters; auto: fit for trained weights, else random."
)
HTML_HELP = "Add a page of pictures to the checkpoint, and positions to its model card (extra plot)."
VERSION_HELP = "Version of the authors' layers in a checkpoint of theirs without SIG."


@with_plan_options
def convert(
    model: Model,
    *,
    pretrained: Pretrained = False,
    checkpoint: WeightsFile = None,
    plan: Annotated[Path | None, option(WHAT, PLAN_HELP, metavar="FOLDER", autocompletion=complete_checkpoints)] = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    options: PlanOptions,
    init: Annotated[Init, option(WHERE, INIT_HELP)] = "auto",
    calibrate: Images = None,
    positions: Annotated[Positions, option(WHERE, "Random positions: N(0, 0.5 cells), or uniform.")] = "normal",
    authors_version: Annotated[
        AuthorsVersion | None, option(WHERE, VERSION_HELP, show_default="v0, as released")
    ] = None,
    seed: Annotated[int, number(int, 0, MOST_SEED, WHERE, "Seed of all random values.", metavar="N")] = 0,
    output: Annotated[
        Path | None, option(OUTPUT, "Checkpoint to write.", metavar="FOLDER", show_default="./MODEL-dclsSIZE[-INIT]")
    ] = None,
    html: Annotated[bool, option(OUTPUT, HTML_HELP, "--html")] = False,
    force: Force = False,
    dry_run: Annotated[bool, option(OUTPUT, "Report only: no weights, no download.", "--dry-run")] = False,
    input_size: InputSize = None,
    json_: Json = False,
    verbose: Annotated[
        int, option(OUTPUT, "Report every layer and why; -vv: name all others.", "--verbose", "-v", count=True)
    ] = 0,
    quiet: Quiet = False,
) -> None:
    """Replace a model's convolutions, report, and write a checkpoint."""
    trained = pretrained or checkpoint is not None
    keeps = init != "random" and (trained or init == EXACT)
    refuse(
        {
            "--force has no effect with --dry-run": dry_run and force,
            "--output has no effect with --dry-run": dry_run and output is not None,
            "--html has no effect with --dry-run": dry_run and html,
            "--calibrate has no effect with --dry-run": dry_run and calibrate is not None,
            "--scope error measures what kernels lose; --dry-run reads none": dry_run and options.scope == ERROR,
            "--quiet and --verbose exclude each other": quiet and verbose > 0,
            "--json and --verbose exclude each other; the JSON has every layer": json_ and verbose > 0,
            "--quiet with --dry-run would print nothing": quiet and dry_run and not json_,
            f"--init {init} needs trained kernels: --pretrained or --checkpoint": init in ("largest", "fit")
            and not trained,
            "--calibrate is for --init fit, with --pretrained or --checkpoint": calibrate is not None
            and not (trained and init in (AUTO, "fit")),
            "--positions is for random positions, --init auto or exact keeps those of old kernels; "
            "use --init random": positions != "normal" and keeps,
            "--authors-version describes the file of --checkpoint": authors_version is not None and checkpoint is None,
            "--plan carries out a plan as it is: leave the options that make one": plan is not None
            and (options != PlanOptions() or input_size is not None),
            "--scope error is for --init fit": options.scope == ERROR and init not in (AUTO, "fit"),
        }
    )
    check_network(options, pretrained=pretrained, checkpoint=checkpoint, images=calibrate)
    if not dry_run:
        check_working_folder()
    if output is not None:
        _check_output(output, force=force)
    if plan is not None:
        check_folder(plan)
    with console.steps(model, quiet=quiet) as notify:
        notify("planning")  # which begins with imports of some seconds
        from ..checkpoints.folder import read_plan
        from ..checkpoints.save import save_converted
        from ..networks.source import resolve_model
        from ..pipeline import Job
        from ..progress import silent
        from ..reports.report import predict_report
        from ..views.next_steps import next_steps
        from ..views.plot import picture_files
        from ..views.report import report_view

        job = Job(
            source=resolve_model(model, num_classes=num_classes, in_chans=in_chans, pretrained=pretrained),
            pretrained=pretrained,
            weights=checkpoint,
            options=options,
            input_size=input_size,
            init=init,
            positions=positions,
            calibration=calibrate,
            authors_version=authors_version,
            seed=seed,
            offline=dry_run,
            notify=notify,
            note=silent if quiet else console.note,
        )
        conversion_plan = job.plan() if plan is None else job.plan_again(read_plan(plan))
        report, steps = predict_report(conversion_plan), []
        if not dry_run:
            output = output or _default_output(job, conversion_plan)
            _check_output(output, force=force)
            done = job.convert(conversion_plan)
            notify(f"writing {output}")
            if html and not can_plot():
                job.note(
                    f"{PLOT_LIBRARY} is missing, so the model card has no picture: pip install 'dcls-convert[plot]'"
                )
            pictures = picture_files(done.model, conversion_plan, output, done.report) if html else None
            save_converted(
                done.model.eval(),
                conversion_plan,
                output,
                report=done.report,
                force=force,
                pictures=pictures,
                meta=None if job.meta is done.model else job.meta,
            )
            report, steps = replace(done.report, output=str(output)), next_steps(job, done, output)
    with console.standing(output):
        if json_:
            console.write(report.to_json())
        elif quiet:
            console.show(str(output))
        else:
            console.show(report_view(replace(report, outcome=None), verbose=verbose), *steps)


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse an output that could not be written, before any work."""

    def not_of_a_checkpoint(path: Path) -> str | None:
        from ..checkpoints import folder  # imports torch, and is needed only where something is replaced

        return folder.not_of_a_checkpoint(path)

    from ..output import check_output

    check_output(output, force=force, foreign=not_of_a_checkpoint)


def _default_output(job: "Job", plan: "ConversionPlan") -> Path:
    """convnext_tiny-dcls17 or -dcls17x9, -dcls where the plan has several sizes; -dcls17-fit where kernels are kept."""
    from ..depthwise.geometry import size_text

    sizes = {layer.dilated_size for layer in plan.layers if not layer.dense_axes} or {plan.layers[0].dilated_size}
    size = "" if len(sizes) > 1 else next(size_text(size) if len(set(size)) > 1 else str(size[0]) for size in sizes)
    how = "" if job.how == "random" or job.elements is not None else f"-{job.how}"
    assert job.source is not None
    return Path(f"{job.source.short_name}-dcls{size}{how}")
