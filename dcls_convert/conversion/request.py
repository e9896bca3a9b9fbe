"""The request for one conversion, as plain values: nothing is read, built or decided here.

This module imports nothing heavy, so that the command line refuses conflicting options at once.
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

    from ..fitting.calibration_images import Calibration, Images


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """Which network is converted, from which weights, and how.

    Raises:
        PlanError: Options exclude each other, or one of them would have no effect.
    """

    # A module in memory with its weights, or a MODEL of the command line ("timm:convnext_tiny").
    model: "nn.Module | str"
    # Classes and input channels of a named model; None for its defaults.
    num_classes: int | None = None
    in_chans: int | None = None
    pretrained: bool = False  # with the weights that the model's library offers
    # A state dict or its file; its layers may be those of the authors' package.
    weights: "Mapping[str, Tensor] | Path | None" = None
    options: PlanOptions = field(default_factory=PlanOptions)
    # (channels, *spatial) at which MACs are counted; None for the size that the model states.
    input_size: Sequence[int] | None = None
    init: Init = "auto"  # "fit" if the kernels are trained, else "random"
    positions: Positions = "normal"  # for the start "random"
    calibration: "Images | Calibration | None" = None  # for the start "fit"
    # Images to compare outputs on; None for some of the calibration's images.
    held_out: "Images | None" = None
    # Most images to read from the calibration's folder; None for CALIBRATION_IMAGES.
    most_images: int | None = None
    # Normalisation of the images in the calibration's folder; None for what the model states.
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    authors_version: AuthorsVersion | None = None  # of the authors' layers in `weights`
    seed: int = 0
    # Checkpoint folder whose plan is carried out (recorded in the provenance); None for a new plan.
    plan: Path | None = None
    offline: bool = False  # nothing is downloaded, and the network is not built with its weights
    command: str | None = None  # the command line as typed; None from Python
    device: str | None = None  # where a named model is fitted and compared; None for the CPU

    def __post_init__(self) -> None:
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

    def without_images(self) -> "ConversionRequest":
        """Return the same request without its calibration."""
        return replace(self, calibration=None, held_out=None, most_images=None, mean=None, std=None)

    @property
    def weights_name(self) -> str:
        """Name of the weights in messages."""
        if isinstance(self.weights, Mapping):
            return "the state dict"
        return f"checkpoint {self.weights}"


def _conflict(message: str, *, on_command_line: str) -> PlanError:
    """Return an error with one message for Python and one for the command line."""
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
    override = request.options.override_message(lambda name: name)
    if override is not None:
        override_on_command_line = str(request.options.override_message(option_name))
        raise _conflict(override, on_command_line=override_on_command_line)
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
    """Return the options, as named in messages, with which the user stated the kernel counts."""
    stated = []
    if options.kernel_count != AUTO:
        stated.append("kernel count")
    if options.scope != AUTO:
        stated.append("scope")
    if parse_percent(options.budget) != 1:
        stated.append("budget")
    return stated
