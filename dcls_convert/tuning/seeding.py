"""Derive all random numbers of a training run from its seed, such as the order of the images.

They do not depend on earlier computations, so a resumed run continues as if it had not stopped.
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
    """Seed all global random generators from a key, such as ("update", seed, number)."""
    random_seed(_seed_from(key))


def seed_cpu(*key: int | str) -> None:
    """Seed only the CPU's global generators; seeding a GPU's for each image would be slow."""
    seed = _seed_from(key)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def _seed_from(key: Sequence[int | str]) -> int:
    return zlib.crc32(repr(key).encode())


@contextlib.contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Restore the states of the global random generators at the end."""
    with contextlib.ExitStack() as restore:
        restore.callback(random.setstate, random.getstate())
        restore.callback(np.random.set_state, np.random.get_state())
        restore.enter_context(seeded(0))  # restores torch's generators
        yield


class SeededImages(Dataset[Any]):
    """Images by keys (epoch, index); augmentation depends only on the key and the seed.

    It does not depend on workers, on processes or on what was loaded before.
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
    """Yield the keys (epoch, index) of each batch of this process, to the end of the run.

    Args:
        image_count: Number of training images.
        recipe: States the batch size, the epochs and the seed.
        rank: Index of this process.
        process_count: Number of processes.
        start: Index of the first update.
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
