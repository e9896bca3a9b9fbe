"""The images of a training: opening them, and their transforms.

Any data set of timm with random access will do.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data import ImageDataset, create_dataset, create_transform, resolve_data_config
from timm.data.readers.reader_wds import ReaderWds
from torch import nn
from torch.utils.data import IterableDataset

from ..errors import DclsConvertError
from ..image_files import FORMATS, UNREADABLE, check_white_level, to_mode
from ..networks.running import quietly
from ..options import MIRRORED, Augmentation
from ..progress import Note, silent
from ..text import counted, listed, one_line, shown
from .shards import Shards

MODES = {1: "L", 3: "RGB"}  # channels that a model takes -> mode of Pillow
# If there are only class folders, every fifth image of each class is held out to test with.
HOLD_OUT_EVERY = 5
SPLITS = ("train", "validation")  # timm also finds "validation" in a folder called "val"
AUGMENTATIONS: dict[Augmentation, dict[str, Any]] = {  # arguments of timm's create_transform
    "none": {"no_aug": True},
    "light": {"scale": (0.35, 1.0), "color_jitter": 0.4},
    # mmax9, since at magnitude 10 timm asks Pillow to keep 0 bits per colour; Pillow 13 refuses.
    "strong": {"auto_augment": "rand-m9-mstd0.5-mmax9-inc1", "re_prob": 0.25, "re_mode": "pixel"},
}


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
    note: Note = silent,
) -> ImageData:
    """Open the images of a folder, or of one of timm's data sets, without transforms yet.

    Images of a folder that cannot be decoded are skipped; timm would replace each by the next one.

    Args:
        data: Folder with a folder for each class, or with `train` and `validation` (or `val`) that
            have these. If there are only class folders, every fifth image is held out to test with.
        dataset: timm's name of a data set, such as "torch/cifar10", "hfds/cifar10" or
            "wds/imagenet"; `data` is then its location.
        splits: timm's names of the part to train on and of the part to test with.
        classes: Number of classes, for data sets that do not name them.
        labelled: False for images that only serve to learn a teacher's outputs; their folders need
            not be classes.
        note: Told which images are skipped, and which classes have none to test with.

    Raises:
        DclsConvertError: No such data, fewer than two classes, classes without images to train on,
            or a data set without random access.
    """
    where = f"--data {shown(data)}"
    if dataset:
        where = f"--dataset {dataset}"
    if not dataset and (data is None or not data.is_dir()):
        raise DclsConvertError(f"{where}: is not a folder")
    root = None
    if data is not None:
        root = str(data)
    try:
        train_split, test_split = splits
        train = _open_split(dataset, root, train_split, where, note)
        test = _open_split(dataset, root, test_split, where, note)
        class_to_idx = getattr(getattr(train, "reader", train), "class_to_idx", None) or {}
    except Exception as error:  # what timm and the libraries below it raise has no common base
        raise DclsConvertError(f"{where}: {one_line(error)[:300]}") from error
    if isinstance(train, IterableDataset) or isinstance(test, IterableDataset):
        raise DclsConvertError(f"{where}: is a streaming data set; choose one with random access")
    if not dataset:
        classes_to_keep = class_to_idx if labelled else None
        _prepare_folders_(train.reader, test.reader, root, classes_to_keep, where, note)
    names = tuple(class_to_idx) or tuple(map(str, range(classes or 0)))
    if labelled and len(names) < 2:
        raise DclsConvertError(f"{where}: has fewer than two classes; each is a folder of images")
    if not len(train) or not len(test):
        raise DclsConvertError(
            f"{where}: has {len(train)} images to train on and {len(test)} to test with"
        )
    return ImageData(train=train, test=test, classes=names)


def _prepare_folders_(
    train: Any,
    test: Any,
    root: str | None,
    class_to_idx: Mapping[str, int] | None,
    where: str,
    note: Note,
) -> None:
    """Skip unreadable images, and hold images out for the test if there is no folder of them.

    Args:
        train: timm's reader of the images to train on.
        test: timm's reader of the test images; timm lets it read all of `root` if the folder of
            its split is missing.
        root: The folder that holds the splits or the classes.
        class_to_idx: Classes of the training, which the test's images get; None without classes.
        where: Start of each message.
        note: Told which images are skipped, and which classes have none to test with.
    """
    _skip_unreadable_(train, where, note)
    has_test_folder = test.root != root
    has_train_folder = train.root != root
    if has_test_folder:
        if class_to_idx is not None:
            _renumber_classes_(test, class_to_idx, where, note)
        _skip_unreadable_(test, where, note)
    elif not has_train_folder:  # class folders alone
        train.samples, test.samples = _held_out(train.samples)
        if class_to_idx is not None:
            tested = {label for _, label in test.samples}
            untested = [name for name, label in class_to_idx.items() if label not in tested]
            _note_untested(untested, where, note)
    else:
        raise DclsConvertError(f"{where}: has train, but neither validation nor val")


def _open_split(dataset: str, root: str | None, split: str, where: str, note: Note) -> Any:
    """Open a part of a data set of timm; with an index also for shards, which timm only streams."""
    # The images of a folder keep their mode, and transforms convert them: timm clips 16 bits to 8.
    mode = "RGB" if dataset else ""
    images = create_dataset(dataset, root=root, split=split, input_img_mode=mode)
    if not isinstance(getattr(images, "reader", None), ReaderWds):
        return images
    shards = counted(len(images.reader.split_info.filenames), "shard")
    note(f"{where}: looking for the images in {shards}")
    return ImageDataset("", reader=Shards(images.reader))


def _renumber_classes_(
    reader: Any, class_to_idx: Mapping[str, int], where: str, note: Note
) -> None:
    """Replace the class numbers of a reader's samples by those of `class_to_idx`, by class name."""
    own_names = {number: name for name, number in reader.class_to_idx.items()}
    unknown = [name for name in own_names.values() if name not in class_to_idx]
    if unknown:
        raise DclsConvertError(
            f"{where}: {listed(unknown)}: there are test images, but none to train on"
        )
    untested = [name for name in class_to_idx if name not in reader.class_to_idx]
    _note_untested(untested, where, note)
    reader.class_to_idx = class_to_idx
    reader.samples = [(path, class_to_idx[own_names[number]]) for path, number in reader.samples]


