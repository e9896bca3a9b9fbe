"""The one conversion pipeline: plan, place, fit, measure. `convert_` and the command line are thin around it."""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError, PlanError, listed, shown
from .fitting.counts import counts_by_error
from .fitting.groups import make_layers
from .fitting.images import Calibration, Images, calibrate
from .fitting.warm_start import fit_seed
from .networks.outputs import relative_distance, same_top1
from .networks.running import evaluating, reproducible, run, unchanged_on_failure
from .networks.sites import ModelConvs, find_convs
from .networks.source import ModelSource, build_hollow, build_model, known_source, stated_input_size, with_names_of
from .networks.tracing import check_same_shapes
from .networks.weights import checked_entries, fill_, load_weights_, read_weights
from .options import (
    AUTO,
    ERROR,
    EXACT,
    MOST_PIXELS,
    SCOPES,
    AuthorsVersion,
    Init,
    PlanOptions,
    Positions,
    takes_plan_options,
)
from .planning.budget import parse_percent
from .planning.plan import ConversionPlan, LayerCounts
from .planning.planner import make_plan
from .progress import SECONDS_UNSEEN, Notify, is_watched, show_progress, silent
from .reports.report import ConversionReport, Outcome, measure_report, predict_report
from .surgery.authors import AuthorsWeights, element_state, sort_weights, start_from_authors_
from .surgery.start import apply_plan_


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What the new layers start from."""

    init: Init = "auto"  # "auto" is "fit" where the kernels are trained, else "random"
    trained: bool = True  # whether the model's kernels are worth keeping
    positions: Positions = "normal"  # of "random"
    calibration: Images | Calibration | None = None  # for "fit"
    seed: int = 0
    elements: AuthorsWeights | None = None  # of a checkpoint that has elements already; overrules the rest
    authors_version: AuthorsVersion | None = None  # of those elements

    @property
    def how(self) -> Init:
        """`init`, decided."""
        return self.init if self.init != AUTO else "fit" if self.trained else "random"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What the pipeline did."""

    report: ConversionReport  # measured on the converted model
    kept: tuple[str, ...] = ()  # names of the classifier that kept their initial values
    moved: float | None = None  # |new - old| / |old| of the outputs for random images; None where not compared


def plan_for(
    model: nn.Module,
    options: PlanOptions,
    start: Start,
    *,
    source: ModelSource | None = None,
    input_size: Sequence[int] | None = None,
    convs: ModelConvs | None = None,
    notify: Notify = silent,
) -> ConversionPlan:
    """The plan for a model; DclsConvertError where it could not be carried out.

    Args:
        model: Not changed; may be on the meta device, but for scope "error".
        options, source: What is asked for, and how the model is built again.
        start: Its elements, or an exact start, decide the kernel counts.
        input_size: (channels, *spatial) for MACs; without it, the size that the source or a timm model states.
        convs: What `convs_for` found, where it was asked before.
        notify: Told about progress.
    """
    convs = convs or convs_for(model, source, input_size)
    options = replace(options, kernel_count=_kernel_count(options, start))
    if options.scope == ERROR and options.kernel_count == AUTO:
        options = replace(options, kernel_count=_counts_by_error(model, convs, options, start, notify))
    plan = make_plan(convs, options, model=source.name if source else None, model_args=source.args if source else None)
    check_same_shapes(model, plan.windows, plan.input_size, convs.output_sizes)
    if start.elements is not None:
        element_state(start.elements, plan, start.authors_version)
    return plan


def convs_for(model: nn.Module, source: ModelSource | None, input_size: Sequence[int] | None = None) -> ModelConvs:
    """What is planned from: the model's convolutions at this input size, or at the size that the source states."""
    return find_convs(model, input_size or (stated_input_size(source, model) if source else None))


def _counts_by_error(
    model: nn.Module, convs: ModelConvs, options: PlanOptions, start: Start, notify: Notify
) -> LayerCounts:
    if start.how != "fit":
        raise PlanError(f"scope {ERROR!r} is for elements that are fitted to trained kernels, not for {start.how} ones")
    generator = torch.Generator().manual_seed(start.seed)
    base = make_plan(convs, replace(options, scope=SCOPES[0]))
    images = None if start.calibration is None else calibrate(model, base, start.calibration)
    return counts_by_error(model, convs, options, seed=fit_seed(generator), calibration=images, notify=notify)


def plan_again(model: nn.Module, plan: ConversionPlan, source: ModelSource | None) -> ConversionPlan:
    """A plan of another checkpoint, for this model. PlanError says in what it is another model than the plan's."""
    found, wanted = (source.name, source.args) if source else (None, {}), (plan.model, plan.model_args)
    if found != wanted:
        raise PlanError(f"the plan is for {_described(*wanted)}, not for {_described(*found)}")
    make_layers(model, plan)
    params = sum(parameter.numel() for parameter in model.parameters())
    if params != plan.params:
        raise PlanError(f"the plan is for a model of {plan.params:,} parameters, this one has {params:,}")
    return replace(plan, folded=False)


