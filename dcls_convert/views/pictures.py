"""All pictures of a checkpoint as data: of a folder, or of a model in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from ..checkpoints.folder import WEIGHTS, read_folder, the_plan
from ..checkpoints.inspection import Inspection, inspect_folder, inspect_positions
from ..checkpoints.load import buildable, load_converted
from ..checkpoints.stamp import read_tensors
from ..errors import DclsConvertError, one_line
from ..planning.plan import ConversionPlan
from ..progress import Notify, silent
from ..reports.report import ConversionReport, predict_report
from .history import HistoryPicture, read_history
from .kernels import LayerKernels, kernel_pictures
from .positions import PositionPicture, position_pictures
from .receptive_field import FieldOptions, FieldPictures, field_pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """What there is to see of a checkpoint."""

    name: str  # of the folder
    report: ConversionReport
    inspection: Inspection
    positions: tuple[PositionPicture, ...]
    kernels: tuple[LayerKernels, ...]
    raw_weights: str | None = None  # why kernels are of the stored weights; None where they are the rebuilt model's
    fields: FieldPictures | None = None  # None: not asked for, or the model was not rebuilt
    history: HistoryPicture | None = None  # None: not asked for


def pictures_of_model(model: nn.Module, plan: ConversionPlan, folder: Path, report: ConversionReport) -> Pictures:
    """Pictures of a converted model in memory, without those for which a model must run."""
    state = model.state_dict()
    return _of_state(folder.name, plan, state, model, report, inspect_positions(plan, state, folder))


def pictures_of_folder(
    folder: Path,
    *,
    fields: FieldOptions | None = None,
    history: Path | None = None,
    trust_code: bool = False,
    notify: Notify = silent,
    note: Notify = silent,
) -> Pictures:
    """Pictures of a checkpoint folder.

    Args:
        folder: Written by `save_converted`, or by timm's own savers.
        fields: Find effective receptive fields with these; None: leave them.
        history: Also draw what a `PositionTracker` wrote.
        trust_code: As for `load_converted`. A model that needs it and does not get it is not rebuilt: kernels are then
            those of the stored weights, and there are no receptive fields.
        notify, note: Told about progress, and about files that are no images.

    Raises:
        DclsConvertError: The folder or a file is damaged; says which.
    """
    track = None if history is None else read_history(history)
    inspection = inspect_folder(folder)
    config = read_folder(folder)
    plan, model, reason = the_plan(config, folder), None, None
    try:
        source = buildable(config.source, folder, trust_code=trust_code)
    except DclsConvertError as error:
        reason = one_line(error)
        state: Mapping[str, Tensor] = dict(read_tensors(folder / WEIGHTS))
    else:
        notify("loading")
        model = load_converted(folder, trust_code=trust_code)
        state = model.state_dict()
    notify("drawing positions and kernels")
    pictures = _of_state(folder.resolve().name, plan, state, model, predict_report(plan), inspection)
    seen = None
    if fields is not None and model is not None:
        seen = field_pictures(model, source, plan, state, fields, notify, note)
    return replace(pictures, raw_weights=reason, history=track, fields=seen)


def _of_state(
    name: str,
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    model: nn.Module | None,
    report: ConversionReport,
    inspection: Inspection,
) -> Pictures:
    return Pictures(
        name=name,
        report=report,
        inspection=inspection,
        positions=position_pictures(plan, state, inspection),
        kernels=tuple(kernel_pictures(plan, state, model)),
    )
