"""`dcls-convert MODEL`: plan, convert, report, and write a checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..errors import CheckpointError, DclsConvertError, PlanError
from ..options import AUTO, EXACT, AuthorsVersion, Init, PlanOptions, Positions
from . import console
from .arguments import (
    MOST_COUNT,
    MOST_SEED,
    OUTPUT,
    WHAT,
    WHERE,
    Force,
    InputSize,
    Json,
    Quiet,
    number,
    with_plan_options,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..networks.source import ModelSource
    from ..planning.plan import ConversionPlan
    from ..reports.report import ConversionReport
    from ..surgery.convert import Conversion, Start

Note = Callable[[str], None]


@with_plan_options
def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="convnext_tiny (timm first, then torchvision), timm:NAME, torchvision:NAME, hf-hub:REPO, "
            "local-dir:FOLDER, or package.module:factory, which imports and runs your own code.",
        ),
    ],
    *,
    pretrained: Annotated[
        bool,
        typer.Option("--pretrained", rich_help_panel=WHAT, help="Start from timm's or torchvision's trained weights."),
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=WHAT,
            help="Start from the weights in a safetensors or torch file, also one of DCLS's authors.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            rich_help_panel=WHAT,
            help="Carry out the plan of a checkpoint, on other weights of the same model.",
        ),
    ] = None,
    num_classes: Annotated[
        int | None, number(int, 0, MOST_COUNT, metavar="N", rich_help_panel=WHAT, help="Classes of the model's head.")
    ] = None,
    in_chans: Annotated[
        int | None, number(int, 1, MOST_COUNT, metavar="N", rich_help_panel=WHAT, help="Input channels.")
    ] = None,
    options: PlanOptions,
    init: Annotated[
        Init,
        typer.Option(
            rich_help_panel=WHERE,
            help="random; fit: closest to the old kernels; largest: at their largest cells; exact: at all cells, for "
            "the same outputs at more parameters; auto: fit for trained weights, else random.",
        ),
    ] = "auto",
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", rich_help_panel=WHERE, help="Images: fit outputs for them, not kernels."),
    ] = None,
    positions: Annotated[
        Positions, typer.Option(rich_help_panel=WHERE, help="Random positions: N(0, 0.5 cells), or uniform.")
    ] = "normal",
    authors_version: Annotated[
        AuthorsVersion | None,
        typer.Option(
            rich_help_panel=WHERE,
            show_default="v0, as released",
            help="Version of the authors' layers in a checkpoint of theirs without SIG.",
        ),
    ] = None,
    seed: Annotated[
        int, number(int, 0, MOST_SEED, metavar="N", rich_help_panel=WHERE, help="Seed of all random values.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", rich_help_panel=OUTPUT, show_default="./MODEL-dclsSIZE", help="Checkpoint to write."
        ),
    ] = None,
    force: Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Report only: no weights, no download.")
    ] = False,
    input_size: InputSize = None,
    json_: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", rich_help_panel=OUTPUT, help="Report a row for every layer.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Replace a model's convolutions, report, and write a checkpoint."""
    trained = pretrained or checkpoint is not None
    _refuse_output(output, force=force, dry_run=dry_run, as_json=json_, verbose=verbose, quiet=quiet)
    _refuse_start(init, positions, calibrate, trained=trained, dry_run=dry_run)
    _refuse(
        (pretrained and checkpoint is not None, "--pretrained and --checkpoint exclude each other"),
        (authors_version is not None and checkpoint is None, "--authors-version describes the file of --checkpoint"),
        (
            plan is not None and (options != PlanOptions() or input_size is not None),
            "--plan carries out a plan as it is: leave the options that make one",
        ),
    )
    from ..checkpoints.folder import not_of_a_checkpoint
    from ..checkpoints.output import check_output
    from ..checkpoints.save import save_converted
    from ..networks.source import build_model, resolve_model
    from ..reports.report import predict_report
    from ..reports.report_view import report_view
    from ..surgery.convert import Start

    options = _with_files_checked(options, checkpoint, None if dry_run else output, force=force)
    start = Start(init=init, trained=trained, positions=positions, calibration=calibrate, seed=seed)
    start = replace(start, authors_version=authors_version)
    note: Note = _say_nothing if quiet else _say
    with console.steps(model, quiet=quiet) as step:
        step("planning")
        source = resolve_model(model, num_classes=num_classes, in_chans=in_chans, pretrained=pretrained)
        twin = build_model(source, device="meta", seed=seed, offline=dry_run, trust_code=True)
        state = None
        if checkpoint is not None:
            step("reading weights")
            state, start = _read_weights(checkpoint, twin, start, note)
        made = _plan(twin, source, options, start, input_size, plan)
        report, moved = predict_report(made), None
        if not dry_run:
            output = output or Path(default_output(source, made))
            check_output(output, force=force, foreign=not_of_a_checkpoint)
            where = f"checkpoint {checkpoint}"
            network, done = _carry_out(
                made, source, state, start, where=where, pretrained=pretrained, note=note, step=step
            )
            step(f"writing {output}")
            save_converted(network, made, output, report=done.report, force=force)
            report, moved = done.report.with_output(str(output)), done.moved
    with console.standing(None if dry_run else output):
        if json_:
            console.write(report.to_json())
        elif not quiet:
            console.show(report_view(report, verbose=verbose))
        if output is not None and not json_:
            console.show(*([str(output)] if quiet else _next_steps(report, output, start, moved)))


