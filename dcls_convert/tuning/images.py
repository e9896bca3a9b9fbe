"""The images of a training: any data set of timm that has an index; which image is seen when, and
how it is changed."""

import contextlib
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data import ImageDataset, create_dataset, create_transform, resolve_data_config
from timm.data.readers.reader_wds import ReaderWds
from timm.utils import random_seed
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from ..errors import DclsConvertError, listed, one_line, shown
from ..fitting.images import FORMATS, UNREADABLE
from ..networks.running import quietly, seeded
from ..options import Augmentation
from ..progress import Notify, silent
from ..tables import counted
from .recipe import Recipe
from .shards import Shards

MODES = {1: "L", 3: "RGB"}  # of images, by channels
HELD_OUT = 5  # one image in so many of each class is to test, in a folder that has no images for it
SPLITS = ("train", "validation")  # for timm, "val" and others are the same
AUGMENTATIONS: dict[Augmentation, dict[str, Any]] = {  # arguments of timm's create_transform
    "none": {"no_aug": True},
    "light": {"scale": (0.35, 1.0), "color_jitter": 0.4},
    # mmax9: at magnitude 10, timm asks Pillow to keep 0 bits of each colour, which Pillow 13
    # refuses.
    "strong": {"auto_augment": "rand-m9-mstd0.5-mmax9-inc1", "re_prob": 0.25, "re_mode": "pixel"},
}


def seed_all(*place: int | str) -> None:
    """Seed all global generators for a place in a run."""
    random_seed(zlib.crc32(repr(place).encode()))


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards, global generators have the states of before."""
    with contextlib.ExitStack() as back:
        back.callback(random.setstate, random.getstate())
        back.callback(np.random.set_state, np.random.get_state())
        back.enter_context(seeded(0))
        yield


@dataclass(kw_only=True, slots=True)
class ImageData:
    """Images to train on and to test with, as data sets with an index and a `transform`."""

    train: Any
    test: Any
    classes: tuple[str, ...]  # names; numbers where the data set does not name them


def open_images(
    data: Path | None,
    dataset: str = "",
    *,
    splits: Sequence[str] = SPLITS,
    classes: int | None = None,
    labelled: bool = True,
    note: Notify = silent,
) -> ImageData:
    """The images of a folder, or of one of timm's data sets, still without transforms.

    Images of a folder that cannot be decoded are left out; timm would take the next one in their
    place.

    Args:
        data: Folder with a folder for each class, or with `train` and `validation` (or `val`) that
            have these. Of each class of the first kind, every fifth image is to test.
        dataset: timm's name of a data set, such as "torch/cifar10", "hfds/cifar10" or
            "wds/imagenet"; `data` is then where it lies.
        splits: Names of its parts, to train and to test.
        classes: How many, where the data set does not name them.
        labelled: False for images to learn a teacher's outputs from; folders are then no classes.
        note: Told which images are left out, and which classes have none to test with.

    Raises:
        DclsConvertError: No such data, no classes, some that are only tested, or images that come
            as a stream.
    """
    where = f"--dataset {dataset}" if dataset else f"--data {shown(data)}"
    if not dataset and not (data is not None and data.is_dir()):
        raise DclsConvertError(f"{where}: is not a folder")
    root = None if data is None else str(data)
    try:
        train, test = (
            _by_number(create_dataset(dataset, root=root, split=split), where, note)
            for split in splits
        )
        named = getattr(getattr(train, "reader", train), "class_to_idx", None) or {}
    except Exception as error:  # what timm and the libraries below it raise has no common base
        raise DclsConvertError(f"{where}: {one_line(error)[:300]}") from error
    if any(isinstance(part, IterableDataset) for part in (train, test)):
        raise DclsConvertError(f"{where}: is a stream; choose a data set whose images have numbers")
    if not dataset:
        _leave_out_unreadable_(train.reader, where, note)
        if test.reader.root != root:
            if labelled:
                _take_classes_of(test.reader, named, where, note)
            _leave_out_unreadable_(test.reader, where, note)
        elif train.reader.root == root:
            train.reader.samples, test.reader.samples = _held_out(train.reader.samples)
        else:
            raise DclsConvertError(f"{where}: has train, but neither validation nor val")
    names = tuple(named) or tuple(map(str, range(classes or 0)))
    if labelled and len(names) < 2:
        raise DclsConvertError(f"{where}: has fewer than two classes; each is a folder of images")
    if not len(train) or not len(test):
        raise DclsConvertError(
            f"{where}: has {len(train)} images to train on and {len(test)} to test with"
        )
    return ImageData(train=train, test=test, classes=names)


def _by_number(images: Any, where: str, note: Notify) -> Any:
    """With an index, where timm reads shards as a stream."""
    if not isinstance(getattr(images, "reader", None), ReaderWds):
        return images
    shards = counted(len(images.reader.split_info.filenames), "shard")
    note(f"{where}: looking for the images in {shards}")
    return ImageDataset("", reader=Shards(images.reader))


def _take_classes_of(reader: Any, named: Mapping[str, int], where: str, note: Notify) -> None:
    """Give the reader's samples the numbers of these classes."""
    own = {number: name for name, number in reader.class_to_idx.items()}
    if unknown := [name for name in own.values() if name not in named]:
        raise DclsConvertError(
            f"{where}: there is nothing to learn {listed(unknown)} from, only to test with"
        )
    if untested := [name for name in named if name not in reader.class_to_idx]:
        note(f"no images to test {listed(untested)} with")
    reader.class_to_idx = named
    reader.samples = [(path, named[own[number]]) for path, number in reader.samples]


