"""What was asked of one conversion, in plain values: nothing is read, built or decided here.

Imports nothing heavy, so that the command line refuses conflicting options at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..options import (
    AUTO,
    ERROR_SCOPE,
    EXACT,
    AuthorsVersion,
    Init,
    PlanOptions,
    Positions,
    option_name,
    parse_percent,
)
from ..text import printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..fitting.images import Calibration, Images


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """Which network is converted, from which weights, and how.

    Raises:
        PlanError: Options exclude each other, or one of them would have no effect.
    """

    # In memory, with its weights; or a MODEL of the command line, such as "timm:convnext_tiny".
    model: "nn.Module | str"
    # For a model that is named; None: its default.
    num_classes: int | None = None
    in_chans: int | None = None
    pretrained: bool = False  # with the weights that the model's library offers
    # A state dict or its file; its layers may be those of the authors' package.
    weights: "Mapping[str, Tensor] | Path | None" = None
    options: PlanOptions = field(default_factory=PlanOptions)
    # (channels, *spatial), for MACs; None: as the model states.
    input_size: Sequence[int] | None = None
    init: Init = "auto"  # "fit" if the kernels are trained, else "random"
    positions: Positions = "normal"  # of the start "random"
    calibration: "Images | Calibration | None" = None  # for the start "fit"
    # Images to compare outputs on; None: some of the calibration's images.
    held_out: "Images | None" = None
    most_images: int | None = None  # of the calibration's folder; None: CALIBRATION_IMAGES
    # Normalisation of the images of the calibration's folder; None: as the model states.
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    authors_version: AuthorsVersion | None = None  # of layers of the authors' package in `weights`
    seed: int = 0
    # Checkpoint folder whose plan is carried out, for the provenance; None: a plan is made.
    plan: Path | None = None
    offline: bool = False  # without a download; the network is not built with its weights
    device: str | None = None  # for a named model's fit and comparison; None: the CPU

    def __post_init__(self) -> None:
        _refuse_conflicts(self)

    @property
    def trained(self) -> bool:
        """Whether the network starts from given weights, or is one in memory.

        A network in memory is taken as trained.
        """
        return not isinstance(self.model, str) or self.pretrained or self.weights is not None

    @property
    def start(self) -> Init:
        """`init`, where "auto" is decided."""
        if self.init != AUTO:
            return self.init
        return "fit" if self.trained else "random"

    def without_images(self) -> "ConversionRequest":
        """The same without a calibration."""
        return replace(self, calibration=None, held_out=None, most_images=None, mean=None, std=None)

    @property
    def weights_name(self) -> str:
        """Name of the weights in messages."""
        if isinstance(self.weights, Mapping):
            return "the state dict"
        return f"checkpoint {self.weights}"


def _conflict(message: str, *, on_command_line: str) -> PlanError:
    """An error with one sentence for Python and one for the command line."""
    error = PlanError(message)
    error.on_command_line = printable(on_command_line)
    return error


def _refuse_conflicts(request: ConversionRequest) -> None:
    if request.pretrained and request.weights is not None:
        raise _conflict(
            "pretrained and weights exclude each other",
            on_command_line="--pretrained and --checkpoint exclude each other",
        )
    if request.authors_version is not None and request.weights is None:
        raise _conflict(
            "authors_version describes the weights; give weights",
            on_command_line="--authors-version describes the file of --checkpoint",
        )
    idle = request.options.override_message(lambda name: name)
    if idle is not None:
        raise _conflict(idle, on_command_line=str(request.options.override_message(option_name)))
    _refuse_conflicts_of_init(request)
    _refuse_conflicts_of_scope(request)
    _refuse_conflicts_of_images(request)


def _refuse_conflicts_of_init(request: ConversionRequest) -> None:
    if request.init in ("fit", "largest") and not request.trained:
        raise _conflict(
            f"init={request.init!r} needs trained kernels: pretrained or weights",
            on_command_line=f"--init {request.init} needs trained kernels: "
            "--pretrained or --checkpoint",
        )
    if request.positions != "normal" and request.start != "random":
        raise _conflict(
            f"positions={request.positions!r} is for random positions, "
            f"init={request.init!r} keeps those of old kernels; give init='random'",
            on_command_line=f"--positions is for random positions, --init {request.init} keeps "
            "those of old kernels; use --init random",
        )
    if request.init == EXACT and request.options.kernel_count != EXACT:
        stated = options_that_decide_counts(request.options)
        if stated:
            raise PlanError(
                "an exact start takes an element for each cell of the old kernels: "
                f"omit {' and '.join(stated)}"
            )


def _refuse_conflicts_of_scope(request: ConversionRequest) -> None:
    if request.options.scope != ERROR_SCOPE:
        return
    if not request.trained:
        raise _conflict(
            f"scope={ERROR_SCOPE!r} needs trained kernels: pretrained or weights",
            on_command_line="--scope error needs trained kernels: --pretrained or --checkpoint",
        )
    if request.start != "fit":
        raise _conflict(
            f"scope={ERROR_SCOPE!r} is for init='fit', not for {request.start!r}",
            on_command_line="--scope error is for --init fit",
        )


def _refuse_conflicts_of_images(request: ConversionRequest) -> None:
    states_normalisation = request.mean is not None or request.std is not None
    if request.calibration is None:
        if request.held_out is not None:
            raise PlanError("held_out is for a calibration; give calibration")
        if request.most_images is not None:
            raise _conflict(
                "most_images is for a calibration; give calibration",
                on_command_line="--images is for --calibrate; give a folder of images",
            )
        if states_normalisation:
            raise _conflict(
                "mean and std are for the images of calibration",
                on_command_line="--mean and --std are for the images of --calibrate",
            )
        return
    if not request.trained:
        raise _conflict(
            "calibration needs trained kernels: pretrained or weights",
            on_command_line="--calibrate needs trained kernels: --pretrained or --checkpoint",
        )
    if request.start != "fit":
        raise _conflict(
            f"calibration is for init='fit', not for {request.start!r}",
            on_command_line="--calibrate is for --init fit",
        )
    if states_normalisation and (request.mean is None or request.std is None):
        raise _conflict(
            "calibration: give mean and std, or neither",
            on_command_line="--mean and --std belong together",
        )


def options_that_decide_counts(options: PlanOptions) -> list[str]:
    """The options by which the user decided how many elements there are, as messages call them."""
    stated = []
    if options.kernel_count != AUTO:
        stated.append("kernel count")
    if options.scope != AUTO:
        stated.append("scope")
    if parse_percent(options.budget) != 1:
        stated.append("budget")
    return stated