def default_output(source: "ModelSource", plan: "ConversionPlan") -> str:
    """convnext_tiny-dcls17; convnext_tiny-dcls17x9; without a size where the plan has several."""
    from ..layers.geometry import size_text

    sizes = {layer.dilated_size for layer in plan.layers if not layer.dense_axes} or {plan.layers[0].dilated_size}
    size = "" if len(sizes) > 1 else next(size_text(size) if len(set(size)) > 1 else str(size[0]) for size in sizes)
    return f"{source.short_name}-dcls{size}"


def _refuse(*conflicts: tuple[bool, str]) -> None:
    for conflict, message in conflicts:
        if conflict:
            raise DclsConvertError(message)


def _refuse_output(
    output: Path | None, *, force: bool, dry_run: bool, as_json: bool, verbose: bool, quiet: bool
) -> None:
    _refuse(
        (dry_run and force, "--force has no effect with --dry-run"),
        (dry_run and output is not None, "--output has no effect with --dry-run"),
        (quiet and verbose, "--quiet and --verbose exclude each other"),
        (as_json and verbose, "--json and --verbose exclude each other; the JSON has every layer"),
        (quiet and dry_run and not as_json, "--quiet with --dry-run would print nothing"),
    )


def _refuse_start(init: Init, positions: Positions, calibrate: Path | None, *, trained: bool, dry_run: bool) -> None:
    _refuse(
        (
            init in ("largest", "fit") and not trained,
            f"--init {init} needs trained kernels: --pretrained or --checkpoint",
        ),
        (
            calibrate is not None and (init not in (AUTO, "fit") or not trained),
            "--calibrate is for --init fit, with --pretrained or --checkpoint",
        ),
        (calibrate is not None and dry_run, "--calibrate has no effect with --dry-run"),
        (
            positions != "normal" and init != "random" and (trained or init == EXACT),
            "--positions is for random positions, --init auto or exact keeps those of old kernels; use --init random",
        ),
    )


def _with_files_checked(
    options: PlanOptions, checkpoint: Path | None, output: Path | None, *, force: bool
) -> PlanOptions:
    """The options with the rules read; files that cannot be read or written are refused before any work."""
    from ..checkpoints.folder import not_of_a_checkpoint
    from ..checkpoints.output import check_output
    from ..networks.weights import check_weights_file
    from ..planning.rules import load_rules

    if checkpoint is not None:
        check_weights_file(checkpoint)
    if output is not None:
        check_output(output, force=force, foreign=not_of_a_checkpoint)
    return options if options.rules == AUTO else replace(options, rules=load_rules(options.rules))


