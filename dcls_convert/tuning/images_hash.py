"""Identify a set of images by a hash that does not depend on its location."""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

from .shards import Shards
from .training_images import ImageData


def images_hash(dataset: str, data: ImageData) -> str:
    """Return the SHA-256 of a data set's name, its numbers of images, its classes and its files.

    Of each file, the path below the data set's folder and the size in bytes are hashed, so that a
    copy elsewhere has the same hash. If a timm data set lists no files, only the rest is hashed.

    Args:
        dataset: timm's name; "" for a folder of images.
        data: Training and test images.
    """
    lines = [repr((dataset, len(data.train), len(data.test), data.classes))]
    for split, images in (("train", data.train), ("test", data.test)):
        for folder, path in _files(images):
            lines.append(f"{split} {os.path.getsize(path)} {path.removeprefix(folder)}")
    lines.sort()
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _files(images: Any) -> Iterator[tuple[str, str]]:
    """Yield the folder of a split and the path of a file, for each file of the split."""
    reader = getattr(images, "reader", images)  # timm's reader, or a torchvision data set
    if isinstance(reader, Shards):
        for shard in reader.paths:
            yield str(shard.parent), str(shard)
    else:
        for path, _ in getattr(reader, "samples", ()):
            yield str(reader.root), path
