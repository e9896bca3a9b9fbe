"""Find the file of weights that a path names. Imports no torch."""

import os
import re
from pathlib import Path

from ..errors import CheckpointError
from ..file_checks import WEIGHTS_SUFFIXES, check_file
from ..text import short_list

INDEX = ".index.json"  # last suffixes of the file that names the shards of a state dict
SHARD = re.compile(r"(.+)-0*([0-9]+)-of-0*([0-9]+)(\.[a-z]+)")


def find_weights_file(path: Path) -> Path:
    """Return the file to read: the path itself, or the one file of weights in this folder.

    Raises:
        CheckpointError: There is no such file, it is one of several shards, or a folder has none
            or several.
    """
    file = path
    if os.path.isdir(path):  # unlike Path.is_dir, not an error if the name is too long
        file = _file_in_folder(path)
    check_file(file)
    shard = SHARD.fullmatch(file.name)
    if shard is not None and shard[3] != "1":
        name, number, total, suffix = shard.groups()
        raise CheckpointError(
            f"weights file {file}: is part {number} of {total}; "
            f"all are read by their index, {name}{suffix}{INDEX}"
        )
    return file


def _file_in_folder(folder: Path) -> Path:
    """Return the index of shards in a folder, its one safetensors file, or its one torch file."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"weights file {folder}: {error.strerror}") from error
    index_suffixes = (f".safetensors{INDEX}", f".bin{INDEX}")
    for suffixes in (index_suffixes, *WEIGHTS_SUFFIXES):
        found = [name for name in names if name.endswith(suffixes)]
        if len(found) > 1:
            raise CheckpointError(f"weights file {folder}: name one of {short_list(found, 5)}")
        if found:
            return folder / found[0]
    raise CheckpointError(
        f"weights file {folder}: this folder has no file of weights; it has {short_list(names)}"
    )
