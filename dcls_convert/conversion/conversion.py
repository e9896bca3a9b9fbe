"""Carry out a resolved request: convert the network and compare its outputs."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion.apply_plan import LayerErrors, apply_plan_
from ..conversion.authors import convert_with_authors_weights_
from ..fitting.calibrate import CalibrationStatistics
from ..fitting.calibration_images import Calibration
from ..networks.model_outputs import compare_outputs, relative_l2_error
from ..networks.pretrained_cfg import set_normalisation_
from ..networks.running import eval_mode, full_precision, run_batch, unchanged_on_failure
from ..options import MAX_PIXELS
from ..planning.plan import ConversionPlan
from ..progress import logger
from ..reports.predict import predict_report
from ..reports.report import ConversionReport, Outcome
from .describe import describe_conversion
from .loaded import LoadedNetwork
from .provenance import attach_provenance_
from .resolved import ResolvedRequest

MANY_LINES = 1_000_000  # kernel lines; one CPU core fits about 13,000 per second


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A converted model and the report about it."""

    model: nn.Module
    report: ConversionReport
    # |new - old| / |old| of the outputs for random images; None if outputs were not compared.
    random_output_error: float | None = None


def convert_network_(
    loaded: LoadedNetwork, resolved: ResolvedRequest, *, model: nn.Module | None = None
) -> Conversion:
    """Carry out the plan on the network, in place. After any error, the model is as it was.

    Args:
        loaded: The network of the request.
        resolved: The request with everything decided.
        model: A copy of the network; if given, the copy is converted and the network is not.

    Raises:
        DclsConvertError: The weights or the images do not fit the model.
    """
    plan = resolved.plan
    if model is None:
        model = loaded.network
    loaded.notify("converting")
    images = loaded.calibration(plan)
    held_out: Sequence[Tensor] = ()
    if images is not None:
        held_out = images.held_out
    provenance = None
    if model is loaded.network:  # a copy is measured and thrown away, so it needs no record
        provenance = describe_conversion(resolved, model, images)
    report = predict_report(plan)
    outcome = None
    random_output_error = None
    with unchanged_on_failure(model, values=_overwritten_tensors(model, resolved, images)):
        before = None
        if resolved.keeps_outputs:
            before = _outputs_before(model, plan, held_out)
        errors = _start_layers_(loaded, resolved, model, images)
        if before is not None:
            outcome = _outcome(before, _outputs(model, held_out), images, errors)
            if before.random is not None:
                random_output_error = relative_l2_error(before.random, _random_outputs(model, plan))
    attach_provenance_(model, provenance)
    _record_normalisation_(model, resolved)
    report = report.with_errors(errors.kernel, errors.output, outcome, reasons=errors.reasons)
    return Conversion(model=model, report=report, random_output_error=random_output_error)


def _record_normalisation_(model: nn.Module, resolved: ResolvedRequest) -> None:
    """Write the normalisation of the calibration images into the model's config."""
    request = resolved.request
    size = resolved.plan.input_size
    if request.mean is not None and request.std is not None and size is not None:
        set_normalisation_(model, request.mean, request.std, size[0])


def _overwritten_tensors(
    model: nn.Module, resolved: ResolvedRequest, images: Calibration | None
) -> list[Tensor]:
    """Return the tensors of the model whose values the conversion changes in place."""
    tensors = [*model.parameters(), *model.buffers()]
    if resolved.authors_weights is not None:
        return tensors  # the file's other weights are loaded along with its elements
    if images is not None:
        return [tensor for tensor in tensors if tensor.dim() == 1]  # biases and running means
    return []


