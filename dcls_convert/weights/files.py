"""Read weights from safetensors files and files of torch.save, without running code in them."""

import argparse
import contextlib
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..file_checks import check_file
from ..progress import Note, ignore_messages
from ..records import read_json
from ..running.process_settings import ignored_warnings
from ..text import one_line, short_list, shortened
from .find_file import INDEX, find_weights_file
from .loading import describe_unusual
from .state_dict_choice import EXTRA_STATE, choose_state_dict

HEADER_START = b"{"  # the ninth byte of a safetensors file
# Bytes: about 100,000 tensors, many more than any network has. Reading a longer header takes long
# and much memory, even if its tensors are empty.
MAX_HEADER_BYTES = 10_000_000
PICKLE_START = b"\x80"  # first byte of a pickle, and of a file of torch before 1.6
# What an index of shards may name: a file beside it, never one elsewhere.
PLAIN_FILE_NAME = re.compile(r"\w[\w.-]*")


class NumpyValueOrPath:
    """Stands for a value of NumPy or a path in a torch file: holds nothing, and runs nothing."""

    def __new__(cls, *_: object) -> "NumpyValueOrPath":
        """Ignore the value."""
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        """Ignore the value."""


# What a torch file may name besides tensors. timm's hold their arguments as a
# Namespace, often with paths, and many files hold scores as NumPy scalars. These are not needed,
# and NumPy's own functions trust the types that a pickle states, so they are not called.
HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace,
    (NumpyValueOrPath, "numpy.dtype"),
    (NumpyValueOrPath, "numpy.ndarray"),
    (NumpyValueOrPath, "numpy.core.multiarray.scalar"),
    (NumpyValueOrPath, "numpy._core.multiarray.scalar"),
    (NumpyValueOrPath, "numpy.core.multiarray._reconstruct"),
    (NumpyValueOrPath, "numpy._core.multiarray._reconstruct"),
    (NumpyValueOrPath, "pathlib.PosixPath"),
    (NumpyValueOrPath, "pathlib.WindowsPath"),
    (NumpyValueOrPath, "pathlib._local.PosixPath"),  # of Python 3.13
    (NumpyValueOrPath, "pathlib._local.WindowsPath"),
]


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
        if key is not None:
            weights = choose_state_dict(weights, where, key=key, note=note)
        return checked_entries(weights, where, note)
    path = Path(weights)
    file = find_weights_file(path)
    if file != path:
        note(f"weights in {path}: takes {file.name}")
    where = f"weights file {file}"
    content = _read_shards(file, note) if file.name.endswith(INDEX) else _read_file(file)
    return checked_entries(choose_state_dict(content, where, key=key, note=note), where, note)


def _read_shards(index: Path, note: Note) -> dict[Any, Any]:
    """Return the tensors of all shards that an index names; they lie beside it."""
    where = f"weights file {index}"
    file_names = read_json(index, where).get("weight_map")
    if not isinstance(file_names, dict):
        raise CheckpointError(f"{where}: not an index of weights: it needs a weight_map of files")
    content: dict[Any, Any] = {}
    shards: set[str] = set()
    for file_name in file_names.values():
        if not isinstance(file_name, str) or not PLAIN_FILE_NAME.fullmatch(file_name):
            raise CheckpointError(
                f"{where}: its weight_map must name files beside it, and no others"
            )
        shards.add(file_name)
    for file_name in sorted(shards):
        shard = index.with_name(file_name)
        content.update(choose_state_dict(_read_file(shard), f"weights file {shard}", note=note))
    return content


def checked_entries(state: Mapping[Any, Any], where: str, note: Note) -> dict[str, Tensor]:
    """Return the entries of a state dict, detached.

    Extra state of modules that is not a tensor is left out.

    Raises:
        CheckpointError: A key is not a string, or a value is not an ordinary dense tensor.
    """
    entries: dict[str, Tensor] = {}
    left_out: list[str] = []
    for name, value in state.items():
        if not isinstance(name, str):
            # Its text is not shown: a small file can hold a tuple whose text would take gigabytes.
            raise CheckpointError(
                f"{where}: has a key of type {type(name).__name__}; weights have names"
            )
        problem = describe_unusual(value)
        if problem is None:
            entries[name] = value.detach()
        elif name.endswith(EXTRA_STATE) and not isinstance(value, Tensor):
            left_out.append(name)
        else:
            raise CheckpointError(
                f"{where}: entry {shortened(name, 120)!r} is {problem}; "
                "weights must be ordinary dense tensors of numbers"
            )
    if left_out:
        note(f"{where}: leaves out extra state that is not a tensor: {short_list(left_out)}")
    return entries


