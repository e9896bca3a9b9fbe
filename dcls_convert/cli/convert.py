"""What the commands do, in the order of things: plan on the meta device, build, convert, measure, write, print."""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import nn

from ..checkpoints.folder import not_of_a_checkpoint
from ..checkpoints.output import check_output
from ..checkpoints.save import loading_code, save_converted
from ..errors import CheckpointError, DclsConvertError, PlanError
from ..fitting.calibration import calibrate
from ..layers.geometry import size_text
from ..networks.outputs import relative_distance
from ..networks.sites import find_convs
from ..networks.source import (
    ModelSource,
    build_hollow,
    build_model,
    rebuildable_source,
    resolve_model,
    stated_input_size,
    with_names_of,
)
from ..networks.weights import check_weights_file, fill_, load_weights_, read_weights
from ..options import AUTO, DEFAULT_BUDGET, EXACT, AuthorsVersion, Init, Positions, Scope, Tie
from ..planning.budget import parse_percent
from ..planning.plan import ConversionPlan
from ..planning.planner import plan_conversion
from ..planning.rules import RuleSet, claim_sites, load_rules
from ..reports.report import ConversionReport, measure_report, predict_report
from ..reports.report_view import report_view
from ..surgery.authors import RELEASED_VERSION, AuthorsWeights, element_state, sort_weights, start_from_authors_
from ..surgery.place import apply_plan_

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
    ruleset = None if options.rules == AUTO else load_rules(options.rules)
    if options.output is not None and not options.dry_run:
        check_output(options.output, force=options.force, foreign=not_of_a_checkpoint)
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
        twin = build_model(source, device="meta", seed=options.seed, offline=options.dry_run, trust_code=True)
        weights = _read_checkpoint(options, twin, step)
        plan = _plan(options, ruleset, twin, source, weights)
        report = predict_report(plan)
        output, moved = None, None
        if not options.dry_run:
            output = options.output or Path(default_output(source, plan))
            check_output(output, force=options.force, foreign=not_of_a_checkpoint)
            report, moved = _carry_out(options, plan, source, weights, output, step)
            report = report.with_output(str(output))
    _print_report(options, report)
    if output is not None and not options.json:
        _print_next_steps(options, report, output, _start(options, weights, report, moved))


def default_output(source: ModelSource, plan: ConversionPlan) -> str:
    """convnext_tiny-dcls17; convnext_tiny-dcls17x9; without a size where the plan has several."""
    sizes = {layer.dilated_size for layer in plan.layers if not layer.dense_axes} or {plan.layers[0].dilated_size}
    size = "" if len(sizes) > 1 else next(size_text(size) if len(set(size)) > 1 else str(size[0]) for size in sizes)
    return f"{source.short_name}-dcls{size}"


