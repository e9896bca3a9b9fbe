"""What a weights file says about itself, and the hashes of configs and tensors."""

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from torch import Tensor

from ..networks.weights import opened
from ..records import Record
from .fingerprint import Fingerprint

STAMP_FORMAT = 1
METADATA_KEY = "dcls_convert"  # one key alone: safetensors writes several in an order that changes from run to run
# What a config tells its readers alone, in `pretrained_cfg`.
DESCRIPTIVE = {"label_names", "label_descriptions", "description", "tag", "notes", "license"}
DESCRIPTIVE |= {"origin_url", "paper_name", "paper_ids"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp(Record):
    """The metadata that `save_converted` puts into the weights file. The hash of its tensors stands in config.json."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    format: int = STAMP_FORMAT
    version: str  # of the program that wrote it
    config: str  # config_hash of the config.json beside it
    fingerprint: Fingerprint | None  # None where none was wanted


def read_stamp(path: Path) -> Stamp | None:
    """From the file's header alone; None where another program wrote the file, as timm does after fine-tuning."""
    with opened(path) as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
    return None if text is None else Stamp.from_json(text, f"{path}: its metadata {METADATA_KEY!r}")


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of what matters in a parsed config.json: neither its layout and order nor labels and descriptions."""
    parts = {name: config.get(name) for name in ("architecture", "model_args", "num_classes")}
    cfg, own = config.get("pretrained_cfg"), config.get(METADATA_KEY)
    if isinstance(cfg, dict):
        cfg = {name: value for name, value in cfg.items() if name not in DESCRIPTIVE}
    parts |= {"pretrained_cfg": cfg, "tensors": own.get("tensors") if isinstance(own, dict) else None}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in any order. Looks at one tensor after the other."""
    digests = []
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().contiguous().reshape(-1)  # torch cannot view a tensor without axes as bytes
        digest.update(flat.view(torch.uint8).numpy().data)
        digests.append((name, digest.hexdigest()))
    return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()


def read_tensors(path: Path, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file, or those of `names`, under its name, one at a time."""
    with opened(path) as file:
        for name in sorted(file.keys()):
            if names is None or name in names:
                yield name, file.get_tensor(name)
