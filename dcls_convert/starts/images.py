"""The images of a calibration, from a folder or from tensors, with some of them held out.

Sizes are (channels, rows, columns).
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from ..errors import DclsConvertError, check_argument
from ..file_checks import check_images, image_paths
from ..networks.timm_notes import config_of
from ..options import CALIBRATION_IMAGES
from ..planning.plan import DraftPlan
from ..progress import Note, ignore_messages
from ..running.input_spec import inputs_text
from ..running.process_settings import suppress_output
from ..text import count_text, one_line, shortened

# One image out of this many is held out. Nothing is fitted to it, so it shows what the conversion
# did to the outputs.
HELD_OUT_EVERY = 5
# Maximum number of files of a folder that are held out. With four crops of each, these are 200
# images, enough to compare outputs on.
MAX_FILES_HELD_OUT = 40
CROP_SHARE = 0.75  # side of a crop, as a share of the image's side
BATCH = 8  # images
# Images whose variation within an image is a smaller share of their root mean square are refused.
# Photographs have about 1 if normalised, 0.4 if not, and 0.002 with a mean on the scale 0..255.
MIN_VARIATION = 3e-3
# Formats that are read, whatever a file's suffix. Pillow reads more, but it executes PostScript.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF")
# Exceptions that Pillow raises for files that it cannot read.
READ_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)

# A folder; or tensors as the model takes them: one batch (N, channels, *spatial), several batches,
# or single images (channels, *spatial).
Images = str | Path | Tensor | Iterable[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The images of a calibration, in batches (N, channels, *spatial)."""

    batches: Sequence[Tensor]  # images that layers are fitted to
    held_out: Sequence[Tensor] = ()  # images on which outputs are compared
    # Number of files in `held_out`, without crops of them, if they come from the folder of
    # `batches`; else 0.
    files_held_out: int = 0

    def __len__(self) -> int:
        """The number of images in `batches`; held-out images do not count."""
        return sum(map(len, self.batches))


