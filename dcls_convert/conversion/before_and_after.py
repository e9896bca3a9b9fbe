"""Compare a network's outputs before and after its conversion."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..planning.plan import ConversionPlan
from ..reports.outcome import Outcome
from ..running.agreement import Agreement
from ..running.compare_outputs import compare_outputs
from ..running.run import running
from ..starts.images import Calibration
from ..weights.loading import classifier_prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputsBefore:
    """Outputs of a model before its conversion."""

    held_out: list[Any]  # one entry per held-out batch
    # How close the outputs for images shifted by one pixel are to `held_out`: a yardstick for the
    # error of the conversion. None if no image is held out.
    shifted: Agreement | None


def outputs_before_conversion(model: nn.Module, images: Calibration | None) -> OutputsBefore:
    """Run the unconverted model on all images on which the converted model is compared."""
    held_out: list[Any] = []
    shifted = None
    if images is not None and images.held_out:
        held_out = _outputs(model, images.held_out)
        shifted_outputs = _outputs(model, map(_shifted_by_a_pixel, images.held_out))
        shifted = compare_outputs(held_out, shifted_outputs, num_classes=stated_classes(model))
    return OutputsBefore(held_out=held_out, shifted=shifted)


def compare_with_outputs_before(
    before: OutputsBefore,
    model: nn.Module,
    plan: ConversionPlan,
    images: Calibration | None,
) -> Outcome:
    """Run the converted model, and summarise how much kernels and outputs changed.

    Args:
        before: Outputs before the conversion.
        model: The converted model.
        plan: The plan that was carried out; its layers have the errors of the kernels.
        images: The calibration. Without one (None), only kernels are compared.
    """
    kernel_error = _mean(layer.fit_error for layer in plan.layers)
    if images is None:
        return Outcome(kernel_error=kernel_error, images=0)
    outputs = _outputs(model, images.held_out)
    converted = compare_outputs(before.held_out, outputs, num_classes=stated_classes(model))
    return Outcome(
        kernel_error=kernel_error,
        images=sum(map(len, images.held_out)),
        layer_error=_mean(layer.output_error for layer in plan.layers),
        fitted_images=len(images),
        files_held_out=images.files_held_out,
        same_top1=converted.same_top1,
        kl=converted.kl,
        same_largest=converted.same_largest,
        output_error=converted.output_error,
        shifted=before.shifted,
    )


def _mean(errors: Iterable[float | None]) -> float | None:
    """Return the mean of the errors that are known; None if none is."""
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


def stated_classes(model: nn.Module) -> int | None:
    """Return the number of classes that a network of timm or torchvision ranks.

    The number is 0 for a network without a classifier. Return None for other networks: they do not
    say whether their outputs are scores of classes.
    """
    if not type(model).__module__.startswith(("timm.", "torchvision.models.")):
        return None
    stated: int | None = getattr(model, "num_classes", None)
    if stated is not None:
        return stated
    # Most networks of torchvision do not state the number, but their last linear layer has it.
    prefixes = classifier_prefixes(model)
    last: nn.Module | None = None
    for name, module in model.named_modules():
        if f"{name}.".startswith(prefixes):
            last = module
    return getattr(last, "out_features", 0)


def _outputs(model: nn.Module, batches: Iterable[Tensor]) -> list[Any]:
    with running(model) as run:
        return [run(batch) for batch in batches]


def _shifted_by_a_pixel(images: Tensor) -> Tensor:
    """Shift images one pixel to the right, repeating their first column."""
    return torch.cat([images[..., :1], images[..., :-1]], dim=-1)
