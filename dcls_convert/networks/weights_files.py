"""Read weights from safetensors files and files of torch.save, without running code in them."""

import argparse
import contextlib
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..input import check_file
from ..progress import Note, ignore_messages
from ..text import one_line, short_list, shortened

# Keys under which training scripts store a state dict. Averaged weights (EMA) come first, as in
# timm.
AVERAGED = ("state_dict_ema", "model_ema")
STATE_DICT_KEYS = (*AVERAGED, "state_dict", "model_state_dict", "model", "net")
MAX_NESTING = 3  # levels of mappings to open; bounded because a mapping can hold itself
SAFETENSORS = ".safetensors"  # suffix
MAX_HEADER_BYTES = 16 << 20  # bytes of a safetensors header; enough for 150,000 tensors
# Largest ratio of unpacked size to file size for a torch file. torch itself does not compress.
MAX_UNPACKED_RATIO = 20
ZIP_MAGIC = b"PK\x03\x04"  # first bytes of a torch file
OLD_TORCH_MAGIC = b"\x80\x02\x8a\n"  # first bytes of files of torch before 1.6
# Packed bits (bits8, float4_e2m1fn_x2) are left out: only special operators can read them.
FLOAT_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INTEGER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBER_DTYPES = {*FLOAT_DTYPES, *INTEGER_DTYPES, torch.complex64, torch.complex128}


def read_weights(
    weights: Mapping[str, Tensor] | str | Path, *, note: Note = ignore_messages
) -> dict[str, Tensor]:
    """Return the given state dict, or read it from a safetensors or torch file.

    Training scripts may wrap a state dict in mappings. If a file has averaged weights and others,
    the averaged ones are used.

    Args:
        weights: A state dict, or its file.
        note: Called with a line that says under which keys the file has its weights.

    Raises:
        CheckpointError: The file cannot be read, or there is no state dict in it.
    """
    if isinstance(weights, Mapping):
        return checked_entries(weights, "the state dict")
    path = Path(weights)
    where = f"checkpoint {path}"
    content = _read_file(path, where)
    keys = _keys_of_state_dict(content)
    if keys is None:
        kind = f"a {type(content).__name__}"
        if isinstance(content, Mapping):
            kind = f"a mapping with {short_list(key for key in content if isinstance(key, str))}"
        raise CheckpointError(f"{where}: holds {kind}, not a state dict (names to tensors)")
    if keys:
        note(f"{where}: {_choice_of_weights(content, keys)}")
    state = content
    for key in keys:
        state = state[key]
    return checked_entries(state, where)


def _read_file(path: Path, where: str) -> Any:
    """Return the content of a file, whose first bytes say what it is, whatever its suffix."""
    check_file(path)
    with path.open("rb") as file:
        start = file.read(9)
    if start.startswith((ZIP_MAGIC, OLD_TORCH_MAGIC)):
        return _read_torch(path, where)
    header_length = int.from_bytes(start[:8], "little")
    is_safetensors = start[8:] == b"{" and header_length < path.stat().st_size
    if is_safetensors or path.suffix == SAFETENSORS:
        return load_safetensors(path, "checkpoint")
    raise CheckpointError(f"{where}: give a safetensors file or one of torch.save; this is neither")


def _keys_of_state_dict(content: Any, depth: int = 0) -> list[str] | None:
    """Return the keys that lead to the state dict in nested mappings, or None if there is none."""
    if not isinstance(content, Mapping) or depth > MAX_NESTING:
        return None
    for key in STATE_DICT_KEYS:
        inner_keys = _keys_of_state_dict(content.get(key), depth + 1)
        if inner_keys is not None:
            return [key, *inner_keys]
    if any(isinstance(value, Tensor) for value in content.values()):
        return []
    return None


