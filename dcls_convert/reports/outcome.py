"""How close a converted network is to the trained one: a record, and sentences about it."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ..running.agreement import Agreement
from ..text import count_text

SMALL_ERROR = 1e-3  # relative error below which kernels or outputs count as unchanged
ENOUGH_IMAGES = 4  # calibration images; if there were fewer, the report suggests more
MIN_IMAGES_FOR_PERCENT = 10  # a percentage of fewer would look too precise


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Agreement):
    """The effect of a conversion on a trained network; fields of `Agreement`: held-out images."""

    kernel_error: float | None  # mean of the layers' `fit_error`
    images: int  # held-out images, or crops of them, on which outputs were compared
    # Mean of the layers' `output_error` after a calibration. Small layer scales hide layers from
    # the network's outputs, but not from this error.
    layer_error: float | None = None
    # Images that the new layers were fitted to; not in the JSON.
    fitted_images: Annotated[int, Field(exclude=True)] = 0
    # Number of held-out files, each counted once for all its crops, if they are from the
    # calibration's own folder; else 0. Not in the JSON.
    files_held_out: Annotated[int, Field(exclude=True)] = 0
    # Yardstick: how well the original network agrees with itself if images move by one pixel.
    shifted: Agreement | None = None


def outcome_sentences(outcome: Outcome | None) -> list[str]:
    """Say how close the kernels and outputs of a trained network stayed; [] if unknown."""
    if outcome is None or outcome.kernel_error is None:
        return []
    is_calibrated = outcome.fitted_images > 0
    errors = f"Mean relative error of the kernels: {outcome.kernel_error:.3f}"
    if outcome.layer_error is not None:
        errors += f"; of the layers' outputs, which were fitted instead: {outcome.layer_error:.3f}"
    errors += "."
    if not is_calibrated and outcome.kernel_error >= SMALL_ERROR:
        errors += " A calibration with some images would keep the outputs closer."
    lines = [errors]
    if 0 < outcome.fitted_images < ENOUGH_IMAGES:
        images = count_text(outcome.fitted_images, "image")
        lines.append(f"Fitted to {images} only: a few dozen would keep the outputs closer.")
    if outcome.images:
        lines += _comparison_sentences(outcome)
    elif is_calibrated:
        lines.append("No image was held out, so it is not known how far the outputs moved.")
    return lines


def _comparison_sentences(outcome: Outcome) -> list[str]:
    """Say how close the outputs for held-out images stayed, and compare with a yardstick."""
    agreement = _agreement(outcome, outcome.images)
    images = count_text(outcome.images, "held-out image")
    if outcome.files_held_out:
        images = count_text(outcome.files_held_out, "held-out image")
        if outcome.images > outcome.files_held_out:
            images = f"{outcome.images} crops of {images}"
        images += " from the calibration's folder (other images may agree less)"
    lines = [f"On {images}: {agreement}."]
    if outcome.shifted is not None:
        shifted = _agreement(outcome.shifted, outcome.images)
        lines.append(
            "For comparison, the original network when each image is moved by one pixel: "
            f"{shifted}."
        )
    return lines


def _agreement(agreement: Agreement, images: int) -> str:
    """Say how well the outputs for a number of images agree, as part of a sentence."""
    parts = []
    shares = {"top-1 class": agreement.same_top1, "largest output": agreement.same_largest}
    for what, share in shares.items():
        if share is None:
            continue
        same = f"{round(share * images)} of {images} have the same {what} as before"
        if images >= MIN_IMAGES_FOR_PERCENT:
            same += f" ({100 * share:.0f} %)"
        parts.append(same)
    if agreement.kl is not None:
        parts.append(f"KL divergence {agreement.kl:.2g}")
    if agreement.output_error is not None:
        parts.append(f"relative error of the outputs {agreement.output_error:.3f}")
    return ", ".join(parts) or "outputs that cannot be compared"
