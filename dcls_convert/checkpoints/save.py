"""Save a converted model as a folder, load it back, and compare."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from ..errors import check_argument
from ..networks.source import resolve_model
from ..networks.timm_notes import stated_source
from ..networks.wrappers import inside_wrappers
from ..output import check_output_path, new_output
from ..planning.plan import ConversionPlan
from ..reports.report import ConversionReport, report_of
from .check_layers import check_layers, describe_hooks
from .compare import Comparison, compare_with_folder
from .current_plan import (
    plan_for_features,
    plan_for_source,
    plan_without_source,
    with_current_args,
    with_current_interpolations,
)
from .fingerprint import NOT_CHECKED, take_fingerprint
from .folder import open_folder
from .stored_weights import why_not_our_folder
from .write import clamped_state_, write_texts, write_weights

NO_SOURCE = (
    "the model is saved as your own, because it does not state how it was built, or was built with "
    "an argument that a folder cannot hold, such as a class: load it with load_converted(folder, "
    'model=...). If torchvision built it, say how: save_converted(..., source="torchvision:NAME")'
)


def check_output(folder: str | Path, *, force: bool = False) -> None:
    """Check that `save_converted` can write a folder; call this before a training.

    Args:
        folder: Folder that will be written.
        force: Whether an existing folder of dcls-convert will be replaced.

    Raises:
        CheckpointError: The folder exists and `force` is not set, it is another program's, or there
            is no permission to write it.
    """
    if not isinstance(folder, str | os.PathLike):
        check_argument("folder", folder, Path)
    check_output_path(Path(folder), force=force, why_keep=why_not_our_folder)


def save_converted(
    model: nn.Module,
    plan: ConversionPlan | str | Path,
    folder: str | Path,
    *,
    report: ConversionReport | None = None,
    force: bool = False,
    check: bool = True,
    source: str | None = None,
    picture: bytes | None = None,
) -> Path:
    """Write a converted model as a folder, load it back, and compare; return the folder's path.

    timm loads the folder once `dcls_convert` is imported. The model that loading builds is compared
    with the given model: names, shapes, and outputs for a random image of the plan's input size. If
    they differ, for example because the model got another activation after its conversion, the
    model is saved as the user's own network, with a warning that says how to load it. The
    comparison takes the memory of one more copy of the model on its device, the time to read it,
    and three forward passes of one image, or six if a parameter is nearly zero.

    Args:
        model: Converted by `apply_plan_(model, plan)`; its positions are clamped to their windows.
            May be wrapped (`torch.compile`, DataParallel, DDP, averaged copies).
        plan: The plan that was carried out, or the folder from which the model was loaded. The
            model's number of classes may differ from the plan's.
        folder: Folder to write. It must not exist, unless `force` is set; `check_output` checks
            this before a training.
        report: The model's report, with the layers' errors; by default, the plan's report.
        force: Replace an existing folder of ours. Anything else in the way is never touched.
        check: Load the folder back and compare; store outputs for `dcls-convert verify`. If False,
            none of the model's code runs, and the folder says so.
        source: What builds the unconverted network, such as "torchvision:resnet50". timm's models
            state their source themselves; any other model without a source is saved as the user's
            own.
        picture: A PNG to add as positions.png; the model card shows it.

    Raises:
        CheckpointError: The model's layers differ from the plan, its state dict lacks a parameter,
            a value is not finite, or the folder cannot be written. An existing folder is then
            unchanged.
        ModelError: There is no such source.
    """
    check_argument("model", model, nn.Module)
    check_output(folder, force=force)
    folder = Path(folder)
    model = inside_wrappers(model)
    plan, state = _current_plan_and_state(model, plan, source)
    fingerprint = take_fingerprint(model, plan.inputs) if check else NOT_CHECKED
    name = folder.resolve().name
    notes: list[str] = []
    with new_output(folder, force=force, why_keep=why_not_our_folder) as partial:
        partial.mkdir()
        written = report_of(plan)
        if report is not None and report.layers == plan.layers:  # `==` ignores their errors
            with_errors = replace(plan, layers=report.layers)
            written = report_of(with_errors, report.outcome)
        write_texts(partial, name, model, written, picture=picture)
        write_weights(partial, state, fingerprint)
        if plan.source is None or not plan.source.is_from_registry:
            notes += describe_hooks(model, plan)
            if type(model).__module__.startswith(("timm.models.", "torchvision.models.")):
                notes.append(NO_SOURCE)
        elif check:
            comparison = compare_with_folder(model, partial, fingerprint)
            if comparison.difference is not None:
                own = plan_without_source(model, plan)
                write_texts(partial, name, model, report_of(own), picture=picture)
            notes += _notes_of_comparison(plan, comparison)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return folder


def save_just_converted(
    model: nn.Module,
    folder: Path,
    *,
    report: ConversionReport,
    force: bool,
    picture: bytes | None = None,
) -> None:
    """Write a model that was converted or folded just now.

    The folder is not loaded back, because the model cannot have been edited since. The arguments
    are as in `save_converted`; the report has the plan.

    Raises:
        CheckpointError: A value is not finite, or the folder cannot be written.
    """
    state = clamped_state_(model)
    fingerprint = take_fingerprint(model, report.plan.inputs)
    with new_output(folder, force=force, why_keep=why_not_our_folder) as partial:
        partial.mkdir()
        write_texts(partial, folder.resolve().name, model, report, picture=picture)
        write_weights(partial, state, fingerprint)


def _current_plan_and_state(
    model: nn.Module, plan: ConversionPlan | str | Path, source: str | None
) -> tuple[ConversionPlan, dict[str, Tensor]]:
    """Return the plan that rebuilds the model in its present state, and the state dict.

    The arguments and errors are as in `save_converted`.
    """
    is_saved = isinstance(plan, str | Path)
    if isinstance(plan, str | Path):
        plan = open_folder(plan).plan
    check_argument("plan", plan, ConversionPlan)
    plan = with_current_interpolations(plan_for_features(model, plan), model)
    check_layers(model, plan)
    if source is not None:
        plan = plan_for_source(resolve_model(source), plan)
    elif plan.source is None and not is_saved:
        # The plan was made from `find_convs` alone, which does not know what built the model.
        built_by = stated_source(model)
        if built_by is not None:
            plan = plan_for_source(built_by, plan)
    state = clamped_state_(model)
    return with_current_args(plan, model, state), state


def _notes_of_comparison(plan: ConversionPlan, comparison: Comparison) -> Iterator[str]:
    """Yield notes for the user about a folder that was loaded back; none if it is the model."""
    if comparison.difference is not None:
        yield (
            f"the model is no longer {plan.model} with its plan: {comparison.difference}. It is "
            "saved as your own: load it with load_converted(folder, model=...), given the "
            "unconverted network with the same changes"
        )
    elif comparison.not_compared is not None:
        yield (
            f"whether the model is still {plan.model} with its plan was checked by names and "
            f"shapes, not by its outputs: {comparison.not_compared}"
        )