def _start_layers_(
    loaded: LoadedNetwork,
    resolved: ResolvedRequest,
    model: nn.Module,
    images: Calibration | None,
) -> LayerErrors:
    """Put DCLS layers with their initial values into the model, and return their errors."""
    request = resolved.request
    plan = resolved.plan
    if resolved.authors_weights is not None:
        not_loaded = convert_with_authors_weights_(
            model,
            plan,
            resolved.authors_weights,
            version=request.authors_version,
            new_classifier=loaded.new_classifier,
        )
        loaded.note_not_loaded(not_loaded)
        return LayerErrors(kernel={}, output={})
    lines = sum(layer.lines for layer in plan.layers)
    if resolved.start == "fit" and lines > MANY_LINES and request.device is None:
        loaded.note(
            f"fitting elements to {lines:,} kernels takes minutes on a CPU; a GPU is faster"
        )
    calibration: Calibration | CalibrationStatistics | None = images
    if resolved.statistics is not None and model is loaded.network:
        calibration = resolved.statistics
    errors = apply_plan_(
        model,
        plan,
        init=resolved.start,
        positions=request.positions,
        generator=torch.Generator().manual_seed(request.seed),
        calibration=calibration,
        note=loaded.note,
        notify=loaded.notify,
    )
    for name, error in errors.kernel.items():
        logger.debug("%s: relative error of the kernel %.4g", name, error)
    for name, error in errors.output.items():
        logger.debug("%s: relative error of the outputs for images %.4g", name, error)
    return errors


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outputs:
    """Outputs of a model before its conversion."""

    held_out: list[Any]  # one entry per held-out batch
    # The same for images shifted by one pixel: a yardstick for the error of the conversion.
    shifted: list[Any]
    random: Any  # for two random images; see `_random_outputs`


def _outputs_before(model: nn.Module, plan: ConversionPlan, held_out: Sequence[Tensor]) -> _Outputs:
    """Run the unconverted model on everything that the converted one is compared on."""
    return _Outputs(
        held_out=_outputs(model, held_out),
        shifted=_outputs(model, map(_shifted_by_a_pixel, held_out)),
        random=_random_outputs(model, plan),
    )


@full_precision()
def _outputs(model: nn.Module, batches: Iterable[Tensor]) -> list[Any]:
    with eval_mode(model):
        return [run_batch(model, batch) for batch in batches]


@full_precision()
def _random_outputs(model: nn.Module, plan: ConversionPlan) -> Any:
    """Return the outputs for two random images.

    Return None if the model has no weights or fails on such images, or if its input size is unknown
    or too large.
    """
    size = plan.input_size
    if size is None or math.prod(size[1:]) > MAX_PIXELS:
        return None
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    noise = torch.randn(2, *size, generator=torch.Generator().manual_seed(0), device="cpu")
    # The model's own code may raise anything, and the comparison is optional.
    with contextlib.suppress(Exception), eval_mode(model):
        return run_batch(model, noise)
    return None


def _shifted_by_a_pixel(images: Tensor) -> Tensor:
    """Shift images one pixel to the right, repeating their first column."""
    return torch.cat([images[..., :1], images[..., :-1]], dim=-1)


def _outcome(
    before: _Outputs, after: list[Any], images: Calibration | None, errors: LayerErrors
) -> Outcome:
    """Summarise how much the conversion changed kernels and outputs.

    Args:
        before: Outputs before the conversion.
        after: Outputs for the held-out batches after it.
        images: The calibration. Without one (None), no outputs are compared.
        errors: The errors of the layers.
    """
    kernel_error = None
    if errors.kernel:
        kernel_error = sum(errors.kernel.values()) / len(errors.kernel)
    if images is None:
        return Outcome(kernel_error=kernel_error, images=0)
    converted = compare_outputs(before.held_out, after)
    shifted = None
    if images.held_out:
        shifted = compare_outputs(before.held_out, before.shifted)
    return Outcome(
        kernel_error=kernel_error,
        images=sum(map(len, images.held_out)),
        fitted_images=len(images),
        images_cropped=images.images_cropped,
        same_top1=converted.same_top1,
        kl=converted.kl,
        output_error=converted.output_error,
        shifted=shifted,
    )
