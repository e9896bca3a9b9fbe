"""The images of a calibration: read from a folder as the model takes them, some of them held out.

Sizes are (channels, rows, columns).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from ..errors import DclsConvertError, one_line, shown
from ..files import check_images, image_paths
from ..networks.running import quietly
from ..planning.plan import ConversionPlan
from ..progress import Notify, silent

MOST_IMAGES = 80  # of a folder
CORNER = 0.75  # sides of a crop, as a share of the image's sides
# One image in so many is held out: not fitted to, it shows what the conversion did
# to the outputs.
HELD_OUT_EVERY = 5
BATCH = 8  # images
NOISE_CORRELATION = 0.1  # of neighbouring pixels; photographs have 0.8 and more
# Formats that are read, whatever a file's name says. Pillow reads more, but runs PostScript as a
# program.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF")
# What Pillow's readers raise.
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)

# A folder; or tensors as the model takes them: one batch (N, channels, *spatial), several batches,
# or single images (channels, *spatial).
Images = str | Path | Tensor | Iterable[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """How an image with values from 0 to 1 becomes a model's input: (image - mean) / std."""

    mean: tuple[float, ...]  # for each channel, or one for all
    std: tuple[float, ...]  # for each channel, or one for all


IMAGENET = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def stated_normalisation(model: nn.Module) -> Normalisation | None:
    """The normalisation that a timm model states, or torchvision's; None for other models."""
    config = getattr(model, "pretrained_cfg", None) or {}
    if config.get("mean") and config.get("std"):
        return Normalisation(mean=tuple(config["mean"]), std=tuple(config["std"]))
    if type(model).__module__.startswith("torchvision.models."):
        return IMAGENET
    return None