def _described(name: str | None, arguments: Mapping[str, Any]) -> str:
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return shown(name or "a model that only its user can build") + (f" with {shown(given)}" if given else "")


def build_with_weights(
    source: ModelSource,
    state: dict[str, Tensor] | None,
    *,
    where: str,
    pretrained: bool = False,
    seed: int = 0,
    new_classifier: bool = False,
) -> tuple[nn.Module, list[str]]:
    """The network to convert, and the names that kept their initial values.

    Args:
        source, pretrained, seed: As in `build_model`; may run the user's own code.
        state: Its weights, where they come from a file; emptied, so that they need not stay in memory.
        where, new_classifier: As in `load_weights_`.
    """
    if state is None:
        return build_model(source, pretrained=pretrained, seed=seed, trust_code=True), []
    hollow, kept = build_hollow(source), list[str]()
    if hollow is None or not fill_(hollow, state, where, new_classifier=new_classifier):
        hollow = build_model(source, seed=seed, trust_code=True)
        kept = load_weights_(hollow, state, where, new_classifier=new_classifier)
    state.clear()
    return hollow, kept


def carry_out_(
    model: nn.Module,
    plan: ConversionPlan,
    start: Start,
    *,
    new_classifier: bool = False,
    note: Notify = silent,
    notify: Notify = silent,
) -> Conversion:
    """Convert a model by its plan, and measure the result.

    Args:
        model: With the weights to start from; changed in place.
        plan, start: As in `plan_for`.
        new_classifier: The model was built for another number of classes than the elements' checkpoint.
        note: Told what a user should know.
        notify: Told about progress.

    Raises:
        DclsConvertError: In one line. Whatever is raised, the model is then unchanged.
    """
    if start.elements is not None:
        with unchanged_on_failure(model, values=[*model.parameters(), *model.buffers()]):
            kept = start_from_authors_(
                model, plan, start.elements, version=start.authors_version, new_classifier=new_classifier
            )
            return Conversion(report=_measured(model, plan), kept=tuple(kept))
    images = None if start.calibration is None else calibrate(model, plan, start.calibration, note=note)
    # Calibration also changes biases and running means.
    values = (
        [] if images is None else [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dim() == 1]
    )
    with unchanged_on_failure(model, values=values):
        before = _answers(model, plan, images) if start.trained and start.how != "random" else None
        errors = apply_plan_(
            model,
            plan,
            init=start.how,
            positions=start.positions,
            generator=torch.Generator().manual_seed(start.seed),
            calibration=images,
            note=note,
            notify=notify,
        )
        report = _measured(model, plan)
        if before is None:
            return Conversion(report=report.with_fit_errors(errors))
        after = _answers(model, plan, images)
    outcome = _outcome(errors, before, after, images)
    moved = None if before.random is None else relative_distance(before.random, after.random)
    return Conversion(report=report.with_fit_errors(errors, outcome), moved=moved)


def _measured(model: nn.Module, plan: ConversionPlan) -> ConversionReport:
    report = measure_report(model, plan)
    if report != predict_report(plan):
        raise AssertionError(f"{plan.model}: the converted model's counts differ from the plan's")
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    """What a model gives."""

    random: Any  # for two images of random numbers; None for a model that takes something else
    held_out: list[Any]  # for the batches that calibration holds out


@reproducible()
def _answers(model: nn.Module, plan: ConversionPlan, images: Calibration | None) -> _Answers:
    random = None
    with evaluating(model):
        size, hollow = plan.input_size, any(tensor.is_meta for tensor in model.parameters())
        if size is not None and not hollow and math.prod(size[1:]) <= MOST_PIXELS:
            noise = torch.randn(2, *size, generator=torch.Generator().manual_seed(0), device="cpu")
            with contextlib.suppress(Exception):  # the model's own code, and a comparison to be spared
                random = run(model, noise)
        held_out = [] if images is None else [run(model, batch) for batch in images.held_out]
    return _Answers(random=random, held_out=held_out)


def _outcome(errors: Mapping[str, float], before: _Answers, after: _Answers, images: Calibration | None) -> Outcome:
    compared = bool(before.held_out)
    return Outcome(
        kernel_error=sum(errors.values()) / len(errors) if errors else None,
        images=sum(map(len, images.held_out)) if images else 0,
        same_top1=same_top1(before.held_out, after.held_out) if compared else None,
        output_error=relative_distance(before.held_out, after.held_out) if compared else None,
    )


