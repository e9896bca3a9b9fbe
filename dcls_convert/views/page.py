"""The pictures as one page: their data as JSON in the template `page.html`, whose script draws them."""

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..depthwise.geometry import size_text
from ..errors import printable
from ..reports.report import Change
from .history import HistoryPicture
from .kernels import LayerKernels
from .pictures import FieldPictures, Pictures, StageCost
from .positions import EXPLANATION, PositionPicture
from .receptive_field import FieldPicture, decades
from .report import short_count

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "/* data */"  # in the template
UNBROKEN_PERCENT = "\\u00a0%"  # in JSON
DIGITS = 4  # significant, of numbers that are drawn
PLACES_PER_CELL = 100  # of coordinates, which are 16-bit integers in the page


def page(pictures: Pictures) -> str:
    """The text of the page, in ASCII: names from data can neither end the script nor hold control characters."""
    text = json.dumps(_data(pictures), separators=(",", ":"), allow_nan=False).replace(" %", UNBROKEN_PERCENT)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text)


def _data(pictures: Pictures) -> dict[str, Any]:
    report = pictures.report
    return {
        "title": printable(pictures.name),
        "subtitle": printable(f"{report.model or 'a model'} with learnable element positions (DCLS)"),
        "facts": _facts(pictures),
        "positionsNote": EXPLANATION,
        "positions": [_positions(picture) for picture in pictures.positions],
        "kernels": [_kernels(layer) for layer in pictures.kernels],
        "kernelNotes": _kernel_notes(pictures),
        "costs": _costs(pictures.costs),
        "costNotes": _cost_notes(pictures),
        "fields": None if pictures.fields is None else _fields(pictures.fields),
        "history": None if pictures.history is None else _history(pictures.history),
        "made": f"Made by dcls-convert {__version__}. This page uses no network.",
    }


def _facts(pictures: Pictures) -> list[list[str]]:
    report, inspection = pictures.report, pictures.inspection
    facts = [["Parameters", _arrow(report.params, exact=True)], ["MACs for one image", _arrow(report.macs)]]
    facts += [
        ["Layers replaced", f"{len(report.layers):,}"],
        ["Elements, shared ones once", f"{inspection.elements:,}"],
    ]
    facts += [["At the border", f"{100 * inspection.share('border_share'):.1f} %"]]
    return [*facts, ["Overlapping", f"{100 * inspection.share('overlap_share'):.1f} %"]]


def _arrow(change: Change, *, exact: bool = False) -> str:
    text = (lambda count: f"{count:,}") if exact else short_count
    if change.before is None or change.after is None or change.percent is None:
        return "not known"
    return f"{text(change.before)} \u2192 {text(change.after)} ({change.percent:+.2f} %)"


def _positions(picture: PositionPicture) -> dict[str, Any]:
    return {
        "name": printable(picture.row.name),
        "title": picture.title,
        "axes": picture.axes,
        "size": picture.size,
        "perCell": picture.bins_per_cell,
        "heat": [count for line in picture.heat for count in line],
        "histograms": picture.histograms,
        "extents": picture.extents,
        "sentences": picture.sentences,
    }


def _kernels(layer: LayerKernels) -> dict[str, Any]:
    shown, share = len(layer.kernels), f"{100 * layer.energy_share:.0f} % of the energy"
    cells = [[cell for line in kernel.cells for cell in line] for kernel in layer.kernels]
    weights = [[weight for *_, weight in kernel.elements] for kernel in layer.kernels]
    places = [[side for row, column, _ in kernel.elements for side in (row, column)] for kernel in layer.kernels]
    return {
        "name": printable(layer.name),
        "note": f"{shown:,} of {layer.total:,} kernels, with {share}"
        if shown < layer.total
        else f"all {shown:,} kernels",
        "size": [len(layer.kernels[0].cells), len(layer.kernels[0].cells[0])],
        "elements": len(weights[0]),
        "channels": [kernel.channels for kernel in layer.kernels],
        "scales": [_rounded(_largest(values)) for values in weights],
        "cells": _packed(map(_scaled, cells), torch.int8),
        "places": _packed(([PLACES_PER_CELL * side for side in values] for values in places), torch.int16),
        "weights": _packed(map(_scaled, weights), torch.int8),
    }


def _largest(values: Sequence[float]) -> float:
    return max(map(abs, values), default=0.0) or 1.0