def _normalisation_of(
    model: nn.Module, channels: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Normalisation:
    """The given mean and std, else the model's normalisation.

    DclsConvertError: there is neither, or they are not for the model's channels.
    """
    if mean is None and std is None:
        stated = stated_normalisation(model)
        if stated is None:
            raise DclsConvertError(
                "calibration: the model does not state how its images are normalised; give "
                "mean and std "
                f"(ImageNet's: mean {_listed(IMAGENET.mean)}, std {_listed(IMAGENET.std)})"
            )
        return stated
    if mean is None or std is None:
        raise DclsConvertError("calibration: give mean and std, or neither")
    for name, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels):
            raise DclsConvertError(
                f"calibration: {name} {_listed(values)} has {len(values)} values; give 1 or "
                f"{channels}, "
                "as the images have channels"
            )
    if not all(value > 0 for value in std):
        raise DclsConvertError(f"calibration: std {_listed(std)} must be above 0")
    return Normalisation(mean=tuple(mean), std=tuple(std))


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The images of a calibration, in batches (N, channels, *spatial)."""

    batches: tuple[Tensor, ...]  # to fit outputs to
    held_out: tuple[Tensor, ...] = ()  # to measure outputs on
    files: tuple[str, ...] = ()  # paths of the images below their folder; none for tensors

    def __len__(self) -> int:
        return sum(map(len, self.batches))


def calibrate(
    model: nn.Module,
    plan: ConversionPlan,
    images: Images | Calibration,
    *,
    held_out: Images | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    note: Notify = silent,
) -> Calibration:
    """Images by which a conversion keeps outputs, for `apply_plan_(calibration=...)`.

    Args:
        model: Its normalisation, as timm states it, is applied to the images of a folder. The model
            is not changed.
        plan: A plan for the model; states the size of its images.
        images: A folder, or tensors as the model takes them. From a folder, 80 images are taken,
            evenly spread over the order of their names. Tensors are one batch (N, channels,
            *spatial), several batches, single images (channels, *spatial), or what a data loader
            gives: lists that begin with a batch.
        held_out: Images to compare outputs on, which nothing is fitted to; given as `images` are.
            None holds every fifth of the images out, of a folder together with crops of its corners
            if it is larger than the model's images. Of fewer than five images, a folder's second
            one is held out, and no tensor. An empty list holds none out.
        mean, std: Normalisation of a folder's images, whose values are from 0 to 1; for each
            channel, or one for all. Needed if the model does not state them.
        note: Called with a message for each file that cannot be read.

    Raises:
        DclsConvertError: There are no images, or their values are not finite, or their
            normalisation is not known.
    """
    if not isinstance(images, str | Path) and (mean is not None or std is not None):
        raise DclsConvertError(
            "calibration: mean and std are for a folder of images; tensors are taken as they are"
        )
    if isinstance(images, Calibration):
        if held_out is not None:
            raise DclsConvertError("calibration: a Calibration states what it holds out itself")
        return images
    image_axes = 3 if plan.input_size is None else len(plan.input_size)

    def read(source: Images, *, holds_out: bool) -> Calibration:
        if isinstance(source, str | Path):
            return _read_folder(model, plan, Path(source), mean, std, note, holds_out=holds_out)
        batches = tuple(_given_batches(source, image_axes))
        if holds_out:
            return _with_every_fifth_held_out(batches)
        return Calibration(batches=batches)

    calibration = read(images, holds_out=held_out is None)
    if held_out is not None:
        others = read(held_out, holds_out=False)
        calibration = replace(calibration, held_out=others.batches)
    if not len(calibration):
        raise DclsConvertError(f"calibration: there are no images in {shown(images)}")
    for batch in (*calibration.batches, *calibration.held_out):
        if not bool(batch.isfinite().all()):
            raise DclsConvertError(
                "calibration: the images have values that are not finite (NaN or infinite)"
            )
    if _is_noise(calibration.batches[0]):
        note(
            "the images look like noise, whose neighbouring pixels are unrelated; calibrate with "
            "images that the network will see"
        )
    return calibration


def _is_noise(batch: Tensor) -> bool:
    """Whether neighbours along the last axis are uncorrelated, as in no photograph."""
    values = batch.double().flatten(0, -2)  # (lines of pixels, columns)
    values = values - values.mean()
    energy = values.square().mean()
    neighbours = (values[:, 1:] * values[:, :-1]).mean()
    return bool(energy > 0) and bool(neighbours < NOISE_CORRELATION * energy)


def _read_folder(
    model: nn.Module,
    plan: ConversionPlan,
    folder: Path,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    note: Notify,
    *,
    holds_out: bool,
) -> Calibration:
    check_images(folder)
    size = _size_of_files(plan.input_size)
    normalisation = _normalisation_of(model, size[0], mean, std)
    image_of_path = read_images(folder, normalisation, size, note)
    first_held_out = HELD_OUT_EVERY - 1
    if len(image_of_path) < HELD_OUT_EVERY:  # of few images, the second one is held out
        first_held_out = 1
    fitted: list[Tensor] = []
    held_out: list[Tensor] = []
    for index, (path, image) in enumerate(image_of_path.items()):
        if not holds_out or index % HELD_OUT_EVERY != first_held_out:
            fitted.append(image)
            continue
        held_out.append(image)
        for crop in _corners(_open_image(path, size), size):
            held_out.append(_to_tensor(crop, normalisation, size))
    files = tuple(path.relative_to(folder).as_posix() for path in image_of_path)
    return Calibration(batches=_batches(fitted), held_out=_batches(held_out), files=files)


def _with_every_fifth_held_out(batches: Sequence[Tensor]) -> Calibration:
    """Given batches, of whose images every fifth is held out; none if there are fewer."""
    fitted: list[Tensor] = []
    held_out: list[Tensor] = []
    first = 0  # index of the batch's first image among all images
    for batch in batches:
        indices = torch.arange(first, first + len(batch), device=batch.device)
        is_held_out = indices % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if not is_held_out.any():
            fitted.append(batch)  # no copy
        else:
            held_out.append(batch[is_held_out])
            if not is_held_out.all():
                fitted.append(batch[~is_held_out])
        first += len(batch)
    return Calibration(batches=tuple(fitted), held_out=tuple(held_out))


def _given_batches(images: Tensor | Iterable[Any], image_axes: int) -> Iterator[Tensor]:
    """The batches in what was given: one batch, batches, images, or what a loader gives."""
    if isinstance(images, Tensor):
        images = [images]
    for given in images:
        tensor = given
        if isinstance(given, list | tuple):  # a loader's batch, with labels
            tensor = given[0]
        if not isinstance(tensor, Tensor):
            raise _wrong_tensor(f"a {type(tensor).__name__}", image_axes)
        if tensor.dim() not in (image_axes, image_axes + 1):
            raise _wrong_tensor(f"a tensor of {tensor.dim()} axes", image_axes)
        batch = tensor
        if tensor.dim() == image_axes:
            batch = tensor.unsqueeze(0)
        if len(batch):
            yield batch


def _wrong_tensor(found: str, image_axes: int) -> DclsConvertError:
    return DclsConvertError(
        f"calibration: found {found}; give batches of {image_axes + 1} axes, "
        f"(N, channels, *spatial), or images of {image_axes}"
    )


def _batches(images: list[Tensor]) -> tuple[Tensor, ...]:
    firsts = range(0, len(images), BATCH)
    return tuple(torch.stack(images[first : first + BATCH]) for first in firsts)


def read_images(
    folder: Path,
    normalisation: Normalisation,
    size: Sequence[int] | None,
    note: Notify,
    *,
    most: int = MOST_IMAGES,
) -> dict[Path, Tensor]:
    """At most `most` images of a folder, as the model takes them: (channels, rows, columns) each.

    They are evenly spaced over the order of the paths, so a folder of classes gives some of each.
    Files that cannot be read are left out, and `note` is told.
    """
    size = _size_of_files(size)
    paths = sorted(image_paths(folder))
    count = min(len(paths), most)
    images: dict[Path, Tensor] = {}
    for index in range(count):
        path = paths[index * len(paths) // count]
        try:
            images[path] = _to_tensor(_open_image(path, size), normalisation, size)
        except UNREADABLE as error:
            note(f"{path} is not taken: {one_line(error)[:200]}")
    return images


def _size_of_files(size: Sequence[int] | None) -> Sequence[int]:
    """The size of a model's images. DclsConvertError: image files cannot have it."""
    if size is None:
        raise DclsConvertError(
            "images: the size of the model's images is not known; state input_size"
        )
    if len(size) != 3 or size[0] not in (1, 3):
        raise DclsConvertError(
            f"images: files are images of 1 or 3 channels; the model takes {tuple(size)}"
        )
    return size


