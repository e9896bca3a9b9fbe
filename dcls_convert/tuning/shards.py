"""The images of webdataset's shards (timm's `wds/`) by number, so that a run knows which image it
sees when."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Shards:
    """What timm reads as a stream, by number: an index of its tar files, which are opened for each
    image.

    Its samples are those of timm's reader: of one base name the first image among the reader's
    suffixes, and the label of its `cls` file or, where the data set states `alt_label`, of that
    field of its `json` file.
    """

    def __init__(self, stream: Any) -> None:
        suffixes, alternative = stream.input_key.split(";"), stream.split_info.alt_label
        self.paths = [Path(stream.root, name) for name in stream.split_info.filenames]
        self.class_to_idx: dict[str, int] = stream.class_to_idx
        found = [
            (at, *each)
            for at, path in enumerate(self.paths)
            for each in _find(path, suffixes, alternative)
        ]
        self.samples = np.array(found)  # (images, 4): shard, first byte, bytes, label

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        number, first, size, label = map(int, self.samples[index])
        with self.paths[number].open("rb") as shard:
            shard.seek(first)
            return io.BytesIO(shard.read(size)), label


def _find(path: Path, suffixes: list[str], alternative: str) -> Iterator[tuple[int, int, int]]:
    """First byte, bytes and label of each image that has a label."""
    with tarfile.open(path, "r:") as shard:
        samples: dict[str, dict[str, tarfile.TarInfo]] = {}
        for member in shard:
            folder, _, name = member.name.rpartition("/")
            base, _, suffix = name.partition(".")
            samples.setdefault(f"{folder}/{base}", {})[suffix.lower()] = member
        for files in samples.values():
            image = next((files[suffix] for suffix in suffixes if suffix in files), None)
            stated = files.get("json" if alternative else "cls")
            if image is not None and stated is not None:
                text = shard.extractfile(stated).read()  # type: ignore[union-attr]
                label = int(json.loads(text)[alternative] if alternative else text)
                if label >= 0:  # as timm, which has -1 for none
                    yield image.offset_data, image.size, label