def _read_file(path: Path) -> Any:
    """Return the content of a safetensors or torch file, which its first bytes tell apart."""
    check_file(path)
    where = f"weights file {path}"
    start = _first_bytes(path, where)
    if start[8:9] == HEADER_START:
        return load_safetensors(path, "weights file")
    return _read_torch(path, where, start)


def _first_bytes(path: Path, where: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror}") from error


def _beginning(start: bytes) -> str:
    """Show how a file begins: an HTML page or a Git LFS pointer can be recognised by it."""
    return f"it begins with '{shortened(start.decode(errors='backslashreplace'), 80)}'"


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
    _check_header_length(path, f"{what} {path}".lstrip())
    try:
        with _open_lazily(path) as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        where = f"{what} {path}".lstrip()
        problem = f"not a readable safetensors file: {one_line(error)[:200]}; "
        start = _first_bytes(path, where)
        if start[8:9] == HEADER_START:
            problem += "if it was cut short, copy or download it again"
        else:
            problem += _beginning(start)
        raise CheckpointError(f"{where}: {problem}") from error


def _check_header_length(path: Path, where: str) -> None:
    """Refuse (CheckpointError) a header that is too long to be read.

    The first 8 bytes state its length. A length beyond the file's end is damage, for safetensors
    to find.
    """
    start = _first_bytes(path, where)
    length = int.from_bytes(start[:8], "little")
    is_header = start[8:9] == HEADER_START and length <= path.stat().st_size
    if is_header and length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: its header has {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read, "
            "enough for 100,000 tensors"
        )


def load_safetensors(path: Path, what: str = "") -> dict[str, Tensor]:
    """Read all tensors of a safetensors file, each into its own memory, which a model can keep.

    The memory is torch's, which is aligned: with another alignment, products are summed in another
    order, which changes the last bits of the outputs.

    Raises:
        CheckpointError: The file cannot be read.
    """
    with open_safetensors(path, what) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}


def _read_torch(path: Path, where: str, start: bytes) -> Any:
    """Return the content of a file of torch.save, unpickled with weights_only=True."""
    # Old files make torch warn about its own code. `ignored_warnings` also lets threads take turns,
    # because torch has one list of safe globals for the process.
    with ignored_warnings(), torch.serialization.safe_globals(HARMLESS):
        try:
            _check_not_compressed(path, where)
            with path.open("rb") as file:  # torch would read a name in .safetensors as one
                return torch.load(file, map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # damaged bytes can raise anything: struct.error, ...
            raise CheckpointError(f"{where}: {_why_unreadable(path, start)}") from error


def _check_not_compressed(path: Path, where: str) -> None:
    """Refuse an archive that unpacks to more than its size, which torch.save never writes."""
    if not zipfile.is_zipfile(path):  # a file of torch before 1.6
        return
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(part.file_size for part in archive.infolist())
    if unpacked > path.stat().st_size:
        raise CheckpointError(
            f"{where}: unpacks to {unpacked:,} bytes, more than the file has; "
            "torch.save does not compress"
        )


def _why_unreadable(path: Path, start: bytes) -> str:
    """Say why torch cannot read a file: objects other than tensors, damage, or another format."""
    if not start:
        return "is empty; download or save it again"
    refused: list[str] = []
    with contextlib.suppress(Exception):  # only files of torch 1.6 and later list their names
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if refused or start.startswith(PICKLE_START):
        names = f" ({short_list(sorted(refused))})" if refused else ""
        return (
            f"holds objects other than tensors{names}, and loading those would run code; or the "
            "file is damaged. Save the state dict alone: torch.save(model.state_dict(), FILE)"
        )
    return (
        "is neither a safetensors file nor one of torch.save, or it is damaged; "
        f"{_beginning(start)}"
    )
