"""The stamp in a weights file: who wrote it, a hash of its tensors, and the model's outputs."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ..records import STRICT, Record
from ..weights.files import open_safetensors
from .fingerprint import Fingerprint

METADATA_KEY = "dcls_convert"  # in the metadata of the weights, and in config.json
STAMP_FORMAT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp(Record):
    """The metadata that `save_converted` puts into the weights file."""

    __pydantic_config__ = STRICT

    format: Annotated[int, Field(ge=STAMP_FORMAT, le=STAMP_FORMAT)] = STAMP_FORMAT
    version: str  # of the dcls-convert that wrote the file
    tensors: str  # `tensors_hash`
    fingerprint: Fingerprint


def read_stamp(path: Path) -> Stamp | None:
    """Read the stamp in the header of a weights file.

    Return None if another program wrote the file, as timm does after fine-tuning.
    """
    with open_safetensors(path) as file:
        metadata = file.metadata() or {}
    text = metadata.get(METADATA_KEY)
    if text is None:
        return None
    return Stamp.from_json(text, f"{path}: its metadata {METADATA_KEY!r}")


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of tensors, in any order.

    Tensors are taken one after another, so they need not be in memory together.
    """
    digests = []
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # torch cannot view a tensor without axes as bytes.
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
        digests.append((name, digest.hexdigest()))
    return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()
