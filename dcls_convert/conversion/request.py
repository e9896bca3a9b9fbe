"""The request for a conversion, from the command line or from Python, in three parts.

`NetworkRequest` names the network and its weights, `PlanOptions` decides what to plan, and
`StartRequest` how the new layers start. A `ConversionRequest` contains all three. It resolves
"auto" where the request alone decides. Where the network decides, the planner resolves "auto".

Nothing is read or built here, and nothing heavy is imported, so that the command line refuses
conflicting options at once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..errors import PlanError
from ..geometry import plain_numbers
from ..options import (
    AUTO,
    ERROR_SCOPE,
    EXACT,
    INITS,
    POSITIONS,
    AuthorsVersion,
    Init,
    Positions,
    check_choice,
    parse_percent,
)
from ..planning.plan_options import PlanOptions
from ..text import join_with_and, shortened

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..running.arguments import ExampleInputs
    from ..starts.images import Calibration, Images

MAX_SEED = 2**63 - 1  # largest signed 64-bit integer; torch.Generator takes it
# Names of starts that are not in `Init`: from elements in the weights, from a converted network.
FROM_ELEMENTS = "elements"
FROM_CONVERTED = "converted"
NEEDS_WEIGHTS = "needs trained weights: pretrained ones, or a weights file"


@dataclass(frozen=True, kw_only=True)
class NetworkRequest:
    """The network to convert, its weights, and its inputs.

    Raises:
        PlanError: Values contradict each other, or the seed is out of bounds.
    """

    # A module in memory with its weights, or a MODEL of the command line ("timm:convnext_tiny").
    model: "nn.Module | str"
    # Classes and input channels of a named model; None for its defaults.
    num_classes: int | None = None
    in_chans: int | None = None
    model_kwargs: Mapping[str, Any] | None = None  # more arguments of its function
    pretrained: bool = False  # whether to load the weights that the model's library offers
    # A state dict or its file; its layers may be layers of the authors' package.
    weights: "Mapping[str, Tensor] | Path | None" = None
    # Which state dict of `weights`, such as "ema", or which names in it, such as "encoder_q".
    checkpoint_key: str | None = None
    # (channels, *spatial) at which MACs are counted; None for the size that the model states.
    input_size: Sequence[int] | None = None
    example_inputs: "ExampleInputs | None" = None  # for a network that takes anything but images
    seed: int = 0  # of all random values, in the network and in new layers
    device: str | None = None  # device to fit and compare a named model on; None for the CPU

    def __post_init__(self) -> None:
        for name in ("seed", "input_size"):
            object.__setattr__(self, name, plain_numbers(getattr(self, name)))
        if self.pretrained and self.weights is not None:
            raise PlanError("pretrained weights and a weights file exclude each other")
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral):
            raise PlanError(f"seed {shortened(repr(self.seed))} must be an integer")
        if not 0 <= self.seed <= MAX_SEED:
            raise PlanError(f"seed {self.seed} must be from 0 to {MAX_SEED}")

    @property
    def trained(self) -> bool:
        """Whether the network has trained weights, as is assumed of a network in memory."""
        return not isinstance(self.model, str) or self.pretrained or self.weights is not None


@dataclass(frozen=True, kw_only=True)
class StartRequest:
    """The start of the new layers.

    Raises:
        PlanError: A name is not known, or values contradict each other.
    """

    init: Init = "auto"  # "fit" if the kernels are trained, else "random"
    positions: Positions = "normal"  # for the start "random"
    calibration: "Images | Calibration | None" = None  # for the start "fit"
    # Images to compare outputs on; None for some of the calibration's images.
    held_out: "Images | None" = None
    # Most images to read from the calibration's folder; None for CALIBRATION_IMAGES.
    most_images: int | None = None
    # Normalisation of the images in the calibration's folder; None for what the model states.
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    needs_authors_elements: bool = False  # whether the weights must have the authors' elements
    authors_version: AuthorsVersion | None = None  # of the authors' layers in the weights

    def __post_init__(self) -> None:
        check_choice("version", self.authors_version, (None, *get_args(AuthorsVersion)))
        check_choice("init", self.init, INITS)
        check_choice("positions", self.positions, POSITIONS)
        if self.calibration is not None and (self.mean is None) != (self.std is None):
            raise PlanError("calibration: give mean and std, or neither")


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """A complete request for a conversion.

    Raises:
        PlanError: Options contradict each other.
    """

    network: NetworkRequest
    options: PlanOptions = field(default_factory=PlanOptions)
    start: StartRequest = field(default_factory=StartRequest)
    # Folder whose plan is carried out (for records only); None for a new plan.
    plan_folder: Path | None = None
    dry_run: bool = False  # nothing is downloaded, and the network is not built with its weights
    command: str | None = None  # the command line as typed; None from Python

    def __post_init__(self) -> None:
        _refuse_conflicts(self)

    @property
    def resolved_init(self) -> Init:
        """The start's `init`, with "auto" resolved."""
        if self.start.init != AUTO:
            return self.start.init
        return "fit" if self.network.trained else "random"

    @property
    def counts_follow_errors(self) -> bool:
        """Whether the layers' errors decide the counts that no rule states, as in scope "error"."""
        if self.options.kernel_count != AUTO:
            return False
        if self.options.scope == AUTO:
            return self.start.calibration is not None
        return self.options.scope == ERROR_SCOPE

    @property
    def resolved_options(self) -> PlanOptions:
        """The planning options; an exact start needs exact counts."""
        if self.resolved_init == EXACT:
            return replace(self.options, kernel_count=EXACT)
        return self.options