def _read_weights(
    checkpoint: Path, twin: "nn.Module", start: "Start", note: Note
) -> tuple["dict[str, Tensor] | None", "Start"]:
    """The file's weights under the model's names; or, with layers of the authors' package, the start that they are."""
    from ..networks.source import with_names_of
    from ..networks.weights import read_weights
    from ..surgery.authors import RELEASED_VERSION, sort_weights

    where = f"checkpoint {checkpoint}"
    state = with_names_of(twin, read_weights(checkpoint))
    elements = sort_weights(state, where)
    if elements is None:
        if start.authors_version is not None:
            raise CheckpointError(f"{where}: has no layers of the authors' package; leave --authors-version")
        return state, start
    for option, given in [
        (f"--init {start.init}", start.init != AUTO),
        (f"--positions {start.positions}", start.positions != "normal"),
        ("--calibrate", start.calibration is not None),
    ]:
        if given:
            raise CheckpointError(f"{where}: has elements of its own, with positions; leave {option}")
    if not elements.has_sigma and start.authors_version is None:
        note(f"{where} is taken for version {RELEASED_VERSION} of the authors' layers; see --authors-version")
    return None, replace(start, elements=elements)


def _plan(
    twin: "nn.Module",
    source: "ModelSource",
    options: PlanOptions,
    start: "Start",
    input_size: tuple[int, ...] | None,
    folder: Path | None,
) -> "ConversionPlan":
    """A new plan, or the one of a checkpoint folder."""
    from ..checkpoints.folder import read_plan
    from ..layers.geometry import size_text
    from ..networks.source import rebuildable_source
    from ..surgery.convert import plan_again, plan_for

    rebuilt = rebuildable_source(twin, source)
    if folder is not None:
        return plan_again(twin, read_plan(folder), rebuilt)
    plan = plan_for(twin, options, start, source=rebuilt, input_size=input_size)
    if plan.macs is None and input_size is not None:
        raise PlanError(f"input size {size_text(input_size)}: {plan.macs_note}")
    return plan


def _carry_out(
    plan: "ConversionPlan",
    source: "ModelSource",
    state: "dict[str, Tensor] | None",
    start: "Start",
    *,
    where: str,
    pretrained: bool,
    note: Note,
    step: Note,
) -> tuple["nn.Module", "Conversion"]:
    """The converted network, and what was done."""
    from ..surgery.convert import build_with_weights, carry_out_

    step("building with pretrained weights" if pretrained else "building")
    new_classifier = "num_classes" in source.args
    network, kept = build_with_weights(
        source, state, where=where, pretrained=pretrained, seed=start.seed, new_classifier=new_classifier
    )
    step("converting")
    done = carry_out_(network, plan, start, new_classifier=new_classifier, note=note)
    for name in (*kept, *done.kept):
        note(f"{name} has another shape in the checkpoint and starts from random values")
    return network.eval(), done


def _next_steps(report: "ConversionReport", output: Path, start: "Start", moved: float | None) -> list[str | Text]:
    from ..checkpoints.save import loading_code

    return [
        "",
        f"Wrote {output}, from {_start_in_words(start, report, moved)}.",
        Text("Fine-tune it:\n", style="bold"),
        *[f"    {line}" if line else "" for line in loading_code(report.model).format(folder=output).splitlines()],
    ]


def _start_in_words(start: "Start", report: "ConversionReport", moved: float | None) -> str:
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
    how = "reduced to their largest cells" if start.how == "largest" else "with elements fitted to them"
    errors = [layer.fit_error for layer in report.layers if layer.fit_error is not None]
    left = f" (mean relative kernel error {sum(errors) / len(errors):.3f})" if errors else ""
    outputs = "" if moved is None else f"; outputs for random images moved by {100 * moved:.2g} %"
    return f"the trained kernels, {how}{left}{outputs}"


def _say(text: str) -> None:
    console.message(f"note: {text}", style="yellow")


def _say_nothing(text: str) -> None:
    pass
