"""Describe a conversion that is about to be carried out: its `Provenance`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..fitting.calibration_images import Calibration
from ..planning.plan_options import PlanOptions
from ..weights.tensors_hash import can_be_hashed, tensors_hash
from .authors import AuthorsWeights
from .provenance import ImagesOrigin, Provenance, WeightsOrigin
from .request import ConversionRequest

# Fields of a request that are not recorded as options. Model and command have entries of their own,
# `options` is recorded field by field, `dry_run` writes nothing, and `init`
# says whether there were elements of the authors' layers.
NOT_RECORDED = ("model", "options", "needs_authors_elements", "dry_run", "command")
IN_MEMORY = "in memory"  # stands for weights, images and rules that no file holds
# Value of `Provenance.init` for elements of the authors' package; all others are words of `--init`.
AUTHORS = "authors"


def describe_conversion(
    request: ConversionRequest,
    model: nn.Module,
    authors: AuthorsWeights | None,
    images: Calibration | None,
) -> Provenance:
    """Return the record of a conversion that is about to be carried out.

    Args:
        request: The request.
        model: The model, not converted yet.
        authors: Elements of the authors' layers, which the new layers will take over.
        images: The images of the calibration.
    """
    init: str = AUTHORS if authors is not None else request.start
    return Provenance(
        request={"model": _model_name(request), **_stated_options(request)},
        command=request.command,
        seed=request.seed,
        init=init,
        positions=request.positions if init == "random" else None,
        weights=WeightsOrigin(
            source=_weights_source(request), tensors=weights_hash(model, authors)
        ),
        calibration=_images_origin(images),
        versions={
            "dcls-convert": __version__,
            "torch": str(torch.__version__),
            "timm": version("timm"),
        },
    )


def _model_name(request: ConversionRequest) -> str:
    """Return the model as the user named it, without folders; for one in memory, its class."""
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
    return IN_MEMORY


def weights_hash(model: nn.Module, authors_weights: AuthorsWeights | None) -> str | None:
    """Hash the weights before the conversion: the authors' weights if given, else the model's.

    Return None if a tensor cannot be read as bytes.
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
    """Return the options that differ from their defaults, as JSON values."""
    stated: dict[str, Any] = {}
    records: tuple[ConversionRequest | PlanOptions, ...] = (request.options, request)
    for record in records:
        for option in fields(record):
            value = getattr(record, option.name)
            if option.name in NOT_RECORDED or value is None or value is option.default:
                continue
            plain = _plain_value(option.name, value)
            if plain != option.default:
                stated[option.name] = plain
    return stated


def _plain_value(name: str, value: Any) -> Any:
    """Return the value of an option as a JSON value; of a path, only the last component."""
    if name == "rules" and not isinstance(value, Mapping):
        value = Path(getattr(value, "source", value))
    if isinstance(value, Path):
        return value.name
    if isinstance(value, str) and name == "calibration":
        return Path(value).name
    if name == "input_size":
        return list(value)
    if isinstance(value, bool | int | float | str) or name == "model_kwargs":
        return value
    if isinstance(value, Sequence) and all(isinstance(entry, int | float) for entry in value):
        return list(value)
    return IN_MEMORY
