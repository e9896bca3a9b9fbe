"""Read the weights file of a folder, and the stamp in its header."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ..errors import CheckpointError
from ..records import STRICT, Record
from ..text import shortened
from ..weights.files import load_safetensors, open_safetensors, read_weights
from .fingerprint import Fingerprint
from .folder import (
    CONFIG,
    FILES,
    METADATA_KEY,
    PICTURE,
    TORCH_WEIGHTS,
    WEIGHTS,
    OpenedFolder,
    open_folder,
)

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


def read_state(opened: OpenedFolder) -> dict[str, Tensor]:
    """Read all tensors of a folder's weights file.

    Raises:
        CheckpointError: The file cannot be read, or its tensors do not match the stored hash.
    """
    torch_file = opened.folder / TORCH_WEIGHTS
    if torch_file.exists() and not opened.weights_path.exists():
        return read_weights(torch_file)
    state = load_safetensors(opened.weights_path)
    check_tensors(opened, state)
    return state


def check_tensors(opened: OpenedFolder, state: Mapping[str, Tensor]) -> None:
    """Refuse (CheckpointError) tensors of the weights file that do not belong to the folder.

    A file without a stamp is accepted: timm writes none after fine-tuning.
    """
    stamp = read_stamp(opened.weights_path)
    if stamp is None:
        return
    if not opened.is_ours:
        raise CheckpointError(
            f"{opened.weights_path}: another program wrote {CONFIG} after these weights; if "
            "that program trained the model, the new weights are in another file"
        )
    # This takes about as long as reading the tensors.
    if stamp.tensors != tensors_hash(state.items()):
        raise CheckpointError(
            f"{opened.weights_path}: its tensors differ from the tensors that were "
            "written; the file is damaged or was changed"
        )


def why_not_our_folder(path: Path) -> str | None:
    """Say why a path must not be replaced by a folder; None if it may be.

    A folder that dcls-convert wrote, or an empty one, may be replaced.
    """
    if path.is_symlink():
        return "is a link, not a folder"
    if not path.is_dir():
        return "is a file, not a folder"
    entries = sorted(path.iterdir())
    for entry in entries:
        is_known = entry.name in (*FILES, PICTURE)
        if not is_known or entry.is_symlink() or not entry.is_file():
            return f"holds {shortened(entry.name)!r}, which dcls-convert does not write"
    if not entries or _was_written_by_dcls_convert(path):
        return None
    return "was not written by dcls-convert"


def _was_written_by_dcls_convert(folder: Path) -> bool:
    """True if the weights file or the config says so; the other may be damaged."""
    with contextlib.suppress(CheckpointError):
        if read_stamp(folder / WEIGHTS) is not None:
            return True
    with contextlib.suppress(CheckpointError):
        return open_folder(folder).stored_plan is not None
    return False