def read_calibration_images(
    model: nn.Module,
    plan: DraftPlan,
    images: Images | Calibration,
    *,
    held_out: Images | None = None,
    most_images: int | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    note: Note = ignore_messages,
) -> Calibration:
    """Read the images of a calibration. Nothing is fitted yet.

    Pass the result to `apply_plan_(calibration=...)` or `convert_(calibration=...)`.

    Args:
        model: The images of a folder are resized, cropped and normalised by timm's evaluation
            transform for this model. The model is not changed.
        plan: A plan for the model; states the size of its images.
        images: A folder, or tensors normalised as the model expects. Tensors are one batch (N,
            channels, *spatial), several batches, single images (channels, *spatial), or the items
            of a data loader: lists that begin with a batch. They all stay in memory.
        held_out: Images to compare outputs on, in the same forms as `images`. Nothing is fitted to
            them, so none of them may be in `images`. By default, every fifth image is held out.
            From a folder, at most 40 files are held out. If a file is larger than the model's
            images, four crops of its corners are added. Fewer than five images: a folder holds out
            its second file, tensors hold out none. An empty list: no image is held out.
        most_images: Maximum number of images to read from a folder, evenly spread over the order of
            their names; 80 by default. They stay in memory, where an image of 3x224x224 takes
            0.6 MB.
        mean, std: Normalisation of a folder's images, whose values are from 0 to 1: a value for
            each channel, or one for all. Required if the model does not state them.
        note: Called with a message for each file that cannot be read.

    Raises:
        DclsConvertError: There are no images, their values are not finite or do not vary, their
            normalisation is not known, or `held_out` repeats some of them.
    """
    check_argument("model", model, nn.Module)
    check_argument("plan", plan, DraftPlan)
    if plan.input_size is None and plan.inputs is not None:
        raise DclsConvertError(
            "calibration: images are for a network of one image, and this one takes "
            f"{inputs_text(plan.inputs)}; convert it without them"
        )
    if not isinstance(images, str | Path):
        for name, value in (("mean", mean), ("std", std), ("most_images", most_images)):
            if value is not None:
                raise DclsConvertError(
                    f"calibration: {name} is for a folder of images, "
                    "not for tensors or a Calibration"
                )
    if isinstance(images, Calibration):
        if held_out is not None:
            raise DclsConvertError(
                "calibration: held_out cannot be given with a Calibration, which has its own"
            )
        return images
    max_images = CALIBRATION_IMAGES if most_images is None else most_images

    def read(source: Images, *, holds_out: bool) -> Calibration:
        if isinstance(source, str | Path):
            size = _size_of_files(plan.input_size)
            transform = _evaluation_transform(model, size, mean, std)
            folder = Path(source)
            return _read_folder(
                folder, size, transform, note, max_images=max_images, holds_out=holds_out
            )
        tensors = list(_given_images(source, plan.input_size))
        every_fifth: list[Tensor] = []
        if holds_out:
            every_fifth = tensors[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
            del tensors[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        return Calibration(batches=_in_batches(tensors), held_out=_in_batches(every_fifth))

    calibration = read(images, holds_out=held_out is None)
    if held_out is not None:
        calibration = replace(calibration, held_out=read(held_out, holds_out=False).batches)
        _refuse_repeated(calibration)
    if not len(calibration):
        raise DclsConvertError(f"calibration: there are no images in {shortened(images)}")
    _refuse_without_content(calibration)
    return calibration


def _refuse_repeated(calibration: Calibration) -> None:
    """Refuse held-out images that layers are fitted to: they would show nothing of other images."""
    repeated = _digests(calibration.batches) & _digests(calibration.held_out)
    if repeated:
        raise DclsConvertError(
            f"calibration: held_out repeats {count_text(len(repeated), 'image')} that layers are "
            "fitted to; give others, or omit held_out, so that every fifth image is held out"
        )


def _digests(batches: Iterable[Tensor]) -> set[bytes]:
    """Return a hash of the values of each image."""
    digests = set()
    for batch in batches:
        for values in batch.detach().cpu().float().contiguous().numpy():
            digests.add(hashlib.sha256(values).digest())
    return digests


def _refuse_without_content(calibration: Calibration) -> None:
    """Refuse images with values that are not finite, and constant images.

    A kernel that is fitted to constant images keeps nothing but the sum of its weights.
    """
    for batch in (*calibration.batches, *calibration.held_out):
        if not bool(batch.isfinite().all()):
            raise DclsConvertError(
                "calibration: the images have values that are not finite (NaN or infinite)"
            )
    energy = 0.0
    energy_of_variation = 0.0
    for batch in calibration.batches:
        channels = batch.float().flatten(2)  # (N, channels, places)
        energy += float(channels.square().sum())
        energy_of_variation += float((channels - channels.mean(2, keepdim=True)).square().sum())
    if energy_of_variation <= MIN_VARIATION**2 * energy:
        raise DclsConvertError(
            "calibration: the images are constant, or nearly so: their values hardly vary from "
            "place to place; check how they are normalised (mean and std)"
        )


# A folder of images.


def _size_of_files(size: Sequence[int] | None) -> Sequence[int]:
    """Return the size of the model's images; refuse a size that image files cannot have."""
    if size is None:
        raise DclsConvertError(
            "images: the size of the model's images is not known; state input_size"
        )
    if len(size) != 3 or size[0] not in (1, 3):
        raise DclsConvertError(
            f"images: files have 1 or 3 channels, but the model takes {tuple(size)}"
        )
    return size


def _evaluation_transform(
    model: nn.Module,
    size: Sequence[int],
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> Callable[[Image.Image], Tensor]:
    """Return timm's evaluation transform: resize, crop the centre, normalise.

    For a model that is not timm's, the shorter side of an image is resized to the model's size, and
    only the longer side is cropped: images of the model's size stay as they are. If the model is
    neither timm's nor torchvision's, the normalisation must be given.
    """
    from timm.data import (
        IMAGENET_DEFAULT_MEAN,
        IMAGENET_DEFAULT_STD,
        create_transform,
        resolve_data_config,
    )

    channels = size[0]
    is_torchvisions = type(model).__module__.startswith("torchvision.models.")
    model_config = config_of(model) or {"crop_pct": 1.0}
    asked: dict[str, Any] = {"input_size": size}
    if (mean is None) != (std is None):
        raise DclsConvertError("calibration: give mean and std, or neither")
    if mean is not None and std is not None:
        asked["mean"] = _values_of("mean", mean, channels)
        asked["std"] = _values_of("std", std, channels)
        if 0 in asked["std"]:
            raise DclsConvertError(f"calibration: std {_listed(asked['std'])} must be above 0")
    elif not model_config.get("mean") and not is_torchvisions:
        raise DclsConvertError(
            "calibration: the model does not state how its images are normalised; give mean and "
            f"std (ImageNet's: mean {_listed(IMAGENET_DEFAULT_MEAN)}, "
            f"std {_listed(IMAGENET_DEFAULT_STD)})"
        )
    config = resolve_data_config(asked, pretrained_cfg=model_config)
    for name in ("mean", "std"):
        if len(config[name]) != channels:  # grey images; timm's loader takes the average, too
            config[name] = (fmean(config[name]),)
    transform: Callable[[Image.Image], Tensor] = create_transform(**config)
    return transform


def _values_of(name: str, given: float | Sequence[float], channels: int) -> list[float]:
    """Return a mean or std as a list: one value for all channels, or one for each.

    Other numbers of values are refused. So are values above 1: these are meant for images with
    values from 0 to 255, and would turn images from 0 to 1 into nearly constant ones.
    """
    try:
        values: list[float] = torch.as_tensor(given, dtype=torch.float64).flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        values = []
    if len(values) not in (1, channels):
        raise DclsConvertError(
            f"calibration: {name} {shortened(repr(given))}: give a number, or {channels}, one per "
            "channel"
        )
    if not all(0 <= value <= 1 for value in values):
        scaled = _listed([value / 255 for value in values])
        raise DclsConvertError(
            f"calibration: {name} {_listed(values)} must be from 0 to 1, the scale of the images; "
            f"divided by 255, it is {scaled}"
        )
    return values


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _read_folder(
    folder: Path,
    size: Sequence[int],
    transform: Callable[[Image.Image], Tensor],
    note: Note,
    *,
    max_images: int,
    holds_out: bool,
) -> Calibration:
    """Read images of a folder; skip files that cannot be read, and report them through `note`."""
    from torchvision.transforms.functional import five_crop

    check_images(folder)
    paths = sorted(image_paths(folder))
    count = min(len(paths), max_images)
    images: dict[Path, Tensor] = {}
    for index in range(count):
        path = paths[index * len(paths) // count]  # evenly spread: some of each class's folder
        try:
            images[path] = transform(_open_image(path, size[0]))
        except READ_ERRORS as error:
            note(f"skipped {path}: {one_line(error)[:200]}")
    paths_held_out: list[Path] = []
    if holds_out:
        every = max(HELD_OUT_EVERY, math.ceil(len(images) / MAX_FILES_HELD_OUT))
        first = every - 1
        if len(images) < HELD_OUT_EVERY:  # too few for every fifth: hold out the second
            first = 1
        paths_held_out = [*images][first::every]
    held_out: list[Tensor] = []
    for path in paths_held_out:
        held_out.append(images.pop(path))
        image = _open_image(path, size[0])
        if image.height > size[1] and image.width > size[2]:
            crop_size = (int(CROP_SHARE * image.height), int(CROP_SHARE * image.width))
            *corners, _ = five_crop(image, crop_size)
            held_out += map(transform, corners)
    return Calibration(
        batches=_in_batches(images.values()),
        held_out=_in_batches(held_out),
        files_held_out=len(paths_held_out),
    )


def _open_image(path: Path, channels: int) -> Image.Image:
    """Open an image upright, in 8-bit colour or grey according to the number of channels.

    Raises:
        One of READ_ERRORS: The file is not an image, or its white level is unknown.
    """
    # Pillow warns of odd metadata.
    with suppress_output(), Image.open(path, formats=IMAGE_FORMATS) as image:
        # Pillow opens the 16-bit images of these two formats in its 32-bit mode "I".
        opened_as_32_bits = image.mode == "I" and image.format in ("PNG", "PPM")
        has_16_bits = opened_as_32_bits or image.mode.startswith("I;16")
        if image.mode in ("I", "F") and not has_16_bits:
            raise ValueError(
                "its pixels have 32 bits, and the white level is unknown; "
                "convert it to 8 or 16 bits per channel"
            )
        upright = ImageOps.exif_transpose(image)
        if has_16_bits:  # Pillow's own conversion would clip values to 8 bits
            upright = upright.convert("I").point(lambda value: value / 257).convert("L")
        return upright.convert({1: "L", 3: "RGB"}[channels])


# Tensors.


def _given_images(images: Any, size: Sequence[int] | None) -> Iterator[Tensor]:
    """Yield the images of one batch, several batches, single images, or the items of a loader."""
    image_axes = 3
    if size is not None:
        image_axes = len(size)
    if isinstance(images, Tensor | Mapping) or not isinstance(images, Iterable):
        images = [images]
    for item in images:
        batch = item
        if isinstance(item, list | tuple):  # a loader's batch, with labels
            batch = item[0]
        found = f"a value of type {type(batch).__name__}"
        is_right = False
        if isinstance(batch, Tensor):
            found = f"a tensor of {tuple(batch.shape)}, {str(batch.dtype).removeprefix('torch.')}"
            is_right = batch.is_floating_point() and batch.dim() in (image_axes, image_axes + 1)
        if is_right and size is not None and batch.shape[-1] == size[0]:  # channels last?
            is_right = batch.shape[-image_axes] == size[0]
        if not is_right:
            channels = "channels" if size is None else size[0]
            spatial = "rows, columns" if image_axes == 3 else "*spatial"
            raise DclsConvertError(
                f"calibration: found {found}; give float images (N, {channels}, {spatial}), "
                "normalised as the model takes them"
            )
        if batch.dim() == image_axes:
            batch = batch.unsqueeze(0)
        yield from batch


def _in_batches(images: Iterable[Tensor]) -> list[Tensor]:
    """Stack consecutive images of the same size into batches."""
    batches: list[Tensor] = []
    for _, neighbours in itertools.groupby(images, key=lambda image: image.shape):
        batches += torch.split(torch.stack([*neighbours]), BATCH)
    return batches
