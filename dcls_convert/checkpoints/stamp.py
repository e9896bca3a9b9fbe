"""The stamp in a weights file, which ties it to the config that was written with it.

The stamp has a hash of the config, and the config has a hash of the weights' tensors, so that files
mixed up from two checkpoints are detected.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..records import STRICT, Record
from ..weights.files import open_safetensors
from .fingerprint import Fingerprint

METADATA_KEY = "dcls_convert"  # in the metadata of the weights, and in config.json
PROVENANCE = "provenance"  # beside the hash of the tensors in config.json
# Entries of `pretrained_cfg` that describe the model to people. Users may edit them.
DESCRIPTIVE = {
    "label_names",
    "label_descriptions",
    "description",
    "tag",
    "notes",
    "license",
    "origin_url",
    "paper_name",
    "paper_ids",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp(Record):
    """The metadata that `save_converted` puts into the weights file.

    The hash of the file's tensors is in config.json.
    """

    __pydantic_config__ = STRICT

    format: int = 1
    version: str  # of the dcls-convert that wrote the file
    config: str  # `config_hash` of the config.json beside the file
    fingerprint: Fingerprint | None  # None if save_converted was called with fingerprint=False


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


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the entries of a parsed config.json that must not be edited.

    Layout, order, labels and descriptions do not change it.
    """
    cfg = config.get("pretrained_cfg")
    if isinstance(cfg, dict):
        cfg = {name: value for name, value in cfg.items() if name not in DESCRIPTIVE}
    parts = {
        "architecture": config.get("architecture"),
        "model_args": config.get("model_args"),
        "num_classes": config.get("num_classes"),
        "pretrained_cfg": cfg,
        "tensors": entry_of(config.get(METADATA_KEY), "tensors"),
        PROVENANCE: entry_of(config.get(METADATA_KEY), PROVENANCE),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def entry_of(data: object, name: str) -> Any:
    """Return an entry of a JSON object; None if it is missing or `data` is not an object."""
    if isinstance(data, dict):
        return data.get(name)
    return None
