"""All pictures of a checkpoint: as data, and as one page.

The page is `page.html` with `page.css` and `page.js` inside; the script draws the data.
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
from .history import HistoryPicture, read_history_of
from .number_text import before_after, percent, short_count, with_separators
from .receptive_field import ReceptiveFieldMaps, ReceptiveFieldOptions, field_pictures

STAGE_COSTS = {"params": "Parameters", "macs": "MACs for one image"}  # of a stage
DRAWN_DIGITS = 4  # significant, of numbers that are drawn
# Numbers are sent as integers, to keep the page small; the script divides by these factors.
UNITS_PER_CELL = 100  # of coordinates, which are 16-bit
INT8_MAX = torch.iinfo(torch.int8).max  # of cells and weights, as shares of their kernel's largest
UINT8_MAX = torch.iinfo(torch.uint8).max  # of receptive fields, on a scale from 0 to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Everything that is drawn of a checkpoint."""

    name: str  # of the folder
    report: ConversionReport
    inspection: Inspection
    positions: tuple[PositionPicture, ...]
    kernels: tuple[LayerKernels, ...]
    # Why the model was not rebuilt; kernels are then made from the stored weights.
    why_not_rebuilt: str | None = None
    receptive_fields: ReceptiveFieldMaps | None = (
        None  # None: not asked for, or the model was not rebuilt
    )
    history: HistoryPicture | None = None  # None: not asked for


def pictures_of_model(model: nn.Module, plan: ConversionPlan, folder: Path) -> Pictures:
    """Pictures of a converted model in memory, except those for which it would have to run."""
    state = model.state_dict()
    return _pictures(plan, state, model, inspect_positions(plan, state, folder))


def _pictures(
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    model: nn.Module | None,
    inspection: Inspection,
    **more: Any,
) -> Pictures:
    return Pictures(
        name=Path(inspection.folder).resolve().name,
        report=predict_report(plan),
        inspection=inspection,
        positions=position_pictures(plan, state, inspection),
        kernels=kernel_pictures(plan, state, model),
        **more,
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
    """Pictures of a checkpoint.

    Args:
        checkpoint: An opened folder that this program wrote.
        fields: How to find effective receptive fields; None: without them.
        history: What a `PositionTracker` wrote; None: no history.
        notify: Is told what is done next.
        note: Is told about images that are skipped.
        trust_code: Import and run the user's code that the folder names as its model. Without it,
            the kernels of such a folder are made from the stored weights.
    """
    plan = plan_with_positions(checkpoint)
    track = None
    if history is not None:
        track = read_history_of(history, plan)
    model = None
    reason = None
    try:
        source = checkpoint.source(trust_code=trust_code)
    except DclsConvertError as error:
        reason = one_line(error)
        state: Mapping[str, Tensor] = checkpoint.read_state()
    else:
        notify("loading")
        model = build_from_checkpoint(checkpoint, source)
        state = model.state_dict()
    inspection = inspect_state(checkpoint, state)
    notify("drawing positions and kernels")
    drawn_fields = None
    if fields is not None and model is not None:
        drawn_fields = field_pictures(model, source, plan, state, fields, notify, note)
    return _pictures(
        plan,
        state,
        model,
        inspection,
        why_not_rebuilt=reason,
        receptive_fields=drawn_fields,
        history=track,
    )


def page(pictures: Pictures) -> str:
    """The text of the page, in ASCII.

    Names from data can neither end the script nor hold control characters.
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
        "kernels": list(map(_kernels, pictures.kernels)),
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
    """Names and values of the page's first lines."""
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
    """The template with what its script draws; in ASCII, as `page`."""
    content = {**content, "made": f"Made by dcls-convert {__version__}. This page uses no network."}
    data = json.dumps(_plain(content), separators=(",", ":"), allow_nan=False)
    data = data.replace(" %", "\\u00a0%")  # a space at which no line breaks
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = Template(_file_beside("page.html"))
    return template.substitute(
        style=_file_beside("page.css"), script=_file_beside("page.js"), data=data
    )


def _file_beside(name: str) -> str:
    """The text of a file in this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _kernels(layer: LayerKernels) -> dict[str, Any]:
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
    maps = []
    for field in pictures.maps:
        values = (1 + field.logs / pictures.decades) * UINT8_MAX
        maps.append(
            {
                "name": field.title,
                "what": field.what,
                "size": field.logs.shape,
                "pixels": field.size,
                "values": _packed(values, torch.uint8),
                "sentence": field.sentence,
            }
        )
    return {"notes": pictures.notes, "decades": pictures.decades, "maps": maps}


def _bars(stages: Sequence[LayerTotals], cost: str, unit: str) -> dict[str, Any] | None:
    """A cost of each stage; None if it is not known for all of them."""
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
    """Values of JSON: names without control characters, numbers of few digits."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return float(f"{value:.{DRAWN_DIGITS}g}")
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
    """The largest |value| of each kernel, with the axes of `values`; 1 where all are 0."""
    axes = list(range(1, values.dim()))
    largest = values.double().abs().amax(axes, keepdim=True)
    return largest.where(largest > 0, 1.0)


def _packed(values: Tensor, dtype: torch.dtype) -> str:
    """Numbers, rounded and clamped to a type of integers, as base64 of little-endian bytes."""
    limits = torch.iinfo(dtype)
    numbers = values.double().round().clamp(limits.min, limits.max).to(dtype)
    return base64.b64encode(numbers.contiguous().numpy().tobytes()).decode("ascii")