def print_claims(rules: RuleSet, model_name: str) -> None:
    """`rules check --model`: what every rule claims."""
    model = build_model(resolve_model(model_name), device="meta", offline=True, trust_code=True)
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
        (
            options.init == EXACT
            and (options.kernel_count != AUTO or options.scope != "model" or parse_percent(options.budget) != 1),
            "--init exact takes an element for each cell of the old kernels: leave --kernel-count, --budget, --scope",
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
    _check_authors_conflicts(options, weights)
    if not weights.has_sigma and options.authors_version is None:
        _note(options, f"{where} is taken for version {RELEASED_VERSION} of the authors' layers; see --authors-version")
    return weights


def _check_authors_conflicts(options: ConvertOptions, weights: AuthorsWeights) -> None:
    counts = sorted(set(weights.kernel_counts.counts.values()))
    given = {
        f"--kernel-count {options.kernel_count}": options.kernel_count != AUTO and counts != [options.kernel_count],
        f"--budget {options.budget}": parse_percent(options.budget) != parse_percent(DEFAULT_BUDGET),
        f"--scope {options.scope}": options.scope != "model",
        f"--init {options.init}": options.init != AUTO,
        f"--positions {options.positions}": options.positions != "normal",
        "--calibrate": options.calibrate is not None,
    }
    for option, contradicts in given.items():
        if contradicts:
            raise CheckpointError(
                f"{weights.where}: has elements of its own, with positions, {' or '.join(map(str, counts))} in a "
                f"kernel; leave {option}"
            )


def _plan(
    options: ConvertOptions, ruleset: RuleSet | None, twin: nn.Module, source: ModelSource, weights: Weights
) -> ConversionPlan:
    rebuild = rebuildable_source(twin, source)
    convs = find_convs(twin, options.input_size or stated_input_size(source, twin))
    if convs.macs is None and options.input_size is not None:
        raise PlanError(f"--input-size {size_text(options.input_size)}: {convs.macs_note}")
    plan = plan_conversion(
        convs,
        ruleset or AUTO,
        dilated_size=options.dilated_size,
        kernel_count=_stated_count(options, weights),
        scope=options.scope,
        tie=options.tie,
        budget=options.budget,
        interpolation=options.interpolation,
        strict=options.strict,
        model=rebuild.name if rebuild else None,
        model_args=rebuild.args if rebuild else None,
    )
    if isinstance(weights, AuthorsWeights):
        element_state(weights, plan, options.authors_version)  # what it refuses, a dry run refuses too
    return plan


def _stated_count(options: ConvertOptions, weights: Weights) -> Any:
    if isinstance(weights, AuthorsWeights):
        return weights.kernel_counts
    return EXACT if options.init == EXACT else options.kernel_count


def _carry_out(
    options: ConvertOptions, plan: ConversionPlan, source: ModelSource, weights: Weights, output: Path, step: Any
) -> tuple[ConversionReport, float | None]:
    step("building with pretrained weights" if options.pretrained else "building")
    model, kept = _built(options, source, weights)
    step("converting")
    errors, moved = _convert(options, model, plan, weights)
    _tell_of_initial_values(options, kept)
    step("measuring")
    report = measure_report(model, plan)
    if report != predict_report(plan):
        raise AssertionError(f"{plan.model}: the converted model's counts differ from the plan's")
    report = report.with_fit_errors(errors)
    step(f"writing {output}")
    save_converted(model.eval(), plan, output, report=report, force=options.force)
    return report, moved


def _built(options: ConvertOptions, source: ModelSource, weights: Weights) -> tuple[nn.Module, list[str]]:
    """The model with its weights, and the names that kept their initial values; the authors' weights come later."""
    where, new_classifier = f"checkpoint {options.checkpoint}", options.num_classes is not None
    plain = weights if isinstance(weights, dict) else None
    if plain is not None:
        hollow = build_hollow(source)
        if hollow is not None and fill_(hollow, plain, where, new_classifier=new_classifier):
            plain.clear()  # what the model does not hold need not stay in memory
            return hollow, []
    model = build_model(source, pretrained=options.pretrained, seed=options.seed, trust_code=True)
    kept = [] if plain is None else load_weights_(model, plain, where, new_classifier=new_classifier)
    if plain is not None:
        plain.clear()
    return model, kept


def _convert(
    options: ConvertOptions, model: nn.Module, plan: ConversionPlan, weights: Weights
) -> tuple[dict[str, float], float | None]:
    """The kernels' relative errors, and how far the outputs for random images moved."""
    if isinstance(weights, AuthorsWeights):
        new_classifier = options.num_classes is not None
        kept = start_from_authors_(model, plan, weights, version=options.authors_version, new_classifier=new_classifier)
        _tell_of_initial_values(options, kept)
        return {}, None
    init = options.init if options.init != AUTO else "fit" if _has_weights(options) else "random"
    before = _outputs(model, plan) if init != "random" and _has_weights(options) else None
    calibration = None
    if options.calibrate is not None:
        calibration = calibrate(model, plan, options.calibrate, note=functools.partial(_note, options))
    generator = torch.Generator().manual_seed(options.seed)
    errors = apply_plan_(
        model, plan, init=init, positions=options.positions, generator=generator, calibration=calibration
    )
    return errors, None if before is None else relative_distance(before, _outputs(model, plan))


def _tell_of_initial_values(options: ConvertOptions, kept: Sequence[str]) -> None:
    for name in kept:
        _note(options, f"{name} has another shape in the checkpoint and starts from random values")


def _outputs(model: nn.Module, plan: ConversionPlan) -> Any:
    """For two images of random numbers; None for a model that takes something else."""
    if plan.input_size is None:
        return None
    images = torch.randn(2, *plan.input_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), contextlib.suppress(Exception):  # the model's own code, and a comparison that can be spared
        return model.eval()(images)


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


def _start(options: ConvertOptions, weights: Weights, report: ConversionReport, moved: float | None) -> str:
    """What the new layers start from, in words."""
    if isinstance(weights, AuthorsWeights):
        return "the authors' elements and positions; it gives the outputs of their network"
    if options.init == EXACT:
        source = "the trained weights" if _has_weights(options) else f"random initialisation (seed {options.seed})"
        return f"{source}; every old cell is an element at its place, so that the outputs are the old ones"
    if not _has_weights(options):
        return (
            f"random initialisation (seed {options.seed}), as in the paper; --pretrained or --checkpoint load weights"
        )
    if options.init == "random":
        return "trained weights, but random elements in the new layers"
    how = "reduced to their largest cells" if options.init == "largest" else "with elements fitted to them"
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
    for line in loading_code(report.model).format(folder=output).splitlines():
        console.print(Text(f"    {line}" if line else ""))
