"""Sentences on how close a converted network stays to the trained one."""

from ..networks.model_outputs import Agreement
from ..reports.report import ConversionReport, Outcome
from ..text import counted
from .advice import ON_COMMAND_LINE, Advice

SMALL_ERROR = 1e-3  # kernel error below which a user would call the outputs unchanged
FEW_IMAGES = 4  # to fit to; fewer are said to be few
MIN_IMAGES_FOR_PERCENT = 10  # images; of fewer, a share in percent says more than is known


def outcome_sentences(report: ConversionReport, advice: Advice = ON_COMMAND_LINE) -> list[str]:
    """How close a trained network's kernels and outputs stayed; empty if that is not known."""
    outcome = report.outcome
    if outcome is None or outcome.kernel_error is None:
        return []
    kernels = f"Mean relative error of the kernels: {outcome.kernel_error:.3f}."
    is_calibrated = outcome.fitted_images > 0 or outcome.images > 0
    if not is_calibrated and outcome.kernel_error >= SMALL_ERROR:
        kernels += f" {advice.calibrate} would keep the outputs closer."
    if is_calibrated:
        kernels += " Their outputs were fitted instead."
    lines = [kernels]
    if 0 < outcome.fitted_images < FEW_IMAGES:
        images = counted(outcome.fitted_images, "image")
        lines.append(f"Fitted to {images} only: some dozens would keep the outputs closer.")
    if outcome.images:
        lines += _comparison_sentences(outcome)
    elif is_calibrated:
        lines.append("No image was held out, so nothing says how far the outputs moved.")
    return lines


def _comparison_sentences(outcome: Outcome) -> list[str]:
    """How close the outputs for held-out images stayed, and a yardstick."""
    agreement = _agreement(outcome, outcome.images)
    images = counted(outcome.images, "held-out image")
    if outcome.images_cropped:
        images = f"{outcome.images} crops of {counted(outcome.images_cropped, 'held-out image')}"
    lines = [f"On {images}: {agreement}."]
    if outcome.shifted is not None:
        shifted = _agreement(outcome.shifted, outcome.images)
        lines.append(f"As a yardstick, the original with each image moved by one pixel: {shifted}.")
    return lines


def _agreement(found: Outcome | Agreement, images: int) -> str:
    """How far outputs for so many images agree, as part of a sentence."""
    parts = []
    if found.same_top1 is not None:
        same = f"{round(found.same_top1 * images)} of {images} have the same top-1 class as before"
        if images >= MIN_IMAGES_FOR_PERCENT:
            same += f" ({100 * found.same_top1:.0f} %)"
        parts.append(same)
    if found.kl is not None:
        parts.append(f"KL divergence {found.kl:.2g}")
    if found.output_error is not None:
        parts.append(f"relative error of the outputs {found.output_error:.3f}")
    return ", ".join(parts) or "outputs that cannot be compared"
