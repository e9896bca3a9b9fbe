"""One job: a network's source, weights, options and start in one record; what is planned and converted by it."""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .depthwise.geometry import size_text
from .errors import CheckpointError, PlanError, listed, shown
from .fitting.calibrate import CalibrationStatistics
from .fitting.counts import counts_by_error
from .fitting.groups import make_layers
from .fitting.images import Calibration, Images, calibrate
from .fitting.warm_start import fit_seed
from .networks.outputs import agreement, relative_distance
from .networks.recognition import known_source, stated_input_size
from .networks.running import evaluating, full_precision, run, unchanged_on_failure
from .networks.sites import ModelConvs, find_convs
from .networks.source import (
    FOREIGN_SOURCES,
    ModelSource,
    build_model,
)
from .networks.tracing import check_same_shapes
from .networks.weights import build_with_state, check_weights, read_weights, with_names_of
from .options import (
    AUTO,
    ERROR,
    EXACT,
    MOST_PIXELS,
    AuthorsVersion,
    Init,
    PlanOptions,
    Positions,
    takes_plan_options,
)
from .planning.budget import parse_percent
from .planning.plan import ConversionPlan, LayerCounts, taken_from
from .planning.planner import make_plan
from .progress import SECONDS_UNSEEN, Notify, is_watched, show_progress, silent
from .reports.report import ConversionReport, Outcome, measure_report, predict_report
from .surgery.authors import (
    RELEASED_VERSION,
    AuthorsWeights,
    element_state,
    sort_weights,
    start_from_authors_,
)
from .surgery.start import LayerErrors, apply_plan_

