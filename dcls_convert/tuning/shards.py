"""Random access to the images in webdataset shards, which timm (`wds/`) only streams.

With random access, the seed decides which image is seen when.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Sample(NamedTuple):
    """Where an image is stored, and its label."""

    shard: int  # index of the tar file
    offset: int  # bytes from the start of the tar file
    size: int  # bytes
    label: int


class Shards:
    """The samples of timm's shard reader, by index. The tar file is opened for each image.

    The samples are those that timm streams. Files with the same base name form one sample. Its
    image is the file with the first of the reader's suffixes that occurs. Its label is in the `cls`
    file, or, if the data set has an `alt_label`, in that field of the `json` file.
    """

    def __init__(self, stream: Any) -> None:
        self.class_to_idx: dict[str, int] = stream.class_to_idx
        self.paths: list[Path] = []
        suffixes = stream.input_key.split(";")
        samples: list[Sample] = []
        for shard, name in enumerate(stream.split_info.filenames):
            path = Path(stream.root, name)
            self.paths.append(path)
            samples += _labelled_samples(shard, path, suffixes, stream.split_info.alt_label)
        self.samples = np.array(samples)  # (images, 4): the fields of Sample

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        sample = Sample(*map(int, self.samples[index]))
        with self.paths[sample.shard].open("rb") as file:
            file.seek(sample.offset)
            return io.BytesIO(file.read(sample.size)), sample.label


def _labelled_samples(
    shard: int, path: Path, suffixes: list[str], label_field: str
) -> Iterator[Sample]:
    """Yield the samples of a shard that have an image and a label, in timm's order."""
    with tarfile.open(path, "r:") as tar:
        files_of: dict[str, dict[str, tarfile.TarInfo]] = {}  # base name -> suffix -> file
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            base, _, suffix = name.partition(".")
            files_of.setdefault(f"{folder}/{base}", {})[suffix.lower()] = member
        label_suffix = "cls"
        if label_field:
            label_suffix = "json"
        for files in files_of.values():
            image = _first_with_suffix(files, suffixes)
            label_file = files.get(label_suffix)
            if image is None or label_file is None:
                continue
            text = tar.extractfile(label_file).read()  # type: ignore[union-attr]
            if label_field:
                label = int(json.loads(text)[label_field])
            else:
                label = int(text)
            if label >= 0:  # timm uses -1 for "no label"
                yield Sample(shard, image.offset_data, image.size, label)


def _first_with_suffix(
    files: dict[str, tarfile.TarInfo], suffixes: list[str]
) -> tarfile.TarInfo | None:
    """Return the file with the first of the suffixes that occurs; None if none does."""
    for suffix in suffixes:
        if suffix in files:
            return files[suffix]
    return None