def _choice_of_weights(content: Mapping[Any, Any], keys: list[str]) -> str:
    """Describe which of a file's weights are used."""
    place = " / ".join(keys)
    others = [key for key in STATE_DICT_KEYS if key not in AVERAGED and key in content]
    if keys[0] in AVERAGED and others:
        return f"takes the averaged weights, {place}, not {short_list(others)}"
    return f"takes the weights under {place}"


def checked_entries(state: Mapping[Any, Any], where: str) -> dict[str, Tensor]:
    """Return the entries of a state dict, detached.

    Raises:
        CheckpointError: A key is not a string, or a value is not an ordinary dense tensor.
    """
    # Name the types only: a small file can hold a tuple whose text would take gigabytes.
    odd_types = {type(key).__name__ for key in state if not isinstance(key, str)}
    if odd_types:
        raise CheckpointError(
            f"{where}: has keys of type {short_list(sorted(odd_types))}; weights have names"
        )
    entries: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{where}: entry {shortened(name, 120)!r} is a {type(value).__name__}, not a tensor"
            )
        kind = _special_kind(value)
        if kind is not None:
            raise CheckpointError(
                f"{where}: {shortened(name, 120)} is {kind}; "
                "weights must be ordinary dense tensors of numbers"
            )
        entries[name] = value.detach()
    return entries


def _special_kind(tensor: Tensor) -> str | None:
    """Describe what makes a tensor unusable as a weight; None for a dense tensor of numbers."""
    if tensor.is_meta:
        return "without data (meta)"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.dtype not in NUMBER_DTYPES:
        return str(tensor.dtype)
    return None


def _open_lazily(path: Path) -> Any:
    """Open a file to read its tensors, not to map them: a mapped file would count as memory."""
    try:
        return safe_open(path, framework="pt", backend="pread")
    except TypeError:  # safetensors before 0.8 can only map files
        return safe_open(path, framework="pt")


@contextlib.contextmanager
def open_safetensors(path: Path, what: str = "") -> Iterator[Any]:
    """Open a safetensors file whose tensors are read one by one, on request.

    Raises:
        CheckpointError: The file cannot be opened, or reading fails inside the block.
    """
    check_file(path, what)
    try:
        with path.open("rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
        if header_length > MAX_HEADER_BYTES:
            raise ValueError(
                f"its header has {header_length:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed"
            )
        with _open_lazily(path) as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        where = f"{what} {path}".lstrip()
        raise CheckpointError(
            f"{where}: not a readable safetensors file: {one_line(error)[:200]}"
        ) from error


def load_safetensors(path: Path, what: str = "") -> dict[str, Tensor]:
    """Read all tensors of a safetensors file, each into its own memory, which a model can keep.

    Raises:
        CheckpointError: The file cannot be read.
    """
    with open_safetensors(path, what) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}


def _read_torch(path: Path, where: str) -> Any:
    """Return the content of a file of torch.save, unpickled with weights_only=True."""
    try:
        unpacked = 0
        if zipfile.is_zipfile(path):  # no file of torch before 1.6
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(part.file_size for part in archive.infolist())
        if unpacked > MAX_UNPACKED_RATIO * path.stat().st_size:
            raise CheckpointError(
                f"{where}: its parts unpack to {unpacked:,} bytes, "
                f"more than {MAX_UNPACKED_RATIO} times the file's size"
            )
        # timm's training checkpoints hold their arguments as a Namespace. Old files make torch
        # warn about its own code.
        with (
            path.open("rb") as file,  # of a path, torch would read the suffix
            warnings.catch_warnings(action="ignore"),
            torch.serialization.safe_globals([argparse.Namespace]),
        ):
            return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes can raise anything when unpickled: struct.error, ...
        problem = "download or save it again; it is damaged"
        if isinstance(error, pickle.UnpicklingError):
            problem = (
                "save its state dict alone, torch.save(model.state_dict(), FILE); "
                "it holds more than tensors, which would run code, or it is damaged"
            )
        raise CheckpointError(f"{where}: {problem} ({type(error).__name__})") from error
