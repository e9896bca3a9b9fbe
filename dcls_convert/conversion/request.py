"""The request for one conversion, as plain values, and a check that its options do not conflict.

`RequestWeights` holds the weights that a request names, once they are read.

Nothing is read or built here, and nothing heavy is imported, so that the command line refuses
conflicting options at once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
NEEDS_WEIGHTS = "needs trained weights: pretrained ones, or a weights file"


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """Which network is converted, from which weights, and how.

    Raises:
        PlanError: Options contradict each other.
    """

    # A module in memory with its weights, or a MODEL of the command line ("timm:convnext_tiny").
    model: "nn.Module | str"
    # Classes and input channels of a named model; None for its defaults.
    num_classes: int | None = None
    in_chans: int | None = None
    model_kwargs: Mapping[str, Any] | None = None  # more arguments of its function
    pretrained: bool = False  # with the weights that the model's library offers
    # A state dict or its file; its layers may be those of the authors' package.
    weights: "Mapping[str, Tensor] | Path | None" = None
    # Which state dict of `weights`, such as "ema", or which names in it, such as "encoder_q".
    checkpoint_key: str | None = None
    options: PlanOptions = field(default_factory=PlanOptions)
    # (channels, *spatial) at which MACs are counted; None for the size that the model states.
    input_size: Sequence[int] | None = None
    example_inputs: "ExampleInputs | None" = None  # for a network that takes anything but images
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
    needs_authors_elements: bool = False  # whether `weights` must have elements of their layers
    authors_version: AuthorsVersion | None = None  # of the authors' layers in `weights`
    seed: int = 0
    # Folder whose plan is carried out, for the records; None for a new plan.
    plan_folder: Path | None = None
    dry_run: bool = False  # nothing is downloaded, and the network is not built with its weights
    command: str | None = None  # the command line as typed; None from Python
    device: str | None = None  # where a named model is fitted and compared; None for the CPU

    def __post_init__(self) -> None:
        for name in ("seed", "input_size"):
            object.__setattr__(self, name, plain_numbers(getattr(self, name)))
        _refuse_conflicts(self)

    @property
    def trained(self) -> bool:
        """Whether the network has trained weights; one in memory is assumed to have them."""
        return not isinstance(self.model, str) or self.pretrained or self.weights is not None

    @property
    def start(self) -> Init:
        """`init`, with "auto" resolved."""
        if self.init != AUTO:
            return self.init
        return "fit" if self.trained else "random"


@dataclass(frozen=True, kw_only=True)
class RequestWeights:
    """The weights that a request states, under the names of its network's tensors."""

    where: str  # their name in messages
    # Elements of the authors' layers, if there are any, by layer name and kind: see `authors.py`.
    elements: "Mapping[str, Mapping[str, Tensor]]"
    entries: "Mapping[str, Tensor]"  # all other tensors
    # Names of the tensors of a new classifier, which `entries` lacks.
    new_classifier: Collection[str]


def options_without_effect(request: ConversionRequest) -> list[str]:
    """Return a sentence for each stated option that has no effect beside the others."""
    sentences = []
    if request.weights is None:
        if request.checkpoint_key is not None:
            sentences.append("the checkpoint key has no effect without a weights file")
        if request.authors_version is not None:
            sentences.append("the authors' version has no effect without a weights file")
    if request.positions != "normal" and request.start != "random":
        sentences.append(
            f"positions {request.positions!r} have no effect: they are for init 'random'"
        )
    if request.calibration is None:
        for_calibration = {
            "held_out": request.held_out,
            "the number of images": request.most_images,
            "mean": request.mean,
            "std": request.std,
        }
        for name, value in for_calibration.items():
            if value is not None:
                sentences.append(f"{name} has no effect without images to calibrate with")
    return sentences


def _refuse_conflicts(request: ConversionRequest) -> None:
    """Refuse (PlanError) options that contradict each other, and a seed out of bounds."""
    options = request.options
    if request.pretrained and request.weights is not None:
        raise PlanError("pretrained weights and a weights file exclude each other")
    if request.plan_folder is not None and (
        options != PlanOptions() or request.input_size is not None
    ):
        raise PlanError("a plan is applied unchanged; omit the planning options")
    if isinstance(request.seed, bool) or not isinstance(request.seed, Integral):
        raise PlanError(f"seed {shortened(repr(request.seed))} must be an integer")
    if not 0 <= request.seed <= MAX_SEED:
        raise PlanError(f"seed {request.seed} must be from 0 to {MAX_SEED}")
    check_choice("version", request.authors_version, (None, *get_args(AuthorsVersion)))
    check_choice("init", request.init, INITS)
    check_choice("positions", request.positions, POSITIONS)
    stated = options_that_decide_counts(options)
    if request.init == EXACT and options.kernel_count != EXACT and stated:
        raise PlanError(
            "an exact start takes an element for each cell of the old kernels: "
            f"omit {join_with_and(stated)}"
        )
    if request.init in ("fit", "largest") and not request.trained:
        raise PlanError(f"init {request.init!r} {NEEDS_WEIGHTS}")
    for_fits = {
        f"scope {ERROR_SCOPE!r}": options.scope == ERROR_SCOPE,
        "calibration": request.calibration is not None,
    }
    for name, is_stated in for_fits.items():
        if is_stated and not request.trained:
            raise PlanError(f"{name} {NEEDS_WEIGHTS}")
        if is_stated and request.start != "fit":
            raise PlanError(f"{name} is for init 'fit', not for {request.start!r}")
        if is_stated and request.dry_run:
            raise PlanError(f"{name} needs kernels and images, and a dry run reads neither")
    if request.calibration is not None and (request.mean is None) != (request.std is None):
        raise PlanError("calibration: give mean and std, or neither")


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
