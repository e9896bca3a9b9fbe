"""The images of finetune.py: scikit-learn's digits, any data set of timm, or a folder of images without classes.

A key (epoch, index) says which image, and how it is augmented.
"""

import argparse
import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset, create_transform, resolve_data_config
from torch import nn
from torch.utils.data import Dataset, Sampler

from dcls_convert import DclsConvertError
from dcls_convert.errors import one_line

DIGITS_SIZE = 32  # pixels that the 8 x 8 digits are scaled to
DIGITS_HELD_OUT = 360  # of 1797, a fifth
HELD_OUT = 5  # of a folder without images to evaluate with, one in so many is held out


def seed_all(*place: int | str) -> None:
    seed = zlib.crc32(repr(place).encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Digits(Dataset):
    def __init__(self, training: bool) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        order = order[DIGITS_HELD_OUT:] if training else order[:DIGITS_HELD_OUT]
        self.images, self.labels = digits.images[order], digits.target[order]
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray((self.images[index] * (255 / 16)).astype(np.uint8)).convert("RGB")
        return self.transform(image), int(self.labels[index])


class Repeatable(Dataset):
    """Augmented by seed, epoch and index alone: not by workers, processes or what was loaded before."""

    def __init__(self, images: Any, seed: int) -> None:
        self.images, self.seed = images, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        seed_all("image", self.seed, *key)
        return self.images[key[1]]


@dataclass
class Batches(Sampler):
    """The keys of this process's part of every batch, from the update `start` on to the end of the run."""

    images: int
    args: argparse.Namespace
    rank: int
    processes: int
    start: int = 0

    @property
    def updates_per_epoch(self) -> int:
        return self.images // (self.args.batch_size * self.args.accumulate * self.processes)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        size = self.args.batch_size
        for epoch in range(self.start // self.updates_per_epoch, self.args.epochs):
            order = np.random.default_rng([self.args.seed, epoch]).permutation(self.images).tolist()
            done = max(0, self.start - epoch * self.updates_per_epoch)
            for batch in range(done * self.args.accumulate, self.updates_per_epoch * self.args.accumulate):
                first = (batch * self.processes + self.rank) * size
                yield [(epoch, index) for index in order[first : first + size]]


def load_images(args: argparse.Namespace) -> tuple[Any, Any, int | None]:
    """Images to train and to evaluate with, still without transforms, and the number of classes.

    With a teacher the number is None, since its outputs stand for labels.
    """
    if args.data is None and not args.dataset:
        return Digits(training=True), Digits(training=False), None if args.teacher else 10
    if not args.dataset and not os.path.isdir(args.data):
        raise DclsConvertError(f"--data {args.data}: is not a folder")
    try:
        train, valid = (create_dataset(args.dataset, root=args.data, split=split) for split in args.splits)
    except Exception as error:  # what timm and the libraries below it raise has no common base
        raise DclsConvertError(f"--data {args.data}: {one_line(error)}") from error
    if not (hasattr(train, "__getitem__") and hasattr(train, "__len__")):
        raise DclsConvertError(f"--dataset {args.dataset}: is a stream; choose one whose images have numbers")
    if args.teacher:
        if not args.dataset and valid.reader.root == args.data:  # a folder without images to evaluate with
            train.reader.samples, valid.reader.samples = hold_out(train.reader.samples)
        return train, valid, None
    classes = args.num_classes or len(getattr(getattr(train, "reader", train), "class_to_idx", ()))
    if not classes:
        raise DclsConvertError(f"--dataset {args.dataset}: does not name its classes; give --num-classes")
    return train, valid, classes


def hold_out(samples: list[Any]) -> tuple[list[Any], list[Any]]:
    """All but every fifth, and every fifth."""
    return [sample for index, sample in enumerate(samples) if index % HELD_OUT], samples[::HELD_OUT]


def set_transforms(train: Any, valid: Any, model: nn.Module, args: argparse.Namespace) -> None:
    digits = isinstance(train, Digits)
    size = args.img_size or (DIGITS_SIZE if digits else None)
    config = resolve_data_config({"img_size": size} if size else {}, model=model)
    crop = config.pop("crop_pct")
    config = {name: config[name] for name in ("input_size", "interpolation", "mean", "std")}
    augmentation: dict[str, Any] = {"auto_augment": args.aa, "re_prob": args.reprob}
    if digits:  # a mirrored digit is another one
        augmentation |= {"hflip": 0.0, "scale": (0.7, 1.0), "color_jitter": None}
    train.transform = create_transform(**config, is_training=True, **augmentation)
    valid.transform = create_transform(**config, crop_pct=1.0 if digits else crop)
