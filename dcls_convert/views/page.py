"""All pictures of a checkpoint as data, and the page that shows them.

The page is `page.html`, filled with `page.css`, `page.js` and the data that the script draws.
"""

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..checkpoints.folder import Checkpoint
from ..checkpoints.inspection import (
    Inspection,
    inspect_positions,
    inspect_state,
    plan_with_positions,
)
from ..checkpoints.load import build_from_checkpoint
from ..errors import DclsConvertError
from ..planning.plan import ConversionPlan
from ..progress import Note, Notify
from ..reports.predict import predict_report
from ..reports.report import Change, ConversionReport
from ..text import one_line, printable
from .cost_tables import LayerTotals, stage_rows
from .elements import LayerKernels, PositionPicture, kernel_pictures, position_pictures
from .history import HistoryPicture, read_checkpoint_history
from .number_text import before_after, percent, short_count, with_separators
from .receptive_field import ReceptiveFieldMaps, ReceptiveFieldOptions, receptive_field_maps

# Fields of `LayerTotals` that are drawn by stage, and the titles of their charts.
STAGE_COSTS = {"params": "Parameters", "macs": "MACs for one image"}
SIGNIFICANT_DIGITS = 4  # of the floats in the page's data
# Tensors are sent as integers, to keep the page small; the script divides them by these factors.
UNITS_PER_CELL = 100  # for coordinates, sent as 16-bit integers
INT8_MAX = torch.iinfo(torch.int8).max  # for cells and weights, relative to their kernel's largest
UINT8_MAX = torch.iinfo(torch.uint8).max  # for receptive fields, on a scale from 0 to 1


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
    # None if they were not requested, or if the model was not rebuilt.
    receptive_fields: ReceptiveFieldMaps | None = None
    history: HistoryPicture | None = None  # None if no history was requested


def pictures_of_model(model: nn.Module, plan: ConversionPlan, folder: Path) -> Pictures:
    """Return the pictures of a converted model in memory, except those that need it to run."""
    state = model.state_dict()
    return _pictures(plan, state, model, inspect_positions(plan, state, folder))


def _pictures(
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    model: nn.Module | None,
    inspection: Inspection,
    **optional_fields: Any,
) -> Pictures:
    """Return the pictures of a state dict; `optional_fields` are further fields of `Pictures`."""
    return Pictures(
        name=Path(inspection.folder).resolve().name,
        report=predict_report(plan),
        inspection=inspection,
        positions=position_pictures(plan, state, inspection),
        kernels=kernel_pictures(plan, state, model),
        **optional_fields,
    )


def pictures_of_folder(
    checkpoint: Checkpoint,
    fields: ReceptiveFieldOptions | None,
    history: Path | None,
    notify: Notify,
    note: Note,
    *,
    trust_code: bool,
) -> Pictures:
    """Return the pictures of a checkpoint.

    Args:
        checkpoint: An opened folder that this program wrote.
        fields: How to compute effective receptive fields, or None to leave them out.
        history: The file of a `PositionTracker`, or None for no history.
        notify: Called with each next step, to show progress.
        note: Called with notes about skipped images.
        trust_code: Import and run the user's code that the folder names as its model. Otherwise,
            the kernels of such a folder are made from the stored weights.
    """
    plan = plan_with_positions(checkpoint)
    history_picture = None
    if history is not None:
        history_picture = read_checkpoint_history(history, plan)
    model = None
    why_not_rebuilt = None
    try:
        source = checkpoint.source(trust_code=trust_code)
    except DclsConvertError as error:
        why_not_rebuilt = one_line(error)
        state: Mapping[str, Tensor] = checkpoint.read_state()
    else:
        notify("loading")
        model = build_from_checkpoint(checkpoint, source)
        state = model.state_dict()
    inspection = inspect_state(checkpoint, state)
    notify("drawing positions and kernels")
    receptive_fields = None
    if fields is not None and model is not None:
        receptive_fields = receptive_field_maps(model, source, plan, state, fields, notify, note)
    return _pictures(
        plan,
        state,
        model,
        inspection,
        why_not_rebuilt=why_not_rebuilt,
        receptive_fields=receptive_fields,
        history=history_picture,
    )


def page(pictures: Pictures) -> str:
    """Return the page of a checkpoint, in ASCII.

    Names from the data can neither end the script nor contain control characters.
    """
    report = pictures.report
    inspection = pictures.inspection
    stages = stage_rows(report.layers)
    costs = []
    for cost, name in STAGE_COSTS.items():
        bars = _bars(stages, cost, name)
        if bars is not None:
            costs.append(bars)
    receptive_fields = None
    if pictures.receptive_fields is not None:
        receptive_fields = _receptive_fields(pictures.receptive_fields)
    content = {
        "title": pictures.name,
        "subtitle": f"{report.model or 'a model'} with learnable element positions (DCLS)",
        "facts": _facts(report, inspection),
        "margin": inspection.border_margin,
        "near": inspection.overlap_distance,
        "positions": pictures.positions,
        "kernels": [_kernels(layer) for layer in pictures.kernels],
        "volumes": any(len(layer.dilated_size) == 3 for layer in report.layers),
        "whyNotRebuilt": pictures.why_not_rebuilt,
        "costs": costs,
        "untouched": with_separators(report.params_untouched),
        "macsNote": report.macs.note,
        "receptiveFields": receptive_fields,
        "history": pictures.history,
        "factors": {
            "unitsPerCell": UNITS_PER_CELL,
            "int8Max": INT8_MAX,
            "uint8Max": UINT8_MAX,
        },
    }
    return filled_page(content)


