"""Open the images for training and testing, and set their transforms (augmentation).

Any of timm's data sets with random access works.
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
from ..image_files import FORMATS, READ_ERRORS, check_white_level, to_mode
from ..networks.running import suppress_output
from ..options import MIRRORED_SHARE, Augmentation
from ..progress import Note, ignore_messages
from ..text import count_text, one_line, short_list, shortened
from .shards import Shards

MODES = {1: "L", 3: "RGB"}  # input channels of a model -> Pillow mode
# If there are only class folders, every fifth image of each class is held out to test with.
HELD_OUT_EVERY = 5
SPLITS = ("train", "validation")  # timm also finds "validation" in a folder called "val"
AUGMENTATIONS: dict[Augmentation, dict[str, Any]] = {  # arguments of timm's create_transform
    "none": {"no_aug": True},
    "light": {"scale": (0.35, 1.0), "color_jitter": 0.4},
    # mmax9, since at magnitude 10 timm asks Pillow to keep 0 bits per colour; Pillow 13 refuses.
    "strong": {"auto_augment": "rand-m9-mstd0.5-mmax9-inc1", "re_prob": 0.25, "re_mode": "pixel"},
}


@dataclass(kw_only=True, slots=True)
class ImageData:
    """Training and test images: data sets with random access and a `transform` attribute."""

    train: Any
    test: Any
    classes: tuple[str, ...]  # names, or numbers if the data set has no names


def open_images(
    data: Path | None,
    dataset: str = "",
    *,
    splits: Sequence[str] = SPLITS,
    classes: int | None = None,
    labelled: bool = True,
    note: Note = ignore_messages,
) -> ImageData:
    """Open the images of a folder or of one of timm's data sets, without transforms.

    Images in a folder that cannot be decoded are skipped. (timm would load the next image instead.)

    Args:
        data: Folder with one folder per class, or with `train` and `validation` (or `val`) folders
            that contain the class folders. If there are only class folders, every fifth image of
            each class is held out to test with.
        dataset: timm's name of a data set, such as "torch/cifar10", "hfds/cifar10" or
            "wds/imagenet"; `data` is then its location.
        splits: timm's names of the training split and the test split.
        classes: Number of classes, for data sets that do not name them.
        labelled: False if the labels are not used, as when a teacher's outputs are learned; the
            folders need not be classes then.
        note: Receives messages about skipped images and about classes without test images.

    Raises:
        DclsConvertError: The data cannot be opened, has fewer than two classes, has classes without
            images to train on, or has no random access.
    """
    where = f"--data {shortened(data)}"
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
    except Exception as error:  # exceptions of timm and its libraries have no common base class
        raise DclsConvertError(f"{where}: {one_line(error)[:300]}") from error
    if isinstance(train, IterableDataset) or isinstance(test, IterableDataset):
        raise DclsConvertError(f"{where}: is a streaming data set; choose one with random access")
    if not dataset:
        required_classes = class_to_idx if labelled else None
        _prepare_folders_(train.reader, test.reader, root, required_classes, where, note)
    names = tuple(class_to_idx) or tuple(map(str, range(classes or 0)))
    if labelled and len(names) < 2:
        raise DclsConvertError(f"{where}: has fewer than two classes; each is a folder of images")
    min_test_images = 2 if labelled else 1  # a comparison needs their variance
    if not len(train) or len(test) < min_test_images:
        raise DclsConvertError(
            f"{where}: has {len(train)} images to train on and {len(test)} to test with; "
            f"at least 1 and {min_test_images} are needed"
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
    """Skip unreadable images, and hold out test images if they have no folder.

    Args:
        train: timm's reader of the training images.
        test: timm's reader of the test images. timm makes it read all of `root` if there is no
            folder for the test split.
        root: The folder that contains the splits or the classes.
        class_to_idx: Class numbers of the training images, which the test images get too; None if
            the folders are not classes.
        where: Prefix of every message.
        note: Receives messages about skipped images and about classes without test images.
    """
    _skip_unreadable_(train, where, note)
    has_test_folder = test.root != root
    has_train_folder = train.root != root
    if has_test_folder:
        if class_to_idx is not None:
            _renumber_classes_(test, class_to_idx, where, note)
        _skip_unreadable_(test, where, note)
    elif not has_train_folder:  # only class folders
        train.samples, test.samples = _hold_out(train.samples)
        if class_to_idx is not None:
            tested = {label for _, label in test.samples}
            untested = [name for name, label in class_to_idx.items() if label not in tested]
            _note_untested(untested, where, note)
    else:
        raise DclsConvertError(f"{where}: has train, but neither validation nor val")


def _open_split(dataset: str, root: str | None, split: str, where: str, note: Note) -> Any:
    """Open one split of a timm data set. Shards, which timm only streams, get random access."""
    # Images from folders keep their mode, which a transform converts; timm would clip 16 bits to 8.
    mode = "RGB" if dataset else ""
    images = create_dataset(dataset, root=root, split=split, input_img_mode=mode)
    if not isinstance(getattr(images, "reader", None), ReaderWds):
        return images
    shards = count_text(len(images.reader.split_info.filenames), "shard")
    note(f"{where}: looking for the images in {shards}")
    return ImageDataset("", reader=Shards(images.reader))


def _renumber_classes_(
    reader: Any, class_to_idx: Mapping[str, int], where: str, note: Note
) -> None:
    """Change the class numbers of a reader's samples to the numbers in `class_to_idx`."""
    old_names = {number: name for name, number in reader.class_to_idx.items()}
    unknown = [name for name in old_names.values() if name not in class_to_idx]
    if unknown:
        raise DclsConvertError(
            f"{where}: {short_list(unknown)}: there are test images, but none to train on"
        )
    untested = [name for name in class_to_idx if name not in reader.class_to_idx]
    _note_untested(untested, where, note)
    reader.class_to_idx = class_to_idx
    reader.samples = [(path, class_to_idx[old_names[number]]) for path, number in reader.samples]