@takes_plan_options
def convert_(
    model: nn.Module,
    *,
    init: Init = "auto",
    positions: Positions = "normal",
    calibration: Images | Calibration | None = None,
    input_size: Sequence[int] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **planning: Any,
) -> ConversionReport:
    """Replace the matching convolutions of `model` by DCLS layers, in place, and report what it costs.

    Args:
        model: Any module; its device, dtype, mode, hooks and frozen parameters stay as they are.
        init: "fit" (also "auto") starts from the elements whose kernels are closest to the model's own; "largest" from
            the cells of every kernel with the most energy over its tie group; "random" from random positions, as the
            paper trains from scratch; "exact" gives every kernel as many elements as it had cells, at their places, so
            that the outputs stay as they are at more parameters.
        positions: For "random": "normal" is N(0, 0.5 cells), "uniform" is over the window.
        calibration: For "fit": a folder of images, or what `calibrate` gave; the outputs then count instead of the
            kernels.
        input_size: (channels, rows, columns) for MACs; without it, the size that a timm model states.
        seed: For random positions. The global generator is not touched.
        progress: Show on stderr what is being done, where it takes more than two seconds: a bar with the time left on
            a terminal, else lines. None shows it on a terminal and in a notebook.
        planning: dilated_size, kernel_count, rules, scope, tie, budget, interpolation and strict, as in
            `plan_conversion`.

    Returns:
        The report, measured on the converted model. `report.layers[0].kernel_count`, `report.params.after` and so on;
        `save_converted(model, report.plan, folder)` writes a checkpoint.

    Raises:
        DclsConvertError: With one line that says what does not fit; the model is then unchanged.
    """
    options, source = PlanOptions(**planning), known_source(model)
    start = Start(init=init, positions=positions, calibration=calibration, seed=seed)
    with _progress(model, progress) as notify:
        plan = plan_for(model, options, start, source=source, input_size=input_size, notify=notify)
        return carry_out_(model, plan, start, notify=notify).report


def _progress(model: nn.Module, wanted: bool | None) -> contextlib.AbstractContextManager[Notify]:
    if not (is_watched() if wanted is None else wanted):
        return contextlib.nullcontext(silent)
    return show_progress(type(model).__name__, wait=SECONDS_UNSEEN)


@takes_plan_options
def convert_from_authors_(
    model: nn.Module,
    weights: Mapping[str, Tensor] | str | Path,
    *,
    version: AuthorsVersion | None = None,
    input_size: Sequence[int] | None = None,
    **planning: Any,
) -> ConversionReport:
    """Convert `model` in place to what was trained with the authors' package, with the same outputs.

    Args:
        model: The unconverted network, such as `timm.create_model("convnext_tiny")`.
        weights: A state dict whose layers have `weight` (O, I, E) and `P` (axes, O, I, E), or the file that holds it.
            Names may be those of the original ConvNeXt. Elements and their count come from here.
        version: Without SIG: "v0" (also None, as released) or "v1", which differ in the order of the axes.
        input_size: As in `convert_`.
        planning: dilated_size, rules, tie, interpolation and strict, as in `plan_conversion`. The layers converted
            must be those that have positions. The file does not state the window and the interpolation of the
            training. With SIG, elements are normalised over the window, and interpolation is "triangle" for their
            version max and "gaussian" for gauss; without SIG, a larger window gives the same outputs.

    Returns:
        As `convert_`.

    Raises:
        DclsConvertError: With one line that says what does not fit; the model is then unchanged.
    """
    where = "the state dict" if isinstance(weights, Mapping) else f"checkpoint {weights}"
    state = checked_entries(weights, where) if isinstance(weights, Mapping) else read_weights(weights)
    elements = sort_weights(with_names_of(model, state), where)
    if elements is None:
        raise CheckpointError(f"{where}: has no layers of the authors' package, with a P beside the weight")
    start = Start(elements=elements, authors_version=version)
    plan = plan_for(model, PlanOptions(**planning), start, source=known_source(model), input_size=input_size)
    return carry_out_(model, plan, start).report


def _kernel_count(options: PlanOptions, start: Start) -> Any:
    """What decides the counts: the elements that there are, the cells of the old kernels, or the options."""
    given = (options.kernel_count != AUTO, options.scope != SCOPES[0], parse_percent(options.budget) != 1)
    stated = list(itertools.compress(("kernel count", "scope", "budget"), given))
    leave = f"leave {' and '.join(stated)}"
    if start.elements is not None:
        counts = set(start.elements.kernel_counts.counts.values())
        if stated and (stated != ["kernel count"] or counts != {options.kernel_count}):
            raise CheckpointError(
                f"{start.elements.where}: has elements of its own, {listed(sorted(counts))} in a kernel; {leave}"
            )
        return start.elements.kernel_counts
    if start.init != EXACT:
        return options.kernel_count
    if stated and options.kernel_count != EXACT:
        raise PlanError(f"an exact start takes an element for each cell of the old kernels: {leave}")
    return EXACT
