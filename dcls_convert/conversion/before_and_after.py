"""Compare a network's outputs before and after its conversion."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..options import MAX_PIXELS
from ..planning.plan import ConversionPlan
from ..reports.outcome import Outcome
from ..running.agreement import Agreement
from ..running.arguments import random_arguments
from ..running.compare_outputs import compare_outputs
from ..running.input_spec import pixel_count, with_batch
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
    random: Any  # outputs for two random images; see `_random_outputs`


def outputs_before_conversion(
    model: nn.Module, plan: ConversionPlan, images: Calibration | None
) -> OutputsBefore:
    """Run the unconverted model on all images on which the converted model is compared."""
    held_out: list[Any] = []
    shifted = None
    if images is not None and images.held_out:
        held_out = _outputs(model, images.held_out)
        shifted_outputs = _outputs(model, map(_shifted_by_a_pixel, images.held_out))
        shifted = compare_outputs(held_out, shifted_outputs, num_classes=stated_classes(model))
    random = _random_outputs(model, plan)
    return OutputsBefore(held_out=held_out, shifted=shifted, random=random)


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
        images: The calibration. Without one (None), only outputs for random images are compared.
    """
    random_error = None
    if before.random is not None:
        random = _random_outputs(model, plan)
        random_error = compare_outputs(before.random, random).output_error
    kernel_error = _mean(layer.fit_error for layer in plan.layers)
    if images is None:
        return Outcome(kernel_error=kernel_error, images=0, random_output_error=random_error)
    outputs = _outputs(model, images.held_out)
    converted = compare_outputs(before.held_out, outputs, num_classes=stated_classes(model))
    return Outcome(
        kernel_error=kernel_error,
        images=sum(map(len, images.held_out)),
        layer_error=_mean(layer.output_error for layer in plan.layers),
        fitted_images=len(images),
        files_held_out=images.files_held_out,
        random_output_error=random_error,
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


def _random_outputs(model: nn.Module, plan: ConversionPlan) -> Any:
    """Return the outputs for two random images or, if the model takes no images, random inputs.

    Return None if the model has no weights, if it fails on the inputs, or if the inputs are unknown
    or too large.
    """
    inputs = plan.inputs
    if inputs is None or pixel_count(inputs) > MAX_PIXELS:
        return None
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    # The model's own code may raise anything, and the comparison is optional.
    with contextlib.suppress(Exception), running(model) as run:
        arguments = random_arguments(inputs if plan.input_size is None else with_batch(inputs, 2))
        return run(*arguments.args, **arguments.kwargs)
    return None


def _shifted_by_a_pixel(images: Tensor) -> Tensor:
    """Shift images one pixel to the right, repeating their first column."""
    return torch.cat([images[..., :1], images[..., :-1]], dim=-1)
