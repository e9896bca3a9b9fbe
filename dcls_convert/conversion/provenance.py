"""The record of how a network was converted: a JSON mapping that stays with the network.

The record names files without their folders, except in the command. It contains no time, so equal
requests give equal records. A record that was read from a folder may hold any JSON values.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..text import printable
from .request import ConversionRequest, NetworkRequest

# Attribute of a converted model; copies and pickles keep it.
PROVENANCE_ATTRIBUTE = "dcls_provenance"
# Fields of a request that the record states separately, not as options.
RECORDED_APART = ("model", "seed", "weights", "pretrained")
NOT_RECORDED = ("needs_authors_elements",)  # options that no record needs
# Options whose values are files, or objects in memory.
FILE_OPTIONS = ("rules", "calibration", "held_out", "example_inputs")
IN_MEMORY = "in memory"  # stands for weights, inputs and rules that no file holds


def describe_conversion(request: ConversionRequest) -> dict[str, Any]:
    """Return the record of a conversion."""
    weights = "random"
    network = request.network
    if isinstance(network.weights, Path):
        weights = network.weights.name
    elif network.pretrained:
        weights = "pretrained"
    elif network.trained:
        weights = IN_MEMORY
    return {
        "command": request.command,
        "request": {"model": _model_name(network), **_stated_options(request)},
        "seed": network.seed,
        "weights": weights,
        "versions": {
            "dcls-convert": __version__,
            "torch": str(torch.__version__),
            "timm": version("timm"),
        },
    }


def _model_name(request: NetworkRequest) -> str:
    """Return the user's name of the model, without folders; for a model in memory, its class."""
    if not isinstance(request.model, str):
        return type(request.model).__name__
    if request.model.startswith("local-dir:"):
        return f"local-dir:{Path(request.model).name}"
    return request.model


def _stated_options(request: ConversionRequest) -> dict[str, Any]:
    """Return the options that differ from their defaults, as JSON values."""
    stated: dict[str, Any] = {}
    for record in (request.options, request.network, request.start):
        for option in fields(record):
            value = getattr(record, option.name)
            if option.name in RECORDED_APART + NOT_RECORDED or value is None:
                continue
            value = _plain_value(option.name, value)
            if value != option.default:
                stated[option.name] = value
    if request.plan_folder is not None:
        stated["plan_folder"] = request.plan_folder.name
    return stated


def _plain_value(name: str, value: Any) -> Any:
    """Return an option as a JSON value. Only the last component of a path is kept."""
    if name not in FILE_OPTIONS:
        return json.loads(json.dumps(value, default=str))
    value = getattr(value, "source", value)  # of a `RuleSet`
    if isinstance(value, str | Path):
        return Path(value).name
    return IN_MEMORY


def provenance_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the record of a converted model, or None if there is none."""
    provenance: dict[str, Any] | None = vars(model).get(PROVENANCE_ATTRIBUTE)
    return provenance


def attach_provenance_(model: nn.Module, provenance: dict[str, Any] | None) -> None:
    """Attach a record to the model, which its copies keep. None changes nothing."""
    if provenance is not None:
        vars(model)[PROVENANCE_ATTRIBUTE] = provenance


def provenance_lines(provenance: Mapping[str, Any]) -> list[str]:
    """Return a line of printable text for each entry, such as "seed: 0"."""
    lines = []
    for name, value in provenance.items():
        if value is None:
            continue
        text = _text(value)
        if isinstance(value, dict):
            text = ", ".join(f"{key}={_text(entry)}" for key, entry in value.items())
        lines.append(printable(f"{name}: {text}"))
    return lines


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)
