"""What a weights file says about itself, and the hash of tensors."""

import hashlib
import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict
from torch import Tensor

from ..networks.weights import opened
from ..records import Record
from .fingerprint import Fingerprint

STAMP_FORMAT = 1
METADATA_KEY = "dcls_convert"  # one key alone: safetensors writes several in an order that changes from run to run


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp(Record):
    """The metadata that `save_converted` puts into the weights file. The hash of its tensors stands in config.json."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    format: int = STAMP_FORMAT
    version: str  # of the program that wrote it
    config: str  # text_hash of the config.json beside it
    fingerprint: Fingerprint | None  # None where none was wanted


def read_stamp(path: Path) -> Stamp | None:
    """The stamp of a safetensors file; None where another program wrote the file, as timm does after fine-tuning.

    Reads the file's header alone, which also tells whether the file is as long as it must be.

    Raises:
        CheckpointError: Not readable, written by a newer version of this program, or a damaged stamp.
    """
    with opened(path) as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
    return None if text is None else Stamp.from_json(text, f"{path}: its metadata {METADATA_KEY!r}")


def text_hash(text: str) -> str:
    """SHA-256 of a text's UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in any order. Looks at one tensor after the other."""
    return text_hash(json.dumps(sorted((name, _tensor_hash(tensor)) for name, tensor in tensors)))


def _tensor_hash(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().contiguous().reshape(-1)  # torch cannot view a tensor without axes as bytes
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(path: Path, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file, or those of `names`, under its name, one at a time.

    Raises:
        CheckpointError: Not readable.
    """
    with opened(path) as file:
        for name in sorted(file.keys()):
            if names is None or name in names:
                yield name, file.get_tensor(name)
