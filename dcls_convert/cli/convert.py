"""`dcls-convert MODEL`: plan, convert, report, and write a checkpoint."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..atomic_output import check_output
from ..input_files import check_folder
from ..options import (
    ERROR_SCOPE,
    WHAT_TO_CONVERT,
    AuthorsVersion,
    Init,
    PlanOptions,
    Positions,
    command_line,
)
from ..picture_output import FIGURE_LIBRARY, PAGE_LIBRARY, check_installed
from ..progress import ignore_messages
from ..text import printable
from . import console
from .completion import complete_files
from .network_options import NetworkOptions, changed_options, expand_options, refuse
from .output_name import (
    check_output_named_by_options,
    check_output_named_by_plan,
    default_output,
    measures_kernels,
    reason_to_keep_output,
)
from .shared_options import Force, Json, Quiet
from .typer_options import MAX_SEED, OUTPUT, WHERE, choice, number, option

if TYPE_CHECKING:
    from ..conversion.conversion import Conversion
    from ..conversion.loaded import LoadedNetwork
    from ..conversion.resolved import ResolvedRequest

PLAN_HELP = "Apply the plan of a checkpoint to other weights of the same model."
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
# Options that change the MACs and that `sweep` has too.
DECIDE_MACS = ("num_classes", "in_chans", "rules", "input_size")
VERSION = choice(
    AuthorsVersion,
    WHERE,
    "Version of the authors' layers in a checkpoint of theirs without SIG.",
    show_default="v0, as released",
)
CONVERTED_OUTPUT = option(
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


@expand_options
def convert(
    network_options: NetworkOptions,
    plan: Annotated[
        Path | None,
        option(WHAT_TO_CONVERT, PLAN_HELP, metavar="FOLDER", autocompletion=complete_files),
    ] = None,
    init: Annotated[Init, choice(Init, WHERE, INIT_HELP)] = "auto",
    positions: Annotated[Positions, choice(Positions, WHERE, POSITIONS_HELP)] = "normal",
    authors_version: Annotated[AuthorsVersion | None, VERSION] = None,
    device: Annotated[str | None, DEVICE] = None,
    seed: Annotated[
        int, number(int, 0, MAX_SEED, WHERE, "Seed of all random values.", metavar="N")
    ] = 0,
    output: Annotated[Path | None, CONVERTED_OUTPUT] = None,
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
    no_effect_in_dry_run = {
        "--force": force,
        "--output": output,
        "--html": html,
        "--calibrate": network_options.calibrate,
    }
    for name, value in no_effect_in_dry_run.items():
        refuse((dry_run and value, f"{name} has no effect with --dry-run"))
    has_planning_options = (
        network_options.options != PlanOptions() or network_options.input_size is not None
    )
    refuse(
        (quiet and verbose > 0, "--quiet and --verbose exclude each other"),
        (
            json_ and verbose > 0,
            "--json and --verbose exclude each other; the JSON has every layer",
        ),
        (quiet and dry_run and not json_, "--quiet with --dry-run would print nothing"),
        (
            plan is not None and has_planning_options,
            "--plan applies a plan unchanged; omit the planning options",
        ),
        (
            dry_run and network_options.options.scope == ERROR_SCOPE and network_options.trained,
            "--scope error measures what kernels lose; --dry-run reads none",
        ),
    )
    if html:
        check_installed("--html", FIGURE_LIBRARY, PAGE_LIBRARY)
    request = network_options.request(
        init=init,
        positions=positions,
        authors_version=authors_version,
        device=device,
        seed=seed,
        plan=plan,
        offline=dry_run,
    )
    command = shlex.join(["dcls-convert", *sys.argv[1:]])
    request = replace(request, command=printable(command))
    # Refuse an existing output as soon as its name is known: here if it is given or follows from
    # the options, after a cheap plan if planning is slow, and in any case before writing.
    if output is not None:
        check_output(output, force=force, reason_to_keep=reason_to_keep_output)
    elif plan is None and not dry_run:
        check_output_named_by_options(request, force=force)
    if plan is not None:
        check_folder(plan)
    with console.steps(network_options.model, "planning", quiet=quiet) as notify:
        from ..conversion.loaded import LoadedNetwork
        from ..networks.running import check_device
        from ..reports.predict import predict_report
        from ..views.advice import ON_COMMAND_LINE
        from ..views.next_steps import next_steps
        from ..views.report import report_view

        if device is not None:
            request = replace(request, device=str(check_device(device)))
        note = ignore_messages if quiet else console.note
        loaded = LoadedNetwork(request, notify=notify, note=note)
        if output is None and plan is None and not dry_run and measures_kernels(request):
            check_output_named_by_plan(loaded, force=force)
        resolved = _resolve(loaded, plan)
        report = predict_report(resolved.plan)
        steps = []
        if not dry_run:
            if output is None:
                output = default_output(loaded, resolved)
            conversion = _convert_and_save(loaded, resolved, output, force=force, html=html)
            report = replace(conversion.report, output=str(output))
            steps = next_steps(resolved, conversion, output)
    if json_:
        console.write(report.to_json())
    elif quiet:
        console.show(str(output))
    else:
        advice = replace(
            ON_COMMAND_LINE, cheaper_sizes=f"cheaper sizes: {_sweep_command(network_options)}"
        )
        report = replace(report, outcome=None)  # shown by `next_steps`, with the checkpoint
        console.show(report_view(report, verbose=verbose, advice=advice), *steps)


def _sweep_command(network_options: NetworkOptions) -> str:
    """Return the `sweep` command that shows the costs of other sizes."""
    changed = changed_options(network_options) | changed_options(network_options.options)
    values = {name: value for name, value in changed.items() if name in DECIDE_MACS}
    return command_line(network_options.model, values, command="sweep")


def _resolve(loaded: "LoadedNetwork", plan: Path | None) -> "ResolvedRequest":
    """Resolve the request, with the plan of the checkpoint `plan` if it is given."""
    from ..checkpoints.folder import read_plan
    from ..conversion.resolved import resolve, resolve_with_plan

    if plan is None:
        return resolve(loaded)
    return resolve_with_plan(loaded, read_plan(plan))


def _convert_and_save(
    loaded: "LoadedNetwork", resolved: "ResolvedRequest", output: Path, *, force: bool, html: bool
) -> "Conversion":
    """Convert the network and write the checkpoint."""
    from ..checkpoints.save import save_converted
    from ..conversion.conversion import convert_network_
    from ..networks.copying import copy_network
    from ..views.plot import picture_files

    check_output(output, force=force, reason_to_keep=reason_to_keep_output)
    conversion = convert_network_(loaded, resolved)
    loaded.notify(f"writing {output}")
    model = conversion.model.eval().cpu()
    pictures = picture_files(model, resolved.plan, output) if html else None
    save_converted(
        model,
        resolved.plan,
        output,
        report=conversion.report,
        force=force,
        pictures=pictures,
        meta=copy_network(loaded.structure),
    )
    return conversion
