"""`dcls-convert MODEL`: plan, convert, report, and write a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from ..errors import PlanError, filled
from ..files import check_folder, check_images, check_weights_file, check_working_folder
from ..options import AUTO, ERROR, EXACT, AuthorsVersion, Init, PlanOptions, Positions
from . import console
from .arguments import (
    MOST_SEED,
    OUTPUT,
    WHAT,
    WHERE,
    Force,
    InputSize,
    Json,
    Quiet,
    number,
    option,
    with_plan_options,
)
from .completion import complete_checkpoints
from .network import (
    Images,
    InChans,
    Model,
    Network,
    NumClasses,
    Pretrained,
    WeightsFile,
    hollow_network,
    refuse,
    refuse_weights,
)

if TYPE_CHECKING:
    from torch import nn

    from ..networks.source import ModelSource
    from ..pipeline import Conversion, Start
    from ..planning.plan import ConversionPlan
    from ..progress import Notify
    from ..reports.report import ConversionReport

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
    trained = refuse_weights(options, pretrained=pretrained, checkpoint=checkpoint)
    _refuse_output(output, force=force, dry_run=dry_run, as_json=json_, verbose=verbose, quiet=quiet)
    _refuse_start(init, positions, calibrate, trained=trained, dry_run=dry_run)
    made_anew = options != PlanOptions() or input_size is not None
    refuse(
        {
            "--authors-version describes the file of --checkpoint": authors_version is not None and checkpoint is None,
            "--plan carries out a plan as it is: leave the options that make one": plan is not None and made_anew,
            "--scope error measures what kernels lose; --dry-run reads none": options.scope == ERROR and dry_run,
            "--html has no effect with --dry-run": html and dry_run,
            "--scope error is for --init fit": options.scope == ERROR and init not in (AUTO, "fit"),
        }
    )
    if not dry_run:
        check_working_folder()
    _check_files(checkpoint, output, calibrate, force=force)
    if plan is not None:
        check_folder(plan)
    note: Notify = (lambda *_: None) if quiet else console.note
    with console.steps(model, quiet=quiet) as notify:
        notify("planning")  # which begins with imports of some seconds
        from ..checkpoints.save import save_converted
        from ..networks.source import resolve_model
        from ..pipeline import Start
        from ..reports.report import predict_report
        from ..views.report import report_view

        start = Start(init=init, trained=trained, positions=positions, calibration=calibrate, seed=seed)
        start = replace(start, authors_version=authors_version)
        source = resolve_model(model, num_classes=num_classes, in_chans=in_chans, pretrained=pretrained)
        network = Network(source, f"checkpoint {checkpoint}", pretrained=pretrained, notify=notify)
        made, start = _planned(network, plan, options, start, checkpoint, input_size, offline=dry_run, note=note)
        report, moved = predict_report(made), None
        if not dry_run:
            output = output or _default_output(source, made, start)
            _check_files(None, output, None, force=force)
            converted, done = _carry_out(made, network, start, note=note)
            notify(f"writing {output}")
            pictures = _pictures(converted, made, output, done.report, note) if html else None
            save_converted(converted, made, output, report=done.report, force=force, pictures=pictures)
            report, moved = done.report.with_output(str(output)), done.moved
    with console.standing(output):
        if json_:
            console.write(report.to_json())
        elif quiet:
            console.show(str(output))
        else:
            console.show(report_view(replace(report, outcome=None), verbose=verbose))
            console.show(*([] if output is None else _next_steps(report, output, start, moved)))


def _default_output(source: "ModelSource", plan: "ConversionPlan", start: "Start") -> Path:
    """convnext_tiny-dcls17 or -dcls17x9, -dcls where the plan has several sizes; -dcls17-fit where kernels are kept."""
    from ..depthwise.geometry import size_text

    sizes = {layer.dilated_size for layer in plan.layers if not layer.dense_axes} or {plan.layers[0].dilated_size}
    size = "" if len(sizes) > 1 else next(size_text(size) if len(set(size)) > 1 else str(size[0]) for size in sizes)
    how = "" if start.how == "random" or start.elements is not None else f"-{start.how}"
    return Path(f"{source.short_name}-dcls{size}{how}")


def _refuse_output(
    output: Path | None, *, force: bool, dry_run: bool, as_json: bool, verbose: int, quiet: bool
) -> None:
    refuse(
        {
            "--force has no effect with --dry-run": dry_run and force,
            "--output has no effect with --dry-run": dry_run and output is not None,
            "--quiet and --verbose exclude each other": quiet and verbose > 0,
            "--json and --verbose exclude each other; the JSON has every layer": as_json and verbose > 0,
            "--quiet with --dry-run would print nothing": quiet and dry_run and not as_json,
        }
    )


def _refuse_start(init: Init, positions: Positions, calibrate: Path | None, *, trained: bool, dry_run: bool) -> None:
    fits = trained and init in (AUTO, "fit")
    keeps = init != "random" and (trained or init == EXACT)
    kept = "--init auto or exact keeps those of old kernels"
    needs = not trained and init in ("largest", "fit")
    refuse(
        {
            f"--init {init} needs trained kernels: --pretrained or --checkpoint": needs,
            "--calibrate is for --init fit, with --pretrained or --checkpoint": calibrate is not None and not fits,
            "--calibrate has no effect with --dry-run": calibrate is not None and dry_run,
            f"--positions is for random positions, {kept}; use --init random": positions != "normal" and keeps,
        }
    )


def _check_files(checkpoint: Path | None, output: Path | None, images: Path | None, *, force: bool) -> None:
    """Refuse files that cannot be read or written, before any work."""

    def not_of_a_checkpoint(path: Path) -> str | None:
        from ..checkpoints import folder  # imports torch, and is needed only where something is replaced

        return folder.not_of_a_checkpoint(path)

    if checkpoint is not None:
        check_weights_file(checkpoint)
    if images is not None:
        check_images(images)
    if output is not None:
        from ..output import check_output

        check_output(output, force=force, foreign=not_of_a_checkpoint)


def _planned(
    network: Network,
    folder: Path | None,
    options: PlanOptions,
    start: "Start",
    checkpoint: Path | None,
    input_size: tuple[int, ...] | None,
    *,
    offline: bool,
    note: "Notify",
) -> tuple["ConversionPlan", "Start"]:
    """A new plan or the folder's, and the start, which the weights of the checkpoint may decide."""
    from ..checkpoints.folder import read_plan
    from ..depthwise.geometry import size_text
    from ..networks.weights import check_weights
    from ..pipeline import plan_again, plan_for

    twin, rebuilt, start = hollow_network(network, checkpoint, start, offline=offline, note=note)
    if offline and network.state is not None:  # a dry run, which refuses what the run would
        check_weights(twin, network.state, network.where, new_classifier=network.new_classifier)
    if folder is not None:
        return plan_again(twin, read_plan(folder), rebuilt), start
    # Most plans need no weights, and one that cannot be made is refused before any are loaded.
    model = network.build()[0] if options.scope == ERROR and start.elements is None else twin
    plan = plan_for(model, options, start, source=rebuilt, input_size=input_size, notify=network.notify)
    if plan.macs is None and input_size is not None:
        raise PlanError(f"input size {size_text(input_size)}: {plan.macs_note}")
    return plan, start


