"""Say what a file or folder of weights is, by first bytes and names. Imports no torch."""

import os
import re
import zipfile
from pathlib import Path
from typing import Literal

from ..errors import CheckpointError
from ..input import SAFETENSORS_SUFFIX, TORCH_SUFFIXES, check_file
from ..text import short_list

INDEX = ".index.json"  # last suffixes of the file that names the shards of a state dict
ZIP_MAGIC = b"PK\x03\x04"  # first bytes of a torch file
OLD_TORCH_MAGIC = b"\x80\x02\x8a\n"  # first bytes of files of torch before 1.6
SHARD = re.compile(r"(.+)-0*([1-9][0-9]*)-of-0*([1-9][0-9]*)(\.[a-z]+)")
START_BYTES = 512  # enough for all that is recognised

SAVE_STATE_DICT = "load it where it was made, and save torch.save(model.state_dict(), FILE)"
WEB_PAGE = "is a web page in place of the file; download the file itself"
UNPACK = "unpack it, and name the weights file in it"
DCP = (
    "is a distributed checkpoint (DCP); make one file of its folder: "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE"
)
# What files of other kinds begin with, in lower case, and what the message says.
OTHER_STARTS = (
    (b"version https://git-lfs", "is a Git LFS pointer; get the file itself: git lfs pull"),
    (b"/annex/objects/", "is a git-annex pointer; get the file itself: git annex get"),
    (b"<!doctype html", WEB_PAGE),
    (b"<html", WEB_PAGE),
    (b"<?xml", WEB_PAGE),
    (b"{", "is JSON; name the weights file"),
    (b"\x93numpy", "is a NumPy array; save a state dict of tensors with torch.save"),
    (b"\x89hdf", "is HDF5 (Keras); save a state dict of tensors with torch.save"),
    (b"gguf", "is GGUF, for language models; give a safetensors file or one of torch.save"),
    (b"\x1f\x8b", f"is compressed by gzip; {UNPACK}"),
    (b"bzh", f"is compressed by bzip2; {UNPACK}"),
    (b"\xfd7zxz", f"is compressed by xz; {UNPACK}"),
    (b"\x28\xb5\x2f\xfd", f"is compressed by zstd; {UNPACK}"),
    (b"7z\xbc\xaf", f"is a 7z archive; {UNPACK}"),
    (b"\x80", f"is a pickle, which would run code; {SAVE_STATE_DICT}"),
)
# The same by suffix, for kinds that the first bytes do not show.
OTHER_SUFFIXES = {
    ".distcp": DCP,
    ".onnx": f"is an ONNX graph; {SAVE_STATE_DICT}",
    ".tflite": f"is a TensorFlow Lite graph; {SAVE_STATE_DICT}",
    ".pb": f"is a TensorFlow graph; {SAVE_STATE_DICT}",
}

WeightsFormat = Literal["safetensors", "torch", "index"]


def find_weights_file(path: Path) -> Path:
    """Return the file to read: the path itself, or the one file of weights in this folder.

    Raises:
        CheckpointError: There is no such file, it is of another kind, or a folder has none or
            several.
    """
    file = path
    if os.path.isdir(path):  # unlike Path.is_dir, not an error if the name is too long
        file = _file_in_folder(path)
    format_of_weights(file)
    shard = SHARD.fullmatch(file.name)
    if shard is not None and int(shard[3]) > 1:
        name, number, total, suffix = shard.groups()
        index = file.with_name(f"{name}{suffix}{INDEX}")
        cure = f"name the index of all, {index.name}"
        if not index.exists():
            cure = f"the index of all, {index.name}, is missing"
        raise CheckpointError(f"checkpoint {file}: is part {number} of {total}; {cure}")
    return file


def _file_in_folder(folder: Path) -> Path:
    """Return the index of shards in a folder, its one safetensors file, or its one torch file.

    If shards have no index, it is the first shard.
    """
    try:
        all_names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}") from error
    if any(name.endswith(".distcp") or name == ".metadata" for name in all_names):
        raise CheckpointError(f"checkpoint {folder}: {DCP}")
    names = [name for name in all_names if not name.startswith(".")]
    index_suffixes = (f"{SAFETENSORS_SUFFIX}{INDEX}", f".bin{INDEX}")
    for suffixes in (index_suffixes, SAFETENSORS_SUFFIX, TORCH_SUFFIXES):
        found = [name for name in names if name.endswith(suffixes)]
        if len(found) > 1 and not SHARD.fullmatch(found[0]):
            raise CheckpointError(f"checkpoint {folder}: name one of {short_list(found, 5)}")
        if found:
            return folder / found[0]
    raise CheckpointError(
        f"checkpoint {folder}: this folder has no file of weights; it has {short_list(names)}"
    )


def format_of_weights(path: Path) -> WeightsFormat:
    """Return the format of a file, which its first bytes show, whatever its suffix.

    Raises:
        CheckpointError: There is no such file, or it holds something else.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            start = file.read(START_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {error.strerror}") from error
    header_length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and header_length < size:
        return "safetensors"
    if path.name.endswith(INDEX):
        return "index"
    other_kind = _describe_other_kind(path, start)
    if other_kind is not None:
        raise CheckpointError(f"checkpoint {path}: {other_kind}")
    if start.startswith((ZIP_MAGIC, OLD_TORCH_MAGIC)):
        return "torch"
    if path.suffix == SAFETENSORS_SUFFIX:  # reading it says what is damaged
        return "safetensors"
    raise CheckpointError(
        f"checkpoint {path}: give a safetensors file or one of torch.save; this is neither"
    )


def _describe_other_kind(path: Path, start: bytes) -> str | None:
    """Say what a file is and what to do, or return None if it may be one of torch.save."""
    if not start:
        return "is empty; download or save it again"
    if path.suffix in OTHER_SUFFIXES:
        return OTHER_SUFFIXES[path.suffix]
    if start.startswith(OLD_TORCH_MAGIC):
        return None
    if start.startswith(ZIP_MAGIC):
        return _describe_archive(path)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()  # without a byte order mark
    for other_start, kind in OTHER_STARTS:
        if text.startswith(other_start):
            return kind
    if start[257:262] == b"ustar":
        return f"is a tar archive; {UNPACK}"
    return None


def _describe_archive(path: Path) -> str | None:
    """Say what a ZIP archive is, or return None if it may be a file of torch.save."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            start = min((part.header_offset for part in archive.infolist()), default=0)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None  # cut off or damaged; torch says so
    if start > 0:  # several archives, one after the other: one for each tensor
        return DCP
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        return f"is TorchScript; {SAVE_STATE_DICT}"
    if any(
        name.endswith(("/archive_format", "serialized_exported_program.json")) for name in names
    ):
        return f"is a graph of torch.export; {SAVE_STATE_DICT}"
    if any(name.endswith("data.pkl") for name in names):
        return None
    if names and all(name.endswith(".npy") for name in names):
        return "holds NumPy arrays; save a state dict of tensors with torch.save"
    return f"is an archive of {short_list(names)}; {UNPACK}"