def _facts(report: ConversionReport, inspection: Inspection) -> list[tuple[str, str]]:
    """Return names and values for the facts at the top of the page."""
    macs_percent = percent(report.macs) or "not counted"
    facts = [
        ("Parameters", f"{before_after(report.params)} ({percent(report.params)})"),
        ("MACs for one image", f"{before_after(report.macs, short_count)} ({macs_percent})"),
        ("Layers replaced", with_separators(len(report.layers))),
        ("Distinct elements", with_separators(inspection.elements)),
    ]
    if report.layers_beyond_map:
        facts.append(
            ("With windows twice the map or larger", with_separators(report.layers_beyond_map))
        )
    if inspection.positions:
        farthest = max(inspection.positions, key=lambda row: row.mean_distance)
        distance = f"{farthest.name}, {farthest.mean_distance:.2f} cells"
        facts.append(("Farthest out on average", distance))
    facts += [
        ("At the border", f"{100 * inspection.mean_over_elements('border_share'):.1f} %"),
        ("Overlapping", f"{100 * inspection.mean_over_elements('overlap_share'):.1f} %"),
    ]
    return facts


def filled_page(content: Mapping[str, Any]) -> str:
    """Return the page with the content that its script draws, in ASCII."""
    content = {**content, "made": f"Made by dcls-convert {__version__}. This page uses no network."}
    data = json.dumps(_plain(content), separators=(",", ":"), allow_nan=False)
    data = data.replace(" %", "\\u00a0%")  # a no-break space
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = Template(_file_beside("page.html"))
    return template.substitute(
        style=_file_beside("page.css"), script=_file_beside("page.js"), data=data
    )


def _file_beside(name: str) -> str:
    """Return the text of a file in this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _kernels(layer: LayerKernels) -> dict[str, Any]:
    """Return the kernels of a layer as data for the script."""
    largest_cells = _largest(layer.cells)
    largest_weights = _largest(layer.weights)
    return {
        "name": layer.name,
        "total": layer.total,
        "share": layer.energy_share,
        "size": layer.cells.shape[1:],
        "elements": layer.weights.shape[1],
        "channels": layer.channels,
        "largestWeights": largest_weights.flatten().tolist(),
        "cells": _packed(INT8_MAX * layer.cells.double() / largest_cells, torch.int8),
        "positions": _packed(UNITS_PER_CELL * layer.positions, torch.int16),
        "weights": _packed(INT8_MAX * layer.weights.double() / largest_weights, torch.int8),
    }


def _receptive_fields(pictures: ReceptiveFieldMaps) -> dict[str, Any]:
    """Return the receptive fields as data for the script."""
    maps = []
    for field in pictures.maps:
        values = 1 + field.logs / pictures.decades  # 0 at the end of the scale, 1 at the largest
        maps.append(
            {
                "name": field.title,
                "what": field.what,
                "size": field.logs.shape,
                "pixels": field.size,
                "values": _packed(values * UINT8_MAX, torch.uint8),
                "sentence": field.sentence,
            }
        )
    return {"notes": pictures.notes, "decades": pictures.decades, "maps": maps}


def _bars(stages: Sequence[LayerTotals], cost: str, unit: str) -> dict[str, Any] | None:
    """Return a cost of each stage as data for the script; None if it is unknown for any stage."""
    rows = []
    for stage in stages:
        change: Change = getattr(stage, cost)
        if change.delta is None:
            return None
        labels = [short_count(change.before), short_count(change.after)]
        rows.append(
            {"name": stage.name, "before": change.before, "after": change.after, "labels": labels}
        )
    return {"unit": unit, "rows": rows}


def _plain(value: Any) -> Any:
    """Convert to JSON values: strings without control characters, floats with few digits."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Tensor):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def _largest(values: Tensor) -> Tensor:
    """Return the largest |value| of each kernel, or 1 if all are 0: (N, ...) -> (N, 1, ...)."""
    axes = list(range(1, values.dim()))
    largest = values.double().abs().amax(axes, keepdim=True)
    return largest.where(largest > 0, 1.0)


def _packed(values: Tensor, dtype: torch.dtype) -> str:
    """Round and clamp values to an integer dtype; return their little-endian bytes in base64."""
    limits = torch.iinfo(dtype)
    numbers = values.double().round().clamp(limits.min, limits.max).to(dtype)
    return base64.b64encode(numbers.contiguous().numpy().tobytes()).decode("ascii")
