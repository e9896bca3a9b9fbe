"""All that is drawn of a checkpoint, as data: for the page and for the figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..checkpoints.folder import Checkpoint
from ..checkpoints.inspection import (
    Inspection,
    inspect_positions,
    inspect_state,
    plan_with_positions,
)
from ..checkpoints.load import load_checkpoint
from ..errors import DclsConvertError
from ..planning.plan import ConversionPlan
from ..progress import Notify
from ..reports.predict import predict_report
from ..reports.report import ConversionReport
from ..text import one_line
from .elements import LayerKernels, PositionPicture, kernel_pictures, position_pictures
from .history import HistoryPicture


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """All data that is drawn for a checkpoint."""

    name: str  # name of the folder
    report: ConversionReport
    inspection: Inspection
    positions: tuple[PositionPicture, ...]
    kernels: tuple[LayerKernels, ...]
    # Set only if the model was not rebuilt: the reason. Kernels then use the stored weights.
    why_not_rebuilt: str | None = None
    history: HistoryPicture | None = None  # None if no history was requested


def pictures_of_model(model: nn.Module, plan: ConversionPlan, folder: Path) -> Pictures:
    """Return the pictures of a converted model in memory."""
    state = model.state_dict()
    return _pictures(plan, state, model, inspect_positions(plan, state, folder))


def pictures_of_folder(
    checkpoint: Checkpoint, history: HistoryPicture | None, notify: Notify, *, trust_code: bool
) -> Pictures:
    """Return the pictures of a checkpoint.

    Args:
        checkpoint: An opened folder that this program wrote.
        history: How the positions moved during training, if it is to be drawn.
        notify: Called with each next step, to show progress.
        trust_code: Import and run the user's code that the folder names as its model. Otherwise,
            the kernels of such a folder are made from the stored weights.
    """
    plan = plan_with_positions(checkpoint)
    model = None
    why_not_rebuilt = None
    try:
        checkpoint.source(trust_code=trust_code)
    except DclsConvertError as error:
        why_not_rebuilt = one_line(error)
        state: Mapping[str, Tensor] = checkpoint.read_state()
    else:
        notify("loading")
        model = load_checkpoint(checkpoint, trust_code=trust_code)
        state = model.state_dict()
    inspection = inspect_state(checkpoint, state)
    notify("drawing positions and kernels")
    return _pictures(plan, state, model, inspection, why_not_rebuilt, history)


def _pictures(
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    model: nn.Module | None,
    inspection: Inspection,
    why_not_rebuilt: str | None = None,
    history: HistoryPicture | None = None,
) -> Pictures:
    return Pictures(
        name=Path(inspection.folder).resolve().name,
        report=predict_report(plan),
        inspection=inspection,
        positions=position_pictures(plan, state, inspection),
        kernels=kernel_pictures(plan, state, model),
        why_not_rebuilt=why_not_rebuilt,
        history=history,
    )
