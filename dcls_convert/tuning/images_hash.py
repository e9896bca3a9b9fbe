"""Tell one set of images from another, wherever they lie."""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

from .images import ImageData
from .shards import Shards


def images_hash(dataset: str, data: ImageData) -> str:
    """SHA-256 of a data set's name, its numbers of images, its classes and its files.

    Files count by their names below the data set's folder and their sizes in bytes, so that a copy
    elsewhere has the same hash. Data sets of timm that list no files count by the rest.

    Args:
        dataset: timm's name; "" for a folder of images.
        data: The images to train on and to test with.
    """
    lines = [repr((dataset, len(data.train), len(data.test), data.classes))]
    for part, images in (("train", data.train), ("test", data.test)):
        for folder, path in _files(images):
            lines.append(f"{part} {os.path.getsize(path)} {path.removeprefix(folder)}")
    lines.sort()
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _files(images: Any) -> Iterator[tuple[str, str]]:
    """The folder of a data set's part and the path of a file, for each of its files."""
    reader = getattr(images, "reader", images)  # timm's, or a data set of torchvision
    if isinstance(reader, Shards):
        for shard in reader.paths:
            yield str(shard.parent), str(shard)
    else:
        for path, _ in getattr(reader, "samples", ()):
            yield str(reader.root), path
