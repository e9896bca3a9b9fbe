"""Random numbers of a training, which follow from its seed: order and augmentation of the images.

They do not depend on what was computed before, so a run that is resumed goes on as it would have.
"""

import contextlib
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from timm.utils import random_seed
from torch.utils.data import Dataset

from ..networks.running import seeded
from .recipe import Recipe


def seed_all(*key: int | str) -> None:
    """Seed all global random generators by a key, such as ("update", seed, number)."""
    random_seed(_number_of(key))


def seed_cpu(*key: int | str) -> None:
    """Seed the CPU's global generators alone: seeding those of a GPU for each image is slow."""
    number = _number_of(key)
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)


def _number_of(key: Sequence[int | str]) -> int:
    return zlib.crc32(repr(key).encode())


@contextlib.contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Give the global random generators their present states back at the end."""
    with contextlib.ExitStack() as restore:
        restore.callback(random.setstate, random.getstate())
        restore.callback(np.random.set_state, np.random.get_state())
        restore.enter_context(seeded(0))  # restores torch's generators
        yield


class SeededImages(Dataset[Any]):
    """Images by keys (epoch, index), each augmented by its key and the seed alone.

    The augmentation does not depend on workers, on processes or on what was loaded before.
    """

    def __init__(self, images: Any, seed: int) -> None:
        self.images = images
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_cpu("image", self.seed, epoch, index)
        return self.images[index]


def batch_keys(
    image_count: int, recipe: Recipe, rank: int, process_count: int, start: int
) -> Iterator[list[tuple[int, int]]]:
    """Keys (epoch, index) of this process's part of every batch, to the end of the run.

    Args:
        image_count: Number of images to train on.
        recipe: States the sizes, the epochs and the seed.
        rank: Number of this process.
        process_count: Number of processes.
        start: Update to begin with.
    """
    updates_per_epoch = image_count // recipe.update_size(process_count)
    for epoch in range(start // updates_per_epoch, recipe.epochs):
        order = np.random.default_rng([recipe.seed, epoch]).permutation(image_count).tolist()
        updates_done = max(0, start - epoch * updates_per_epoch)
        first_batch = updates_done * recipe.accumulate
        for batch_index in range(first_batch, updates_per_epoch * recipe.accumulate):
            first = (batch_index * process_count + rank) * recipe.batch_size
            indices = order[first : first + recipe.batch_size]
            yield [(epoch, index) for index in indices]