MANY_LINES = 300_000  # kernels; a core fits some 13,000 a second


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What a job did."""

    model: nn.Module
    report: ConversionReport  # measured on the converted model
    moved: float | None = (
        None  # |new - old| / |old| of the outputs for random images; None where not compared
    )


@dataclass(kw_only=True)
class Job:
    """Which network is converted, from which weights, and how. All is built, read or traced once, when asked for."""

    model: nn.Module | None = None  # in memory, with its weights; None: built from `source`
    source: ModelSource | None = None  # how it is built; may run the user's own code
    pretrained: bool = False  # with the weights that the source's library offers
    weights: Mapping[str, Tensor] | Path | None = (
        None  # a state dict or its file; may be of the authors' layers
    )
    options: PlanOptions = field(default_factory=PlanOptions)
    input_size: Sequence[int] | None = (
        None  # (channels, *spatial) for MACs; None: as the source or a timm model states
    )
    init: Init = "auto"  # "fit" where the kernels are trained, else "random"
    positions: Positions = "normal"  # of "random"
    calibration: Images | Calibration | None = None  # for "fit"
    mean: Sequence[float] | None = (
        None  # of the calibration's folder of images; None: as the network states
    )
    std: Sequence[float] | None = None
    authors_version: AuthorsVersion | None = None  # of elements in `weights`
    seed: int = 0
    offline: bool = False  # no download
    device: str | None = (
        None  # on which a network that is built here is fitted and compared; None: the CPU
    )
    notify: Notify = silent  # told about progress
    note: Notify = silent  # told what a user should know
    _read: Calibration | None = None  # the images of the calibration
    _statistics: CalibrationStatistics | None = (
        None  # of the calibration, by the network, when counts were measured
    )

    @property
    def trained(self) -> bool:
        """Whether the network's kernels are worth keeping."""
        return self.model is not None or self.pretrained or self.weights is not None

    @property
    def how(self) -> Init:
        """`init`, decided."""
        return self.init if self.init != AUTO else "fit" if self.trained else "random"

    @property
    def where(self) -> str:
        """What messages call the weights."""
        return (
            "the state dict" if isinstance(self.weights, Mapping) else f"checkpoint {self.weights}"
        )

    @property
    def new_classifier(self) -> bool:
        return self.source is not None and "num_classes" in self.source.args

    @cached_property
    def meta(self) -> nn.Module:
        """The network without weights, to plan from; a model in memory itself."""
        if self.model is not None:
            return self.model
        assert self.source is not None
        return build_model(
            self.source, device="meta", seed=self.seed, offline=self.offline, trust_code=True
        )

    @cached_property
    def rebuilt_from(self) -> ModelSource | None:
        """How a checkpoint says that the network is built; None where only its user can."""
        if self.model is not None or self.source is None or self.source.kind in FOREIGN_SOURCES:
            return known_source(self.meta)
        return self.source

    @cached_property
    def convs(self) -> ModelConvs:
        """The network's convolutions, traced at the input size."""
        source = self.rebuilt_from
        return find_convs(
            self.meta, self.input_size or (stated_input_size(source, self.meta) if source else None)
        )

    @cached_property
    def elements(self) -> AuthorsWeights | None:
        """Elements that `weights` has already, of the authors' layers; they overrule `init` and the counts."""
        if self.weights is None:
            return None
        elements = sort_weights(self.state, self.where)
        if elements is None:
            if self.authors_version is not None:
                raise CheckpointError(
                    f"{self.where}: has no layers of the authors' package; leave --authors-version"
                )
            return None
        for option, stated in [
            (f"--init {self.init}", self.init != AUTO),
            (f"--positions {self.positions}", self.positions != "normal"),
            ("--calibrate", self.calibration is not None),
        ]:
            if stated:
                raise CheckpointError(
                    f"{self.where}: has elements of its own, with positions; leave {option}"
                )
        if not elements.has_sigma and self.authors_version is None:
            taken = f"is taken for version {RELEASED_VERSION} of the authors' layers"
            self.note(f"{self.where} {taken}; see --authors-version")
        return elements

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The entries of `weights`, under the network's names; emptied when the network has taken them."""
        assert self.weights is not None
        self.notify("reading weights")
        return with_names_of(self.meta, read_weights(self.weights))

    @cached_property
    def network(self) -> nn.Module:
        """The network with the weights to start from."""
        if self.model is not None or self.source is None:
            return self.meta
        self.notify("building with pretrained weights" if self.pretrained else "building")
        if self.weights is None or self.elements is not None:
            return build_model(
                self.source, pretrained=self.pretrained, seed=self.seed, trust_code=True
            ).to(self.device)
        network, kept = build_with_state(
            self.source,
            self.state,
            self.where,
            meta=self.meta,
            seed=self.seed,
            new_classifier=self.new_classifier,
        )
        self._say_kept(kept)
        self.state.clear()
        return network.to(self.device)

    def plan(self, options: PlanOptions | None = None) -> ConversionPlan:
        """The plan, with other options than the job's if given; for scope "error" alone, the network is built."""
        options = self._with_counts(options or self.options)
        source = self.rebuilt_from
        name, args = (source.name, source.args) if source else (None, None)
        plan = make_plan(self.convs, options, model=name, model_args=args)
        if not (isinstance(options.kernel_count, LayerCounts) and options.kernel_count.solved):
            check_same_shapes(self.convs.trace, plan.windows)
        if self.elements is not None:
            element_state(self.elements, plan, self.authors_version)
        elif (
            self.offline and self.weights is not None
        ):  # which will not be built, but would be refused
            check_weights(self.meta, self.state, self.where, new_classifier=self.new_classifier)
        if plan.macs is None and self.input_size is not None and self.model is None:
            raise PlanError(f"input size {size_text(self.input_size)}: {plan.macs_note}")
        return plan

    def plan_again(self, plan: ConversionPlan) -> ConversionPlan:
        """A plan of another checkpoint, for this network. PlanError says in what it is another one than the plan's."""
        source = self.rebuilt_from
        own = (source.name, source.args) if source else (None, {})
        planned = (plan.model, plan.model_args)
        if own != planned:
            raise PlanError(f"the plan is for {_described(*planned)}, not for {_described(*own)}")
        make_layers(self.meta, plan)
        params = sum(parameter.numel() for parameter in self.meta.parameters())
        if params != plan.params:
            raise PlanError(
                f"the plan is for a model of {plan.params:,} parameters, this one has {params:,}"
            )
        return replace(plan, folded=False)

    def convert(
        self, plan: ConversionPlan | None = None, *, model: nn.Module | None = None
    ) -> Conversion:
        """Carry out a plan, or the job's own, on the network or its copy `model`; on any error, that is as before."""
        plan = plan or self.plan()
        model = model or self.network
        self.notify("converting")
        elements = self.elements
        images = self._images(plan)
        compared = elements is None and self.trained and self.how != "random"
        # What the conversion writes into: elements come with all other weights; images change biases and running means.
        written = (
            [*model.parameters(), *model.buffers()]
            if elements is not None or images is not None
            else []
        )
        written = [tensor for tensor in written if elements is not None or tensor.dim() == 1]
        with unchanged_on_failure(model, values=written):
            held_out = [] if images is None else images.held_out
            before = (
                _answers(model, plan, [*held_out, *map(_shifted, held_out)]) if compared else None
            )
            kept: list[str] = []
            errors = LayerErrors(kernel={}, output={})
            if elements is not None:
                kept = start_from_authors_(
                    model,
                    plan,
                    elements,
                    version=self.authors_version,
                    new_classifier=self.new_classifier,
                )
            else:
                lines = sum(layer.lines for layer in plan.layers)
                if self.how == "fit" and lines > MANY_LINES and self.device is None:
                    self.note(
                        f"fitting elements to {lines:,} kernels takes minutes on a CPU; --device cuda is faster"
                    )
                errors = apply_plan_(
                    model,
                    plan,
                    init=self.how,
                    positions=self.positions,
                    generator=torch.Generator().manual_seed(self.seed),
                    calibration=self._statistics
                    if self._statistics and model is self.network
                    else images,
                    note=self.note,
                    notify=self.notify,
                )
            report = measure_report(model, plan)
            if report != predict_report(plan):
                raise AssertionError(
                    f"{plan.model}: the converted model's counts differ from the plan's"
                )
            after = _answers(model, plan, held_out) if compared else None
        self._say_kept(kept)
        if before is None or after is None:
            report = report.with_errors(errors.kernel, errors.output, reasons=errors.reasons)
            return Conversion(model=model, report=report)
        random, answers = before
        new_random, new = after
        old = answers[: len(held_out)]
        shifted = answers[len(held_out) :]
        outcome = Outcome(
            kernel_error=sum(errors.kernel.values()) / len(errors.kernel)
            if errors.kernel
            else None,
            images=sum(map(len, held_out)),
            **taken_from(agreement(old, new), Outcome),
            shifted=agreement(old, shifted) if held_out else None,
        )
        moved = None if random is None else relative_distance(random, new_random)
        report = report.with_errors(errors.kernel, errors.output, outcome, reasons=errors.reasons)
        return Conversion(model=model, report=report, moved=moved)

    def _say_kept(self, names: Sequence[str]) -> None:
        for name in names:
            self.note(f"{name} has another shape in the checkpoint and starts from random values")

    def _with_counts(self, options: PlanOptions) -> PlanOptions:
        """The options with the counts that elements, an exact start or the scope "error" decide."""
        stated_of = (
            options.kernel_count != AUTO,
            options.scope != AUTO,
            parse_percent(options.budget) != 1,
        )
        stated = list(itertools.compress(("kernel count", "scope", "budget"), stated_of))
        leave = f"leave {' and '.join(stated)}"
        if self.elements is not None:
            counts = set(self.elements.kernel_counts.counts.values())
            if stated and (stated != ["kernel count"] or counts != {options.kernel_count}):
                own = f"has elements of its own, {listed(sorted(counts))} in a kernel"
                raise CheckpointError(f"{self.where}: {own}; {leave}")
            return replace(options, kernel_count=self.elements.kernel_counts)
        if self.init == EXACT:
            if stated and options.kernel_count != EXACT:
                raise PlanError(
                    f"an exact start takes an element for each cell of the old kernels: {leave}"
                )
            return replace(options, kernel_count=EXACT)
        if (options.scope, options.kernel_count, self.how) == (
            AUTO,
            AUTO,
            "fit",
        ) and self.calibration is not None:
            options = replace(options, scope=ERROR)
        if options.scope != ERROR or options.kernel_count != AUTO:
            return options
        if self.how != "fit":
            raise PlanError(
                f"scope {ERROR!r} is for elements fitted to trained kernels, not for {self.how} ones"
            )
        base = make_plan(self.convs, replace(options, scope="model"))
        check_same_shapes(self.convs.trace, base.windows)  # before minutes of measuring
        images = self._images(base)
        seed = fit_seed(torch.Generator().manual_seed(self.seed))
        by_error, self._statistics = counts_by_error(
            self.network, self.convs, options, seed=seed, calibration=images, notify=self.notify
        )
        return replace(options, kernel_count=by_error)

    def _images(self, plan: ConversionPlan) -> Calibration | None:
        """The calibration's, read once."""
        if self._read is None and self.calibration is not None:
            options: dict[str, Any] = {"mean": self.mean, "std": self.std, "note": self.note}
            self._read = calibrate(self.network, plan, self.calibration, **options)
        return self._read