def _note_untested(names: Sequence[str], where: str, note: Note) -> None:
    """Say how many classes have no images to test with, and name some of them."""
    if names:
        note(f"{where}: classes without images to test with: {len(names):,} ({listed(names)})")


def _skip_unreadable_(reader: Any, where: str, note: Note) -> None:
    """Take the images that cannot be decoded out of a reader, and name some of them."""
    paths = [path for path, _ in reader.samples]
    with quietly(), ThreadPoolExecutor() as pool:
        decodable = list(pool.map(_is_decodable, paths))
    kept = []
    lost = []
    for sample, is_decodable in zip(reader.samples, decodable, strict=True):
        if is_decodable:
            kept.append(sample)
        else:
            lost.append(Path(sample[0]).relative_to(reader.root))
    if lost:
        images = counted(len(lost), "image")
        note(f"{where}: skipping {images} that cannot be read: {listed(lost)}")
    reader.samples = kept


def _is_decodable(path: str) -> bool:
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.draft("RGB", (64, 64))  # decodes a JPEG at an eighth of its size, much faster
            image.load()
            check_white_level(image)
    except UNREADABLE:
        return False
    return True


def _held_out(
    samples: Sequence[tuple[str, int]],
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Samples (path, class) to train on, and to test with: of each class, every fifth."""
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    counts: Counter[int] = Counter()  # samples of each class so far
    for sample in samples:
        label = sample[1]
        counts[label] += 1
        if counts[label] % HOLD_OUT_EVERY == 0:
            test.append(sample)
        else:
            train.append(sample)
    return train, test


def set_transforms_(
    data: ImageData,
    model: nn.Module,
    input_size: Sequence[int] | None = None,
    augmentation: Augmentation = "light",
    *,
    mirrored: float = MIRRORED,
) -> None:
    """Let the data sets give images as the model takes them, those to train on augmented.

    Args:
        data: Whose images to train on, and to test with, get transforms.
        model: States size, channels, interpolation and normalisation.
        input_size: (channels, rows, columns) instead of the model's.
        augmentation: Augmentation of the training images.
        mirrored: Share of these that are mirrored, left to right.

    Raises:
        DclsConvertError: A model that takes neither 1 nor 3 channels.
    """
    stated = {}
    if input_size:
        stated["input_size"] = tuple(input_size)
    config = resolve_data_config(stated, model=model)
    channels = config["input_size"][0]
    if channels not in MODES:
        raise DclsConvertError(f"images have 1 or 3 channels; the model takes {channels}")
    options = {
        "input_size": config["input_size"],
        "interpolation": config["interpolation"],
        "mean": config["mean"][:channels],
        "std": config["std"][:channels],
    }
    data.train.transform = create_transform(
        **options, is_training=True, hflip=mirrored, **AUGMENTATIONS[augmentation]
    )
    data.test.transform = create_transform(**options, crop_pct=config["crop_pct"])
    in_mode = partial(to_mode, mode=MODES[channels])
    for part in (data.train, data.test):
        part.transform.transforms.insert(0, in_mode)
