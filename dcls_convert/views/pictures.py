"""All pictures of a checkpoint as data: of a folder, or of a model in memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..checkpoints.folder import WEIGHTS, read_folder, read_tensors, the_plan
from ..checkpoints.inspection import Inspection, inspect_folder, inspect_positions
from ..checkpoints.load import buildable, load_converted
from ..errors import DclsConvertError, one_line
from ..planning.plan import ConversionPlan
from ..progress import Notify
from ..reports.report import ConversionReport, predict_report
from .elements import LayerKernels, PositionPicture, kernel_pictures, position_pictures
from .history import HistoryPicture, read_history
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
    inspection = inspect_positions(plan, state, folder)
    return Pictures(
        name=folder.name,
        report=report,
        inspection=inspection,
        positions=position_pictures(plan, state, inspection),
        kernels=kernel_pictures(plan, state, model),
    )


def pictures_of_folder(
    folder: Path,
    fields: FieldOptions | None,
    history: Path | None,
    notify: Notify,
    note: Notify,
    *,
    trust_code: bool,
) -> Pictures:
    """Pictures of a checkpoint folder.

    A model that needs `trust_code` and does not get it is not rebuilt: kernels are then those of the stored weights.
    """
    track = None if history is None else read_history(history)
    inspection = inspect_folder(folder)
    config = read_folder(folder)
    plan, model, reason = the_plan(config), None, None
    try:
        source = buildable(config, trust_code=trust_code)
    except DclsConvertError as error:
        reason = one_line(error)
        state: Mapping[str, Tensor] = dict(read_tensors(folder / WEIGHTS))
    else:
        notify("loading")
        model = load_converted(folder, trust_code=trust_code)
        state = model.state_dict()
    notify("drawing positions and kernels")
    seen = None
    if fields is not None and model is not None:
        seen = field_pictures(model, source, plan, state, fields, notify, note)
    return Pictures(
        name=folder.resolve().name,
        report=predict_report(plan),
        inspection=inspection,
        positions=position_pictures(plan, state, inspection),
        kernels=kernel_pictures(plan, state, model),
        raw_weights=reason,
        fields=seen,
        history=track,
    )
