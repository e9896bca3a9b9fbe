"""The pictures as one page: their data as JSON in the template `page.html`, whose script draws them."""

import base64
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..errors import printable
from ..reports.report import Change
from .counts import arrow, exact, percent, short_count
from .elements import LayerKernels
from .pictures import Pictures
from .receptive_field import FieldPictures
from .stages import cost_charts

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "/* data */"  # in the template
UNBROKEN_PERCENT = "\\u00a0%"  # in JSON
DIGITS = 4  # significant, of numbers that are drawn
PLACES_PER_CELL = 100  # of coordinates, which are 16-bit integers in the page


def page(pictures: Pictures) -> str:
    """The text of the page, in ASCII: names from data can neither end the script nor hold control characters."""
    report, inspection, seen = pictures.report, pictures.inspection, pictures.fields
    facts = {
        "Parameters": f"{arrow(report.params)} ({percent(report.params)})",
        "MACs for one image": f"{arrow(report.macs, short_count)} ({percent(report.macs) or 'not counted'})",
        "Layers replaced": exact(len(report.layers)),
        "Elements, shared ones once": exact(inspection.elements),
        "At the border": f"{100 * inspection.share('border_share'):.1f} %",
        "Overlapping": f"{100 * inspection.share('overlap_share'):.1f} %",
    }
    content = {
        "title": pictures.name,
        "subtitle": f"{report.model or 'a model'} with learnable element positions (DCLS)",
        "facts": list(facts.items()),
        "margin": inspection.border_margin,
        "near": inspection.overlap_distance,
        "positions": pictures.positions,
        "kernels": [*map(_kernels, pictures.kernels)],
        "volumes": any(len(layer.dilated_size) == 3 for layer in report.layers),
        "rawWeights": pictures.raw_weights,
        "costs": [{"unit": unit, "rows": _bars(chart)} for unit, chart in cost_charts(report.layers).items()],
        "untouched": exact(report.params_untouched),
        "macsNote": report.macs.note,
        "fields": seen and _fields(seen),
        "history": pictures.history,
        "made": f"Made by dcls-convert {__version__}. This page uses no network.",
    }
    data = json.dumps(_plain(content), separators=(",", ":"), allow_nan=False).replace(" %", UNBROKEN_PERCENT)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, data)


def _kernels(layer: LayerKernels) -> dict[str, Any]:
    return {
        "name": layer.name,
        "total": layer.total,
        "share": layer.energy_share,
        "size": layer.cells.shape[1:],
        "elements": layer.weights.shape[1],
        "channels": layer.channels,
        "scales": _largest(layer.weights).flatten().tolist(),
        "cells": _packed(127 * layer.cells.double() / _largest(layer.cells), torch.int8),
        "places": _packed(PLACES_PER_CELL * layer.positions, torch.int16),
        "weights": _packed(127 * layer.weights.double() / _largest(layer.weights), torch.int8),
    }


def _fields(seen: FieldPictures) -> dict[str, Any]:
    maps = [
        {
            "name": field.title,
            "what": field.what,
            "size": field.logs.shape,
            "pixels": field.size,
            "values": _packed((1 + field.logs / seen.decades) * 255, torch.uint8),
            "sentence": field.sentence,
        }
        for field in seen.fields
    ]
    return {"notes": seen.notes, "decades": seen.decades, "maps": maps}


def _bars(chart: Mapping[str, Change]) -> list[dict[str, Any]]:
    return [
        {
            "name": stage,
            "before": one.before,
            "after": one.after,
            "labels": [*map(short_count, (one.before, one.after))],
        }
        for stage, one in chart.items()
    ]


def _plain(value: Any) -> Any:
    """Values of JSON: names without control characters, numbers of few digits."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Tensor):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _largest(values: Tensor) -> Tensor:
    """Of each kernel, the largest |value|; 1 where all are 0."""
    largest = values.double().abs().amax([*range(1, values.dim())], keepdim=True)
    return largest.where(largest > 0, 1.0)


def _packed(values: Tensor, dtype: torch.dtype) -> str:
    """Numbers, rounded and clamped to a type of integers, as base64 of little-endian bytes."""
    limits = torch.iinfo(dtype)
    numbers = values.double().round().clamp(limits.min, limits.max).to(dtype)
    return base64.b64encode(numbers.contiguous().numpy().tobytes()).decode("ascii")
