"""Save a converted model as a folder that can be loaded again."""

import os
import warnings
from pathlib import Path

from torch import nn

from ..conversion.provenance import provenance_of
from ..errors import check_argument
from ..networks.wrappers import inside_wrappers
from ..planning.plan import ConversionPlan
from ..reports.predict import predict_report
from ..reports.report import ConversionReport
from .fingerprint import take_fingerprint
from .folder import open_checkpoint
from .loadable import check_layers, features_plan, find_loadable_plan
from .write import clamped_state_, write_checkpoint


def save_converted(
    model: nn.Module,
    plan: ConversionPlan | str | Path,
    folder: str | Path,
    *,
    report: ConversionReport | None = None,
    force: bool = False,
    fingerprint: bool = True,
    picture: bytes | None = None,
) -> Path:
    """Write a converted model as a checkpoint folder.

    timm loads it once `dcls_convert` is imported.

    The modules and outputs of the model are compared with those of the network that loading will
    build. If they differ, because the model got another activation or norm after its conversion
    for example, it is saved as the user's own network, with a warning that says how to load it.

    Positions that the last step of an optimizer has left outside of their windows are clamped, in
    the model too.

    Args:
        model: The model, converted by `apply_plan_(model, plan)`. May be wrapped (`torch.compile`,
            DataParallel, DDP, averaged copies).
        plan: The plan that was carried out, or the checkpoint folder from which the model was
            loaded. A timm model may then have another number of classes than the folder's.
        folder: Folder to write. It must not exist, unless `force` is set.
        report: The model's report, with its errors; by default, the plan's report.
        force: Replace an existing checkpoint folder. Anything else in the way is never touched.
        fingerprint: Run the model once on a random image of the plan's input size, and store a
            summary of its output in the weights file for `dcls-convert verify`. If False, none of
            the model's code runs, and outputs are not compared.
        picture: A PNG to add as positions.png; the model card shows it.

    Returns:
        The folder's path.

    Raises:
        CheckpointError: The model's layers are no longer those of the plan, a value is not finite,
            or the folder cannot be written. An existing folder is then unchanged.
    """
    check_argument("model", model, nn.Module)
    if not isinstance(plan, str | Path):
        check_argument("plan", plan, ConversionPlan)
    if not isinstance(folder, str | os.PathLike):
        check_argument("folder", folder, Path)
    folder = Path(folder)
    model = inside_wrappers(model)
    provenance = provenance_of(model)
    if not isinstance(plan, ConversionPlan):
        plan = open_checkpoint(plan).plan
    features = features_plan(model, plan)
    if features is not None:
        plan = features
    check_layers(model, plan)
    state = clamped_state_(model)
    loadable = find_loadable_plan(model, state, plan, run=fingerprint)
    if loadable.note is not None:
        warnings.warn(loadable.note, stacklevel=2)
    if report is None or loadable.plan != plan:
        report = _report_with_errors_of(report, loadable.plan)
    write_checkpoint(
        model,
        loadable.plan,
        folder,
        state,
        report=report,
        fingerprint=loadable.fingerprint,
        provenance=provenance,
        force=force,
        picture=picture,
    )
    return folder


def _report_with_errors_of(
    report: ConversionReport | None, plan: ConversionPlan
) -> ConversionReport:
    """Return the plan's report, with the errors of another one of the same layers."""
    predicted = predict_report(plan)
    if report is None:
        return predicted
    kernel_errors = {}
    output_errors = {}
    reasons = {}
    for layer in report.layers:
        if layer.fit_error is not None:
            kernel_errors[layer.name] = layer.fit_error
        if layer.output_error is not None:
            output_errors[layer.name] = layer.output_error
        reasons[layer.name] = layer.error_reasons
    return predicted.with_errors(kernel_errors, output_errors, report.outcome, reasons=reasons)


def save_just_converted(
    model: nn.Module,
    plan: ConversionPlan,
    folder: Path,
    *,
    report: ConversionReport,
    force: bool,
    picture: bytes | None = None,
) -> None:
    """Write a model right after its conversion, when it cannot have been edited.

    The arguments are those of `save_converted`. Values are checked, but not whether the model's
    layers are those of the plan.

    Raises:
        CheckpointError: A value is not finite, or the folder cannot be written.
    """
    write_checkpoint(
        model,
        plan,
        folder,
        clamped_state_(model),
        report=report,
        fingerprint=take_fingerprint(model, plan.inputs),
        provenance=provenance_of(model),
        force=force,
        picture=picture,
    )
