"""What a weights file says about itself: whose plan it belongs to, what its tensors were, and what its model gave."""

import hashlib
import json
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, newer_format, one_line
from ..planning.plan import ConversionPlan

WEIGHTS = "model.safetensors"
CHECKPOINT_FORMAT = 1
NO_STAMP = "has no metadata of dcls-convert, so nothing says that it belongs to the"  # plan, wherever that is
METADATA_KEY = "dcls_convert"  # one key alone: safetensors writes several in an order that changes from run to run


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """The metadata that `save_converted` puts into the weights file."""

    format: int = CHECKPOINT_FORMAT
    version: str  # of the program that wrote it
    plan: str  # ConversionPlan.hash
    tensors: str  # tensors_hash
    fingerprint: dict[str, Any] | None  # Fingerprint.to_dict(); None where none was wanted

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def check_plan(self, plan: ConversionPlan, path: Path, called: str) -> None:
        """Refuse weights of another plan than the one that is `called` so; CheckpointError."""
        if self.plan != plan.hash:
            raise CheckpointError(f"{path}: was not written with {called}")

    def check_tensors(self, found: str, path: Path) -> None:
        """Refuse tensors with another hash than the written ones; CheckpointError."""
        if self.tensors != found:
            raise CheckpointError(f"{path}: its tensors are not those that were written; it is damaged or was changed")

    def check_config(self, config: Path, path: Path) -> None:
        """Refuse weights other than those with which `config` was written, where it can say so; CheckpointError."""
        stated = tensors_of_config(config)
        if stated is not None and stated != self.tensors:
            raise CheckpointError(
                f"{path}: is of another folder, with the same plan: {config.name} states other tensors"
            )


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, whatever the order; one tensor is looked at after the other."""
    return folded_hash((name, tensor_hash(tensor)) for name, tensor in tensors)


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 over dtype, shape and bytes of one tensor on the CPU."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().contiguous().reshape(-1)  # a tensor without axes cannot be seen as bytes
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def folded_hash(hashes: Iterable[tuple[str, str]]) -> str:
    """The hash of a whole file from the names and hashes of its tensors."""
    return hashlib.sha256(json.dumps(sorted(hashes)).encode()).hexdigest()


def tensors_of_config(path: Path) -> str | None:
    """The hash of the tensors beside which a config.json was written; None where it cannot be read or states none."""
    try:
        stated = json.loads(path.read_bytes())[METADATA_KEY]["tensors"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return stated if isinstance(stated, str) else None


def read_stamp(path: Path) -> Stamp | None:
    """The stamp of a safetensors file; None where another program wrote it, as timm does after fine-tuning.

    Reads the file's header alone, which also tells whether the file is as long as it must be.

    Raises:
        CheckpointError: Not readable, written by a newer version of this program, or a stamp that is damaged.
    """
    with _opened(path) as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
    if text is None:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its metadata {METADATA_KEY!r} is not JSON: {one_line(error)}") from error
    check_format(data, CHECKPOINT_FORMAT, str(path))
    wanted: dict[str, type | tuple[type, ...]] = {"version": str, "plan": str, "tensors": str}
    for name, kind in (wanted | {"fingerprint": (dict, type(None))}).items():
        if name not in data or not isinstance(data[name], kind):
            raise CheckpointError(f"{path}: its metadata {METADATA_KEY!r} has no valid {name!r}")
    return Stamp(**{name: data[name] for name in Stamp.__dataclass_fields__})


def check_format(data: object, known: int, where: str) -> None:
    """Refuse data of a newer format with what to do about it, and data that states no format.

    Raises:
        CheckpointError: Names `where`.
    """
    stated = data.get("format") if isinstance(data, dict) else None
    if not isinstance(stated, int) or isinstance(stated, bool) or stated < 1:
        raise CheckpointError(f"{where}: states no format, so dcls-convert did not write it")
    if stated > known:
        raise CheckpointError(newer_format(where, stated, known))


def read_tensors(path: Path, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file, or those of `names`, under its name, one at a time.

    Raises:
        CheckpointError: Not readable.
    """
    with _opened(path) as file:
        for name in sorted(file.keys()):
            if names is None or name in names:
                yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        if not path.is_file():
            kind = "is not a file" if path.exists() else "leads nowhere" if path.is_symlink() else ""
            raise CheckpointError(f"{path}: {kind or 'there is no such file'}")
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {one_line(error)[:200]}") from error
