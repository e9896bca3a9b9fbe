"""Where a converted network comes from: what was asked, from which weights, by which versions.

The record names files, never their folders, and no time: equal requests give equal records.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..fitting.images import Calibration
from ..networks.tensors_hash import can_be_hashed, tensors_hash
from ..options import PlanOptions, command_line
from ..planning.rules import UNNAMED_RULES
from ..records import STRICT, Record
from ..surgery.authors import AuthorsWeights
from .request import ConversionRequest
from .resolved import ResolvedRequest

PROVENANCE_ATTRIBUTE = "dcls_provenance"  # of a converted model; copies and pickles keep it
# Fields of a request that are not options to record. `options` is recorded by its own fields;
# `offline` is for dry runs, which write nothing.
NOT_RECORDED = ("model", "options", "offline")
# What the command line calls fields of a request whose names it does not use.
OPTION_NAMES = {"weights": "checkpoint", "calibration": "calibrate", "most_images": "images"}
# `Provenance.init` for elements of the authors' package; other starts are words of `--init`.
AUTHORS = "authors"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsOrigin:
    """The weights before the conversion."""

    __pydantic_config__ = STRICT

    # "random", "pretrained", "in memory", or the name of the file.
    source: str
    tensors: str | None  # `tensors_hash` of them; None if they cannot be read as bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesOrigin:
    """The images of a calibration."""

    __pydantic_config__ = STRICT

    number: int  # of the images that were read, including those held out
    names: str | None  # SHA-256 of their sorted names below the folder; None for tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance(Record):
    """How a network was converted. It is kept while the network is trained, saved and folded."""

    __pydantic_config__ = STRICT

    format: int = 1
    request: dict[str, Any]  # the model, and the options that differ from their defaults
    # What can be pasted into a shell; for a model in memory, the call in Python. None if the
    # command line cannot say it.
    command: str | None
    seed: int
    init: str  # how new layers started
    positions: str | None  # of the start "random"; None for others
    weights: WeightsOrigin
    calibration: ImagesOrigin | None
    versions: dict[str, str]  # of this program, torch and timm


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A value that cannot be written down: a variable of the call, by its name."""

    name: str


def provenance_of(model: nn.Module) -> Provenance | None:
    """The record that a converted model carries; None if it has none."""
    found: Provenance | None = vars(model).get(PROVENANCE_ATTRIBUTE)
    return found


def keep_provenance_(model: nn.Module, provenance: Provenance | None) -> None:
    """Let the model carry the record, also in copies; nothing changes if there is none."""
    if provenance is not None:
        vars(model)[PROVENANCE_ATTRIBUTE] = provenance


def describe_conversion(
    resolved: ResolvedRequest, model: nn.Module, images: Calibration | None
) -> Provenance:
    """The record of a conversion that is about to be carried out.

    Args:
        resolved: What will be done.
        model: Still unconverted.
        images: The images of the calibration.
    """
    request = resolved.request
    options = _stated_options(request)
    init: str = resolved.init
    if resolved.authors_weights is not None:
        init = AUTHORS
    record = {"model": _model_name(request)}
    for name, value in options.items():
        record[name] = value
        if isinstance(value, _InMemory):
            record[name] = value.name
    return Provenance(
        request=record,
        command=_command(request, options),
        seed=request.seed,
        init=init,
        positions=request.positions if init == "random" else None,
        weights=WeightsOrigin(
            source=_weights_source(request), tensors=weights_hash(model, resolved.authors_weights)
        ),
        calibration=_images_origin(images),
        versions={
            "dcls-convert": __version__,
            "torch": str(torch.__version__),
            "timm": version("timm"),
        },
    )


def _model_name(request: ConversionRequest) -> str:
    """The model as it was named, without the folders of a path; of one in memory, its class."""
    if not isinstance(request.model, str):
        return type(request.model).__name__
    if request.model.startswith("local-dir:"):
        return f"local-dir:{Path(request.model).name}"
    return request.model


def _weights_source(request: ConversionRequest) -> str:
    if isinstance(request.weights, Path):
        return request.weights.name
    if request.pretrained:
        return "pretrained"
    if isinstance(request.model, str) and request.weights is None:
        return "random"
    return "in memory"


def weights_hash(model: nn.Module, authors_weights: AuthorsWeights | None) -> str | None:
    """The hash of the weights before the conversion: the model's, or those with elements.

    None if a tensor cannot be read as bytes.
    """
    tensors = model.state_dict()
    if authors_weights is not None:
        tensors = dict(authors_weights.rest)
        for name, layer in authors_weights.layers.items():
            for entry, tensor in layer.items():
                tensors[f"{name}.{entry}"] = tensor
    if not all(map(can_be_hashed, tensors.values())):
        return None
    return tensors_hash(tensors.items())


def _images_origin(images: Calibration | None) -> ImagesOrigin | None:
    if images is None:
        return None
    if not images.files:
        return ImagesOrigin(number=len(images), names=None)
    names = "\n".join(sorted(images.files))
    digest = hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()
    return ImagesOrigin(number=len(images.files), names=digest)


def _stated_options(request: ConversionRequest) -> dict[str, Any]:
    """The options that differ from their defaults, as plain values or `_InMemory`."""
    stated: dict[str, Any] = {}
    records: tuple[ConversionRequest | PlanOptions, ...] = (request.options, request)
    for record in records:
        for option in fields(record):
            value = getattr(record, option.name)
            if option.name in NOT_RECORDED or value is None or value is option.default:
                continue
            # Where the default is None, the value may be a tensor, for which `!=` is no one answer.
            if option.default is None or value != option.default:
                stated[option.name] = _plain_value(option.name, value)
    return stated


def _plain_value(name: str, value: Any) -> Any:
    """The value of an option as JSON has it; of a path, the last component."""
    if name == "rules":
        return _rules_name(value)
    if isinstance(value, Path):
        return value.name
    if isinstance(value, str) and name == "calibration":
        return Path(value).name
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence) and all(isinstance(side, int | float) for side in value):
        return list(value)
    return _InMemory(name)


def _rules_name(rules: Any) -> Any:
    """The file or built-in set of rules; rules from a mapping have no name."""
    if isinstance(rules, Mapping) or getattr(rules, "source", "") == UNNAMED_RULES:
        return _InMemory("rules")
    return Path(getattr(rules, "source", rules)).name


def _command(request: ConversionRequest, options: Mapping[str, Any]) -> str | None:
    """The command line, or the call for a model in memory."""
    if not isinstance(request.model, str):
        return _call(options)
    values = {}
    for name, value in options.items():
        if isinstance(value, _InMemory):
            return None
        values[OPTION_NAMES.get(name, name)] = value
    return command_line(_model_name(request), values)


def _call(options: Mapping[str, Any]) -> str:
    """The call in Python; `model`, and other values in memory, are variables."""
    function = "convert_"
    arguments = ["model"]
    for name, value in options.items():
        written = repr(value)
        if isinstance(value, _InMemory):
            written = value.name
        if name == "weights":
            function = "convert_from_authors_"
            arguments.insert(1, written)
        elif name == "authors_version":
            arguments.append(f"version={written}")
        else:
            arguments.append(f"{name}={written}")
    return f"dcls_convert.{function}({', '.join(arguments)})"