def _note_untested(names: Sequence[str], where: str, note: Note) -> None:
    """Report how many classes have no test images, with the names of some."""
    if names:
        note(f"{where}: classes without images to test with: {len(names):,} ({short_list(names)})")


def _skip_unreadable_(reader: Any, where: str, note: Note) -> None:
    """Remove the images that cannot be decoded from a reader, and report the names of some."""
    paths = [path for path, _ in reader.samples]
    with suppress_output(), ThreadPoolExecutor() as pool:
        decodable = list(pool.map(_is_decodable, paths))
    readable_samples = []
    unreadable_paths = []
    for sample, is_decodable in zip(reader.samples, decodable, strict=True):
        if is_decodable:
            readable_samples.append(sample)
        else:
            unreadable_paths.append(Path(sample[0]).relative_to(reader.root))
    if unreadable_paths:
        images = count_text(len(unreadable_paths), "image")
        note(f"{where}: skipping {images} that cannot be read: {short_list(unreadable_paths)}")
    reader.samples = readable_samples


def _is_decodable(path: str) -> bool:
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.draft("RGB", (64, 64))  # decodes large JPEGs at 1/8 scale, much faster
            image.load()
            check_white_level(image)
    except READ_ERRORS:
        return False
    return True


def _hold_out(
    samples: Sequence[tuple[str, int]],
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Split samples (path, class) into training and test; every fifth of a class is for testing."""
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    counts: Counter[int] = Counter()  # samples of each class so far
    for sample in samples:
        label = sample[1]
        counts[label] += 1
        if counts[label] % HELD_OUT_EVERY == 0:
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
    mirrored: float = MIRRORED_SHARE,
) -> None:
    """Set transforms that prepare images for the model, and augment the training images.

    Args:
        data: The data sets that get the transforms.
        model: Its config states size, channels, interpolation and normalisation.
        input_size: (channels, rows, columns), to override the model's.
        augmentation: Augmentation of the training images.
        mirrored: Share of the training images that are mirrored left to right.

    Raises:
        DclsConvertError: The model takes neither 1 nor 3 channels.
    """
    overrides = {}
    if input_size:
        overrides["input_size"] = tuple(input_size)
    config = resolve_data_config(overrides, model=model)
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
    convert_mode = partial(to_mode, mode=MODES[channels])
    for split in (data.train, data.test):
        split.transform.transforms.insert(0, convert_mode)