def _scaled(values: Sequence[float]) -> list[float]:
    """From -127 to 127."""
    most = _largest(values)
    return [127 * value / most for value in values]


def _kernel_notes(pictures: Pictures) -> list[str]:
    notes = [
        "Constructed kernels of each layer, those with the most energy (sum of squares) first. Choose one to see the "
        "elements behind it: with the pointer, by a click, or with the arrow keys. Each kernel has a scale of its own."
    ]
    if any(len(layer.dilated_size) == 3 for layer in pictures.report.layers):
        notes.append("Kernels of three axes are summed over the first.")
    if pictures.raw_weights is not None:
        notes.append(
            "The network was not rebuilt, so kernels are made of the weights as they are stored, without "
            f"standardisation, if it has any: {printable(pictures.raw_weights)}"
        )
    return notes


def _costs(costs: Sequence[StageCost]) -> list[dict[str, Any]]:
    units = [("Parameters", [cost.params for cost in costs]), ("MACs for one image", [cost.macs for cost in costs])]
    return [
        {
            "unit": unit,
            "rows": [
                {
                    "name": printable(cost.stage),
                    "before": change.before,
                    "after": change.after,
                    "labels": [short_count(change.before), short_count(change.after)],
                }
                for cost, change in zip(costs, changes, strict=True)
            ],
        }
        for unit, changes in units
        if not any(change.before is None for change in changes)
    ]


def _cost_notes(pictures: Pictures) -> list[str]:
    report = pictures.report
    notes = [
        "The replaced convolutions by stage, before and after. Parameters count with biases; positions that layers "
        f"share count in the first of them. The rest of the network keeps its {report.params_untouched:,} parameters."
    ]
    if report.macs.before is None:
        notes.append(printable(f"MACs are not known: {report.macs.note}"))
    return notes


def _fields(fields: FieldPictures) -> dict[str, Any]:
    scale = decades(fields.fields)
    what = (
        f"How much each pixel counts for the unit in the middle of {fields.layer}, the last replaced layer: mean "
        f"absolute gradient over {fields.images}, as a share of the largest, on a logarithmic scale."
    )
    notes = [*([what] if fields.images else []), *fields.notes]
    return {
        "notes": list(map(printable, notes)),
        "decades": scale,
        "maps": [_field(field, scale) for field in fields.fields],
    }


def _field(field: FieldPicture, scale: int) -> dict[str, Any]:
    logs = ([(1 + log / scale) * 255 for log in line] for line in field.logs)
    return {
        "name": printable(field.title),
        "what": printable(field.what),
        "size": [len(field.logs), len(field.logs[0])],
        "pixels": field.size,
        "values": _packed(logs, torch.uint8),
        "sentence": field_sentence(field),
    }


def field_sentence(field: FieldPicture) -> str:
    """How large the field is."""
    held = ", ".join(f"{side} x {side} hold {100 * share:.0f} %" for share, side in field.sides)
    return f"Of the gradient, the central pixels: {held}, of {size_text(field.size)}."


def _history(history: HistoryPicture) -> dict[str, Any]:
    tracks, steps = history.tracks, history.steps
    curves: list[tuple[str, str, Callable[[Any], Any]]] = [
        ("Speed", "cells per step", lambda track: track.speed),
        ("Spread", "cells", lambda track: track.spread),
        ("Elements at the border", "%", lambda track: [100 * share for share in track.border]),
    ]
    return {
        "steps": steps,
        "movingSteps": history.moving_steps,
        "names": [printable(track.name) for track in tracks],
        "curves": [
            {"title": title, "unit": unit, "lines": [[_rounded(value) for value in of(track)] for track in tracks]}
            for title, unit, of in curves
        ],
        "moving": [
            {
                "name": printable(track.name),
                "size": track.size,
                "frames": [[list(map(_rounded, axis)) for axis in frame] for frame in track.frames],
                "histograms": track.histograms,
            }
            for track in tracks
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _packed(lines: Iterable[Sequence[float]], dtype: torch.dtype) -> str:
    """Numbers, rounded and clamped to a type of integers, as base64 of little-endian bytes."""
    limits = torch.iinfo(dtype)
    numbers = torch.tensor(list(lines), dtype=torch.float64).round().clamp(limits.min, limits.max).to(dtype)
    return base64.b64encode(numbers.numpy().tobytes()).decode("ascii")