def _leave_out_unreadable_(reader: Any, where: str, note: Notify) -> None:
    with quietly(), ThreadPoolExecutor() as pool:
        decoded = list(pool.map(_is_decoded, (path for path, _ in reader.samples)))
    if lost := [
        Path(path) for (path, _), known in zip(reader.samples, decoded, strict=True) if not known
    ]:
        names = listed(path.relative_to(reader.root) for path in lost)
        note(f"{where}: {counted(len(lost), 'image')} cannot be read, and are left out: {names}")
    reader.samples = [
        sample for sample, known in zip(reader.samples, decoded, strict=True) if known
    ]


def _is_decoded(path: str) -> bool:
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.draft("RGB", (64, 64))  # a JPEG in an eighth of its size, which is much faster
            image.load()
    except UNREADABLE:
        return False
    return True


def _held_out(samples: Sequence[tuple[str, int]]) -> tuple[list[Any], list[Any]]:
    """All but every fifth sample of each class, and every fifth."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    seen: dict[int, int] = {}
    for sample in samples:
        seen[sample[1]] = seen.get(sample[1], 0) + 1
        parts[seen[sample[1]] % HELD_OUT == 0].append(sample)
    return parts


def set_transforms_(
    data: ImageData,
    model: nn.Module,
    input_size: Sequence[int] | None = None,
    augmentation: Augmentation = "light",
) -> None:
    """Let the data sets give images as the model takes them, those to train on augmented."""
    config = resolve_data_config(
        {"input_size": tuple(input_size)} if input_size else {}, model=model
    )
    crop, channels = config["crop_pct"], config["input_size"][0]
    if channels not in MODES:
        raise DclsConvertError(f"images have 1 or 3 channels; the model takes {channels}")
    config = {name: config[name] for name in ("input_size", "interpolation", "mean", "std")}
    config |= {name: config[name][:channels] for name in ("mean", "std")}
    in_mode = partial(Image.Image.convert, mode=MODES[channels])
    data.train.transform = create_transform(
        **config, is_training=True, **AUGMENTATIONS[augmentation]
    )
    data.test.transform = create_transform(**config, crop_pct=crop)
    for part in (data.train, data.test):
        part.transform.transforms.insert(0, in_mode)


class Repeatable(Dataset[Any]):
    """By keys (epoch, index), with an augmentation that follows from these and the seed alone: not
    from workers, processes or what was loaded before."""

    def __init__(self, images: Any, seed: int) -> None:
        self.images, self.seed = images, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        seed_all("image", self.seed, *key)
        return self.images[key[1]]


def batches(
    images: int, recipe: Recipe, rank: int, processes: int, start: int
) -> Iterator[list[tuple[int, int]]]:
    """The keys of this process's part of every batch, from the update `start` on to the end of the
    run."""
    updates, size, parts = (
        images // recipe.update_size(processes),
        recipe.batch_size,
        recipe.accumulate,
    )
    for epoch in range(start // updates, recipe.epochs):
        order = np.random.default_rng([recipe.seed, epoch]).permutation(images).tolist()
        done = max(0, start - epoch * updates)
        for batch in range(done * parts, updates * parts):
            first = (batch * processes + rank) * size
            yield [(epoch, index) for index in order[first : first + size]]
