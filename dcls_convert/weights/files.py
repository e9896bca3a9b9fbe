"""Read weights from safetensors files and files of torch.save, without running code in them."""

import argparse
import contextlib
import json
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..input import SAFETENSORS_SUFFIX, TORCH_SUFFIXES, check_file, read_bytes
from ..networks.running import ignored_warnings
from ..progress import Note, ignore_messages
from ..text import one_line, short_list, shortened
from .formats import find_weights_file, format_of_weights
from .state_dict_choice import UnreadValue, choose_state_dict

MAX_HEADER_BYTES = 16 << 20  # bytes of a safetensors header; enough for 150,000 tensors
# Largest ratio of unpacked size to file size for a torch file. torch itself does not compress.
MAX_UNPACKED_RATIO = 20
# What a torch file may name besides tensors. timm's checkpoints hold their arguments as a
# Namespace, often with paths, and many files hold scores as NumPy scalars. These are not needed,
# and NumPy's own functions trust the types that a pickle states, so they are not called.
HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace,
    (UnreadValue, "numpy.dtype"),
    (UnreadValue, "numpy.ndarray"),
    (UnreadValue, "numpy.core.multiarray.scalar"),
    (UnreadValue, "numpy._core.multiarray.scalar"),
    (UnreadValue, "numpy.core.multiarray._reconstruct"),
    (UnreadValue, "numpy._core.multiarray._reconstruct"),
    (UnreadValue, "pathlib.PosixPath"),
    (UnreadValue, "pathlib.WindowsPath"),
    (UnreadValue, "pathlib._local.PosixPath"),  # of Python 3.13
    (UnreadValue, "pathlib._local.WindowsPath"),
]
_SAFE_GLOBALS_LOCK = threading.Lock()  # torch has one list for the process
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
    weights: Mapping[str, Tensor] | str | Path,
    *,
    key: str | None = None,
    note: Note = ignore_messages,
) -> dict[str, Tensor]:
    """Return the given state dict, or read it from a safetensors or torch file.

    Training scripts may wrap state dicts in mappings: `choose_state_dict` says which is taken.

    Args:
        weights: A state dict; its file, or the index of its shards; or a folder with one of these.
        key: Says which state dict, see `choose_state_dict`.
        note: Called with lines that say which file and which of its state dicts are taken.

    Raises:
        CheckpointError: The file cannot be read, or there is no state dict in it.
    """
    if isinstance(weights, Mapping):
        where = "the state dict"
        state: Mapping[Any, Any] = weights
        if key is not None:
            state = choose_state_dict(weights, where, key=key, note=note)
        return checked_entries(state, where)
    path = Path(weights)
    file = find_weights_file(path)
    if file != path:
        note(f"checkpoint {path}: takes {file.name}")
    where = f"checkpoint {file}"
    state = choose_state_dict(_read_file(file, where), where, key=key, note=note)
    return checked_entries(state, where)


def _read_file(path: Path, where: str) -> Any:
    file_format = format_of_weights(path)
    if file_format == "torch":
        return _read_torch(path, where)
    if file_format == "safetensors":
        return load_safetensors(path, "checkpoint")
    return _read_shards(path, where)


def _read_shards(index: Path, where: str) -> dict[str, Tensor]:
    """Return the tensors of all shards that an index names; they lie beside it."""
    file_names = _file_names_of_tensors(index, where)
    state: dict[str, Tensor] = {}
    for file_name in sorted(set(file_names.values())):
        # An index from a stranger must not open any other file.
        is_plain = Path(file_name).name == file_name and "\\" not in file_name
        if not is_plain or not file_name.endswith((SAFETENSORS_SUFFIX, *TORCH_SUFFIXES)):
            raise CheckpointError(
                f"{where}: {shortened(file_name)!r} is not a file name of weights"
            )
        shard = index.with_name(file_name)
        content = _read_file(shard, f"checkpoint {shard}")
        if not isinstance(content, Mapping):
            raise CheckpointError(f"checkpoint {shard}: holds no state dict (names to tensors)")
        state.update(content)
    missing = file_names.keys() - state.keys()
    if missing:
        raise CheckpointError(f"{where}: its files lack {short_list(sorted(missing))}")
    return state


def _file_names_of_tensors(index: Path, where: str) -> dict[str, str]:
    """Return which file has which tensor, as an index of shards states it."""
    try:
        content = json.loads(read_bytes(index))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not a readable index: {one_line(error)[:200]}") from error
    file_names: Any = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_names, dict) or not all(map(_is_text, file_names.values())):
        raise CheckpointError(f"{where}: not an index of weights: it needs a weight_map of files")
    return file_names


def _is_text(value: object) -> bool:
    return isinstance(value, str)


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
        if isinstance(value, UnreadValue):
            raise CheckpointError(
                f"{where}: entry {shortened(name, 120)!r} is a NumPy value or a path; save tensors"
            )
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
        with _SAFE_GLOBALS_LOCK, torch.serialization.safe_globals(HARMLESS):
            return _unpickle(path, where)
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes can raise anything when unpickled: struct.error, ...
        raise CheckpointError(
            f"{where}: download or save it again; it is damaged ({type(error).__name__})"
        ) from error


def _unpickle(path: Path, where: str) -> Any:
    try:
        # Old files make torch warn about its own code.
        with path.open("rb") as file, ignored_warnings:
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused: list[str] = []
        with contextlib.suppress(Exception):  # an old file, or a damaged one
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        names = f" ({short_list(sorted(refused))})" if refused else ""
        raise CheckpointError(
            f"{where}: save its state dict alone, torch.save(model.state_dict(), FILE); it holds "
            f"more than tensors{names}, which would run code, or it is damaged "
            f"({type(error).__name__})"
        ) from error
