"""Read weights from safetensors files and files of torch.save, without running code in them."""

import argparse
import contextlib
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
from ..running.process_settings import ignored_warnings
from ..text import one_line, short_list, shortened
from .loading import describe_unusual
from .state_dict_choice import choose_state_dict

HEADER_START = b"{"  # the ninth byte of a safetensors file
MAX_HEADER_BYTES = 10_000_000  # about 100,000 tensors, many more than any network has


class NumpyValueOrPath:
    """Placeholder for a NumPy value or a path in a torch file: holds nothing, runs nothing."""

    def __new__(cls, *_: object) -> "NumpyValueOrPath":
        """Ignore the value."""
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        """Ignore the value."""


# Objects other than tensors that a torch file may name. timm's files hold training arguments as a
# Namespace, often with paths, and many files hold scores as NumPy scalars. Their values are not
# needed. NumPy's own functions are never called, because they trust the types that a pickle states.
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
    """Return the detached tensors of a state dict, or of a safetensors or torch file.

    Training scripts may wrap state dicts in mappings: `choose_state_dict` chooses one of them.

    Args:
        weights: A state dict, or its file.
        key: Which of the file's state dicts to take; see `choose_state_dict`.
        note: Called with a line that says which of the file's state dicts is taken.

    Raises:
        CheckpointError: The file cannot be read or holds no state dict, or an entry has no name or
            is not an ordinary dense tensor.
    """
    content: Any = weights
    where = "the state dict"
    if not isinstance(weights, Mapping):
        path = Path(weights)
        where = f"weights file {path}"
        content = _read_file(path)
    entries: dict[str, Tensor] = {}
    for name, value in choose_state_dict(content, where, key=key, note=note).items():
        if not isinstance(name, str):
            # Do not show the key: a small file can hold a tuple whose text would take gigabytes.
            raise CheckpointError(
                f"{where}: has a key of type {type(name).__name__}; weights have names"
            )
        problem = describe_unusual(value)
        if problem is not None:
            raise CheckpointError(
                f"{where}: entry {shortened(name, 120)!r} is {problem}; "
                "weights must be ordinary dense tensors of numbers"
            )
        entries[name] = value.detach()
    return entries


def _read_file(path: Path) -> Any:
    """Return the content of a safetensors or torch file; the first bytes tell the two apart."""
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
    """Quote the start of a file, by which users recognise an HTML page or a Git LFS pointer."""
    return f"it begins with '{shortened(start.decode(errors='backslashreplace'), 80)}'"


def _open_lazily(path: Path) -> Any:
    """Open a safetensors file without mapping it: a mapped file would count as used memory."""
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
    where = f"{what} {path}".lstrip()
    _check_header_length(path, where)
    try:
        with _open_lazily(path) as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        start = _first_bytes(path, where)
        hint = _beginning(start)
        if start[8:9] == HEADER_START:
            hint = "if it was cut short, copy or download it again"
        raise CheckpointError(
            f"{where}: not a readable safetensors file: {one_line(error)[:200]}; {hint}"
        ) from error


def _check_header_length(path: Path, where: str) -> None:
    """Refuse (CheckpointError) a header that takes minutes to read, even if its tensors are empty.

    The first 8 bytes state its length. A length beyond the file's end is damage, for safetensors
    to find.
    """
    length = int.from_bytes(_first_bytes(path, where)[:8], "little")
    if MAX_HEADER_BYTES < length <= path.stat().st_size:
        raise CheckpointError(
            f"{where}: its header has {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read, "
            "enough for 100,000 tensors"
        )


def load_safetensors(path: Path, what: str = "") -> dict[str, Tensor]:
    """Read all tensors of a safetensors file, each into its own memory, which a model can keep.

    Tensors are cloned into torch's aligned memory. With another alignment, products are summed in
    another order, which changes the last bits of the outputs.

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
            # Give torch an open file: it would read a path that ends in .safetensors in that
            # format.
            with path.open("rb") as file:
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
    refused: list[str] = []
    with contextlib.suppress(Exception):  # fails for files of torch before 1.6
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if refused:
        return (
            f"holds objects other than tensors ({short_list(sorted(refused))}), and loading those "
            "would run code. Save the state dict alone: torch.save(model.state_dict(), FILE)"
        )
    return (
        "is neither a safetensors file nor a torch.save file, or it is damaged; "
        f"{_beginning(start)}"
    )