def _carry_out(
    plan: "ConversionPlan", network: Network, start: "Start", *, note: "Notify"
) -> tuple["nn.Module", "Conversion"]:
    from ..pipeline import carry_out_

    model, kept = network.build()
    network.notify("converting")
    done = carry_out_(model, plan, start, new_classifier=network.new_classifier, note=note, notify=network.notify)
    for name in (*kept, *done.kept):
        note(f"{name} has another shape in the checkpoint and starts from random values")
    return model.eval(), done


def _pictures(
    model: "nn.Module", plan: "ConversionPlan", output: Path, report: "ConversionReport", note: "Notify"
) -> dict[str, bytes]:
    from ..files import PLOT_LIBRARY, can_plot
    from ..views.files import picture_files

    if not can_plot():
        note(f"{PLOT_LIBRARY} is missing, so the model card has no picture: pip install 'dcls-convert[plot]'")
    return picture_files(model, plan, output, report)


def _next_steps(report: "ConversionReport", output: Path, start: "Start", moved: float | None) -> list[str | Text]:
    from ..checkpoints.save import training_code
    from ..views.report import outcome_sentences

    training = filled(training_code(report.model), output).splitlines()
    return [
        "",
        f"Wrote {output}, from {_start_in_words(start)}.",
        Text("Fine-tune it:\n", style="bold"),
        *[f"    {line}" if line else "" for line in training],
        *(["", *outcome_sentences(report)] if report.outcome else []),
        *(
            []
            if moved is None or (report.outcome and report.outcome.images)
            else [f"Outputs for random images moved by {100 * moved:.2g} %."]
        ),
    ]


def _start_in_words(start: "Start") -> str:
    """What the new layers start from."""
    if start.elements is not None:
        return "the authors' elements and positions; it gives the outputs of their network"
    if start.how == EXACT:
        source = "the trained weights" if start.trained else f"random initialisation (seed {start.seed})"
        return f"{source}; every old cell is an element at its place, so that the outputs are the old ones"
    if not start.trained:
        return f"random initialisation (seed {start.seed}), as in the paper; --pretrained or --checkpoint load weights"
    if start.how == "random":
        return "trained weights, but random elements in the new layers"
    fitted = (
        "with elements fitted to what they give for images" if start.calibration else "with elements fitted to them"
    )
    return f"the trained kernels, {'reduced to their largest cells' if start.how == 'largest' else fitted}"