def _described(name: str | None, arguments: Mapping[str, Any]) -> str:
    stated = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return shown(name or "a model that only its user can build") + (
        f" with {shown(stated)}" if stated else ""
    )


@full_precision()
def _answers(
    model: nn.Module, plan: ConversionPlan, batches: Sequence[Tensor]
) -> tuple[Any, list[Any]]:
    """What a model gives for two random images (None where it takes something else), and for some."""
    random = None
    with evaluating(model):
        size = plan.input_size
        on_meta = any(tensor.is_meta for tensor in model.parameters())
        if size is not None and not on_meta and math.prod(size[1:]) <= MOST_PIXELS:
            noise = torch.randn(2, *size, generator=torch.Generator().manual_seed(0), device="cpu")
            with contextlib.suppress(
                Exception
            ):  # the model's own code, and a comparison to be spared
                random = run(model, noise)
        return random, [run(model, batch) for batch in batches]


def _shifted(images: Tensor) -> Tensor:
    """By one pixel to the right, where the first column is repeated."""
    return torch.cat([images[..., :1], images[..., :-1]], dim=-1)


@takes_plan_options
def convert_(
    model: nn.Module,
    *,
    init: Init = "auto",
    positions: Positions = "normal",
    calibration: Images | Calibration | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
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
        positions: For "random": "normal" is N(0, 0.5 cells), "kernel" is uniform over the old kernel, "uniform" over
            the window.
        calibration: For "fit": images, as in `calibrate`, or what it gave; the outputs then count instead of the
            kernels.
        mean, std: As in `calibrate`, for a folder of images.
        input_size: (channels, rows, columns) for MACs; without it, the size that a timm model states.
        seed: For random positions. The global generator is not touched.
        progress: Show on stderr what is being done, where it takes more than two seconds: a bar with the time left on
            a terminal, else lines. None shows it on a terminal and in a notebook.
        planning: dilated_size, kernel_count, rules, scope, tie, budget, interpolation and strict, as in
            `plan_conversion`. With a calibration, the scope "auto" is "error".

    Returns:
        The report, measured on the converted model. `report.layers[0].kernel_count`, `report.params.after` and so on;
        `save_converted(model, report.plan, folder)` writes a checkpoint.

    Raises:
        DclsConvertError: With one line that says what does not fit; the model is then unchanged.
    """
    job = Job(
        model=model,
        options=PlanOptions(**planning),
        input_size=input_size,
        init=init,
        positions=positions,
        calibration=calibration,
        mean=mean,
        std=std,
        seed=seed,
    )
    watched = is_watched() if progress is None else progress
    shown = (
        show_progress(type(model).__name__, wait=SECONDS_UNSEEN)
        if watched
        else contextlib.nullcontext(silent)
    )
    with shown as job.notify:
        return job.convert().report


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
    state = weights if isinstance(weights, Mapping) else Path(weights)
    options = PlanOptions(**planning)
    job = Job(
        model=model, weights=state, options=options, input_size=input_size, authors_version=version
    )
    if sort_weights(job.state, job.where) is None:
        raise CheckpointError(
            f"{job.where}: has no layers of the authors' package, with a P beside the weight"
        )
    return job.convert().report
