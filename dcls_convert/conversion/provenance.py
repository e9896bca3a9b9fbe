"""The record of how a network was converted: the request, the weights and the versions used.

Except in the command, it names files without their folders. It contains no time, so equal requests
give equal records.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..networks.position_parameters import position_parameters
from ..networks.wrappers import plain_name
from ..records import STRICT, Record
from ..text import printable, shortened
from ..weights.tensors_hash import can_be_hashed, tensors_hash

HASH_DIGITS = 16  # number of digits of a hash that are shown; config.json has all of them
# On a converted model; copies and pickles keep them.
PROVENANCE_ATTRIBUTE = "dcls_provenance"
START_ATTRIBUTE = "dcls_start"  # a hash of the positions after the conversion, or after loading


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsOrigin:
    """The weights before the conversion."""

    __pydantic_config__ = STRICT

    # "random", "pretrained", "in memory", or the name of the file.
    source: str
    tensors: str | None  # their `tensors_hash`; None if they cannot be read as bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesOrigin:
    """The images of a calibration."""

    __pydantic_config__ = STRICT

    number: int  # of images read, including those held out
    # SHA-256 of the images' sorted paths relative to the folder; None for tensors.
    names: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance(Record):
    """How a network was converted. It is kept while the network is trained, saved and folded."""

    __pydantic_config__ = STRICT

    format: int = 1
    request: dict[str, Any]  # the model, and the options that differ from their defaults
    command: str | None  # as typed; None from Python
    seed: int
    init: str  # how new layers started
    positions: str | None  # for the start "random"; None for all others
    weights: WeightsOrigin
    calibration: ImagesOrigin | None
    versions: dict[str, str]  # of this program, torch and timm
    trained: bool = False  # whether positions have moved since the conversion


def provenance_of(model: nn.Module) -> Provenance | None:
    """Return the record that a converted model carries, or None if it has none.

    It says that the model was trained if positions have moved since `attach_provenance_`.
    """
    provenance: Provenance | None = vars(model).get(PROVENANCE_ATTRIBUTE)
    start = vars(model).get(START_ATTRIBUTE)
    if provenance is not None and start is not None and _positions_hash(model) not in (None, start):
        return replace(provenance, trained=True)
    return provenance


def attach_provenance_(model: nn.Module, provenance: Provenance | None) -> None:
    """Attach a record to the model and to its future copies; do nothing if it is None."""
    if provenance is not None:
        vars(model)[PROVENANCE_ATTRIBUTE] = provenance
        vars(model)[START_ATTRIBUTE] = _positions_hash(model)


def _positions_hash(model: nn.Module) -> str | None:
    """Return a hash of the model's positions; None if it has none, or none with values."""
    tensors = {}
    for parameter in position_parameters(model):
        tensors[plain_name(parameter.name)] = parameter.tensor.detach()
    if not tensors or not all(map(can_be_hashed, tensors.values())):
        return None
    return tensors_hash(tensors.items())


def provenance_sentences(provenance: Provenance) -> list[str]:
    """Return sentences on the start, weights, images and versions of a conversion."""
    start = f"Start: {provenance.init}, seed {provenance.seed}"
    if provenance.positions is not None:
        start += f", positions {provenance.positions}"
    sentences = [f"{start}.", _weights(provenance)]
    if provenance.trained:
        sentences.append("Trained since the conversion: positions have moved.")
    images = provenance.calibration
    if images is not None:
        text = f"Calibration: {images.number:,} images"
        if images.names is not None:
            text += f" (SHA-256 of their names: {_short(images.names)})"
        sentences.append(f"{text}.")
    versions = ", ".join(f"{name} {value}" for name, value in provenance.versions.items())
    sentences.append(f"Versions: {versions}.")
    return list(map(printable, sentences))


def command_text(provenance: Provenance) -> str:
    """Return the command as typed; from Python, the model and the stated options."""
    if provenance.command is not None:
        return printable(provenance.command)
    return printable(", ".join(f"{name}={value}" for name, value in provenance.request.items()))


def _weights(provenance: Provenance) -> str:
    """Say where the weights before the conversion came from."""
    text = f"Weights before the conversion: {shortened(provenance.weights.source)}"
    if provenance.weights.tensors is not None:
        text += f" (SHA-256 of the tensors: {_short(provenance.weights.tensors)})"
    return f"{text}."


def _short(digest: str) -> str:
    return f"{digest[:HASH_DIGITS]}..."