def _open_image(path: Path, size: Sequence[int]) -> Image.Image:
    """The image of a file, upright, in colour or grey of 8 bits as the model's size says."""
    with quietly(), Image.open(path, formats=FORMATS) as image:  # Pillow warns of odd metadata
        has_16_bits = _has_16_bits(image)
        check_white_level(image)
        upright = ImageOps.exif_transpose(image)
        return _in_eight_bits(upright, has_16_bits, "RGB" if size[0] == 3 else "L")


def in_eight_bits(image: Image.Image, mode: str) -> Image.Image:
    """An image that was just opened, in Pillow's mode "RGB" or "L".

    Pillow alone would clip 16 bits to 8.
    """
    return _in_eight_bits(image, _has_16_bits(image), mode)


def _in_eight_bits(image: Image.Image, has_16_bits: bool, mode: str) -> Image.Image:
    if has_16_bits:
        image = image.convert("I").point(lambda value: value / 257).convert("L")
    return image.convert(mode)


def _has_16_bits(image: Image.Image) -> bool:
    # Pillow opens the 16-bit images of these two formats in its 32-bit mode "I".
    in_mode_of_32 = image.mode == "I" and image.format in ("PNG", "PPM")
    return in_mode_of_32 or image.mode.startswith("I;16")


def check_white_level(image: Image.Image) -> None:
    """Refuse (ValueError) an image, just opened, whose white level is unknown."""
    if image.mode in ("I", "F") and not _has_16_bits(image):
        kind = "integers" if image.mode == "I" else "floating-point numbers"
        raise ValueError(
            f"its pixels are {kind} of 32 bits, and the white level is unknown; "
            "convert it to 8 or 16 bits per channel"
        )


def _corners(image: Image.Image, size: Sequence[int]) -> list[Image.Image]:
    """Crops of an image's four corners; none if it is not larger than the model's images."""
    if image.height <= size[1] or image.width <= size[2]:
        return []
    width = int(CORNER * image.width)
    height = int(CORNER * image.height)
    crops = []
    for left in (0, image.width - width):
        for top in (0, image.height - height):
            crops.append(image.crop((left, top, left + width, top + height)))
    return crops


def _to_tensor(image: Image.Image, normalisation: Normalisation, size: Sequence[int]) -> Tensor:
    """The image as the model takes it: of its size, and normalised; (channels, rows, columns)."""
    channels, rows, columns = size
    mean = torch.tensor(normalisation.mean[:channels]).view(-1, 1, 1)
    std = torch.tensor(normalisation.std[:channels]).view(-1, 1, 1)
    fitted = ImageOps.fit(image, (columns, rows), Image.Resampling.BICUBIC)
    values = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    pixels = values.reshape(rows, columns, channels).movedim(-1, 0)
    return (pixels.float() / 255 - mean) / std
