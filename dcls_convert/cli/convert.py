"""What the commands do, in the order of things: plan on the meta device, build, convert, measure, write, print."""

import functools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import nn

from ..checkpoints.folder import LOAD_WITH_TIMM, LOAD_WITHOUT_TIMM, check_output, save_converted
from ..errors import CheckpointError, DclsConvertError
from ..layers.geometry import size_text
from ..networks.sites import find_convs
from ..networks.source import (
    ModelSource,
    build_model,
    rebuildable_source,
    resolve_model,
    stated_input_size,
    with_names_of,
)
from ..networks.weights import check_weights_file, read_weights
from ..options import AUTO, EXACT, AuthorsVersion, Init, PlanOptions, Positions, Scope, Tie
from ..planning.budget import parse_percent
from ..planning.plan import ConversionPlan
from ..planning.rules import RuleSet, claim_sites, load_rules
from ..reports.report import ConversionReport, predict_report
from ..reports.report_view import report_view
from ..surgery.authors import RELEASED_VERSION, AuthorsWeights, sort_weights
from ..surgery.convert import Start, build_with_weights, carry_out_, plan_for

Weights = dict[str, torch.Tensor] | AuthorsWeights | None  # of --checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """The options of `convert`, parsed; see its help."""

    model: str
    dilated_size: int | tuple[int, ...] | None
    kernel_count: int | str
    budget: str
    scope: Scope
    tie: Tie
    interpolation: str | None
    rules: str
    strict: bool
    pretrained: bool
    checkpoint: Path | None
    authors_version: AuthorsVersion | None
    init: Init
    calibrate: Path | None
    positions: Positions
    num_classes: int | None
    in_chans: int | None
    input_size: tuple[int, ...] | None
    seed: int
    output: Path | None
    force: bool
    dry_run: bool
    json: bool
    verbose: bool
    quiet: bool


def run_convert(options: ConvertOptions) -> None:
    """`dcls-convert MODEL`. Everything that can be refused is refused before weights are touched."""
    _check_conflicts(options)
    planning = PlanOptions(
        dilated_size=options.dilated_size,
        kernel_count=options.kernel_count,
        rules=AUTO if options.rules == AUTO else load_rules(options.rules),
        scope=options.scope,
        tie=options.tie,
        budget=float(100 * parse_percent(options.budget)),
        interpolation=cast(Any, options.interpolation),
        strict=options.strict,
    )
    if options.output is not None and not options.dry_run:
        check_output(options.output, force=options.force)
    # What models and their loaders print is progress, and must not get into the results.
    with_file = options.checkpoint is not None
    with redirect_stdout(sys.stderr), _steps(options, (2 if options.dry_run else 5) + with_file) as step:
        step("planning")
        source = resolve_model(
            options.model,
            num_classes=options.num_classes,
            in_chans=options.in_chans,
            pretrained=options.pretrained,
        )
        twin = build_model(source, device="meta", seed=options.seed, offline=options.dry_run)
        weights = _read_checkpoint(options, twin, step)
        start = _start(options, weights)
        plan = plan_for(
            twin,
            planning,
            start,
            source=rebuildable_source(twin, source),
            input_size=options.input_size or stated_input_size(source, twin),
        )
        report, output, moved = predict_report(plan), None, None
        if not options.dry_run:
            output = options.output or Path(default_output(source, plan))
            check_output(output, force=options.force)
            report, moved = _carry_out(options, plan, start, source, weights, output, step)
    _print_report(options, report)
    if output is not None and not options.json:
        _print_next_steps(options, report, output, _start_in_words(options, start, report, moved))


def default_output(source: ModelSource, plan: ConversionPlan) -> str:
    """convnext_tiny-dcls17; convnext_tiny-dcls17x9; without a size where the plan has several."""
    sizes = {layer.dilated_size for layer in plan.layers if not layer.dense_axes} or {plan.layers[0].dilated_size}
    size = "" if len(sizes) > 1 else next(size_text(size) if len(set(size)) > 1 else str(size[0]) for size in sizes)
    return f"{source.short_name}-dcls{size}"


def print_claims(rules: RuleSet, model_name: str) -> None:
    """`rules check --model`: what every rule claims."""
    model = build_model(resolve_model(model_name), device="meta", offline=True)
    convs = find_convs(model)
    claims = claim_sites(rules, convs.sites)
    counts = Counter(claims.rule_of.values())
    for index, rule in enumerate(rules.rules):
        action = "skips" if rule.skip is not None else "converts"
        print(f"  {rules.label(index)}: {action} {counts[index]} of {len(convs.sites)} convolutions")
    print(f"  no rule: {len(claims.reasons)}, cannot be converted: {len(convs.skipped)}")