@dataclass(frozen=True, kw_only=True)
class RequestWeights:
    """The weights that a request states, under the names of its network's tensors."""

    where: str  # name of the weights in messages
    # Elements of the authors' layers, by layer name and entry (see `authors.py`); may be empty.
    elements: "Mapping[str, Mapping[str, Tensor]]"
    entries: "Mapping[str, Tensor]"  # all other tensors
    # Names of the tensors of a new classifier, which `entries` lacks.
    new_classifier: Collection[str]


def options_without_effect(request: ConversionRequest) -> list[str]:
    """Return a sentence for each stated option that the other options make ineffective."""
    sentences = []
    start = request.start
    if request.network.weights is None and start.authors_version is not None:
        sentences.append("the authors' version has no effect without a weights file")
    if start.positions != "normal" and request.resolved_init != "random":
        sentences.append(
            f"positions {start.positions!r} have no effect: they are for init 'random'"
        )
    if start.calibration is None:
        for_calibration = {
            "held_out": start.held_out,
            "the number of images": start.most_images,
            "mean": start.mean,
            "std": start.std,
        }
        for name, value in for_calibration.items():
            if value is not None:
                sentences.append(f"{name} has no effect without images to calibrate with")
    return sentences


def _refuse_conflicts(request: ConversionRequest) -> None:
    """Refuse (PlanError) options that contradict each other."""
    options = request.options
    network = request.network
    if request.plan_folder is not None and (
        options != PlanOptions() or network.input_size is not None
    ):
        raise PlanError("a plan is applied unchanged; omit the planning options")
    stated = options_that_decide_counts(options)
    if request.resolved_init == EXACT and options.kernel_count != EXACT and stated:
        raise PlanError(
            "an exact start takes an element for each cell of the old kernels: "
            f"omit {join_with_and(stated)}"
        )
    if request.start.init in ("fit", "largest") and not network.trained:
        raise PlanError(f"init {request.resolved_init!r} {NEEDS_WEIGHTS}")
    for_fits = {
        f"scope {ERROR_SCOPE!r}": options.scope == ERROR_SCOPE,
        "calibration": request.start.calibration is not None,
    }
    for name, is_stated in for_fits.items():
        if is_stated and not network.trained:
            raise PlanError(f"{name} {NEEDS_WEIGHTS}")
        if is_stated and request.resolved_init != "fit":
            raise PlanError(f"{name} is for init 'fit', not for {request.resolved_init!r}")
        if is_stated and request.dry_run:
            raise PlanError(f"{name} needs kernels and images, and a dry run reads neither")


def options_that_decide_counts(options: PlanOptions) -> list[str]:
    """Return the options, as named in messages, with which the user stated the kernel counts."""
    stated = []
    if options.kernel_count != AUTO:
        stated.append("kernel count")
    if options.scope != AUTO:
        stated.append("scope")
    if parse_percent(options.budget) != 1:
        stated.append("budget")
    return stated