def _check_conflicts(options: ConvertOptions) -> None:
    conflicts = [
        (options.pretrained and options.checkpoint is not None, "--pretrained and --checkpoint exclude each other"),
        (options.dry_run and options.force, "--force has no effect with --dry-run"),
        (options.dry_run and options.output is not None, "--output has no effect with --dry-run"),
        (options.quiet and options.verbose, "--quiet and --verbose exclude each other"),
        (options.json and options.verbose, "--json and --verbose exclude each other; the JSON has every layer"),
        (options.quiet and options.dry_run and not options.json, "--quiet with --dry-run would print nothing"),
        (
            options.init in ("largest", "fit") and not _has_weights(options),
            f"--init {options.init} needs trained kernels: --pretrained or --checkpoint",
        ),
        (
            options.calibrate is not None and (options.init not in (AUTO, "fit") or not _has_weights(options)),
            "--calibrate is for --init fit, with --pretrained or --checkpoint",
        ),
        (options.calibrate is not None and options.dry_run, "--calibrate has no effect with --dry-run"),
        (
            options.positions != "normal"
            and options.init != "random"
            and (_has_weights(options) or options.init == EXACT),
            "--positions is for random positions, --init auto or exact keeps those of old kernels; use --init random",
        ),
        (
            options.authors_version is not None and options.checkpoint is None,
            "--authors-version says of which version a file is: it needs --checkpoint",
        ),
        (
            options.kernel_count != AUTO and (options.scope != "model" or parse_percent(options.budget) != 1),
            "--kernel-count states the count, so --budget and --scope would have no effect",
        ),
    ]
    for conflict, message in conflicts:
        if conflict:
            raise DclsConvertError(message)
    if options.checkpoint is not None:
        check_weights_file(options.checkpoint)


def _has_weights(options: ConvertOptions) -> bool:
    return options.pretrained or options.checkpoint is not None


def _read_checkpoint(options: ConvertOptions, twin: nn.Module, step: Any) -> Weights:
    """The file's weights, under the model's names; sorted, where it has layers of the authors' package."""
    if options.checkpoint is None:
        return None
    step("reading weights")
    where = f"checkpoint {options.checkpoint}"
    state = with_names_of(twin, read_weights(options.checkpoint))
    weights = sort_weights(state, where)
    if weights is None:
        if options.authors_version is not None:
            raise CheckpointError(f"{where}: has no layers of the authors' package; leave --authors-version")
        return state
    given = {
        f"--init {options.init}": options.init != AUTO,
        f"--positions {options.positions}": options.positions != "normal",
        "--calibrate": options.calibrate is not None,
    }
    if contradicting := [option for option, contradicts in given.items() if contradicts]:
        raise CheckpointError(f"{where}: has elements of its own, with positions; leave {contradicting[0]}")
    if not weights.has_sigma and options.authors_version is None:
        _note(options, f"{where} is taken for version {RELEASED_VERSION} of the authors' layers; see --authors-version")
    return weights


def _start(options: ConvertOptions, weights: Weights) -> Start:
    return Start(
        init=options.init,
        trained=_has_weights(options),
        positions=options.positions,
        calibration=options.calibrate,
        seed=options.seed,
        elements=weights if isinstance(weights, AuthorsWeights) else None,
        authors_version=options.authors_version,
    )


def _carry_out(
    options: ConvertOptions,
    plan: ConversionPlan,
    start: Start,
    source: ModelSource,
    weights: Weights,
    output: Path,
    step: Any,
) -> tuple[ConversionReport, float | None]:
    step("building with pretrained weights" if options.pretrained else "building")
    new_classifier, note = options.num_classes is not None, functools.partial(_note, options)
    plain = weights if isinstance(weights, dict) else None
    model, kept = build_with_weights(
        source,
        plain,
        where=f"checkpoint {options.checkpoint}",
        pretrained=options.pretrained,
        seed=options.seed,
        new_classifier=new_classifier,
    )
    step("converting")
    done = carry_out_(model, plan, start, new_classifier=new_classifier, note=note)
    for name in (*kept, *done.kept):
        note(f"{name} has another shape in the checkpoint and starts from random values")
    step(f"writing {output}")
    save_converted(model.eval(), plan, output, report=done.report, force=options.force)
    return done.report.with_output(str(output)), done.moved


@contextmanager
def _steps(options: ConvertOptions, total: int) -> Iterator[Any]:
    """A progress display on stderr: a bar on a terminal, a line a step elsewhere, nothing when quiet."""
    console = Console(stderr=True, highlight=False)
    if options.quiet or not console.is_terminal:

        def line(text: str) -> None:
            if not options.quiet:
                console.print(Text(f"{options.model}: {text}"), soft_wrap=True)

        yield line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(options.model, total=total)

        def advance(text: str) -> None:
            progress.update(task, description=f"{options.model}: {text}", advance=1)

        yield advance


def _note(options: ConvertOptions, text: str) -> None:
    if not options.quiet:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"note: {text}", style="yellow"))


def _print_report(options: ConvertOptions, report: ConversionReport) -> None:
    if options.json:
        sys.stdout.write(report.to_json())
    elif not options.quiet:
        console = Console(highlight=False)
        console.print(report_view(report, verbose=options.verbose))


def _start_in_words(options: ConvertOptions, start: Start, report: ConversionReport, moved: float | None) -> str:
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
    left = f" (mean relative kernel error {_mean(errors):.3f})" if errors else ""
    outputs = "" if moved is None else f"; outputs for random images moved by {100 * moved:.2g} %"
    return f"the trained kernels, {how}{left}{outputs}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _print_next_steps(options: ConvertOptions, report: ConversionReport, output: Path, start: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if options.quiet:
        console.print(Text(str(output)))
        return
    console.print()
    console.print(Text(f"Wrote {output}, from {start}."))
    console.print(Text("Fine-tune it:\n", style="bold"))
    with_timm = (report.model or "").startswith("timm:")
    lines = (LOAD_WITH_TIMM if with_timm else LOAD_WITHOUT_TIMM).format(folder=output)
    for line in lines.splitlines():
        console.print(Text(f"    {line}" if line else ""))
