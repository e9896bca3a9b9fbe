"""Read image files and turn them into inputs of a model.

Sizes are (channels, rows, columns).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from ..errors import DclsConvertError
from ..geometry import plain_numbers
from ..input import image_paths
from ..networks.running import suppress_output
from ..progress import Note
from ..text import one_line, shortened

BATCH = 8  # images
CROP_SHARE = 0.75  # side of a crop, as a share of the image's side
# Formats that are read, whatever a file's suffix. Pillow reads more, but it executes PostScript.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF")
# Exceptions that Pillow raises for files that it cannot read.
READ_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """How an image with values from 0 to 1 becomes a model's input: (image - mean) / std."""

    mean: tuple[float, ...]  # for each channel, or one for all
    std: tuple[float, ...]  # for each channel, or one for all


IMAGENET = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def stated_normalisation(model: nn.Module) -> Normalisation | None:
    """Return the normalisation that a timm model states, or ImageNet's for torchvision's models.

    None for other models.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    if config.get("mean") and config.get("std"):
        return Normalisation(mean=tuple(config["mean"]), std=tuple(config["std"]))
    if type(model).__module__.startswith("torchvision.models."):
        return IMAGENET
    return None


def normalisation_of(
    model: nn.Module,
    channels: int,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> Normalisation:
    """Return the given mean and std or, if there are none, the model's normalisation.

    Raises:
        DclsConvertError: There is neither, they do not fit the model's channels, or they are not on
            the scale of the images, whose values are from 0 to 1.
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
    normalisation = Normalisation(
        mean=_values_of("mean", mean, channels), std=_values_of("std", std, channels)
    )
    if 0 in normalisation.std:
        raise DclsConvertError(f"calibration: std {_listed(normalisation.std)} must be above 0")
    return normalisation


def _values_of(name: str, given: float | Sequence[float], channels: int) -> tuple[float, ...]:
    """Return a mean or std as a value for each channel, or one for all; refuse what is neither.

    Values above 1 are refused: they are meant for images with values from 0 to 255, and would turn
    these images into nearly constant ones.
    """
    given = plain_numbers(given)
    if isinstance(given, int | float):
        given = (given,)
    try:
        values = tuple(map(float, given))
    except (TypeError, ValueError):
        raise DclsConvertError(
            f"calibration: {name} {shortened(repr(given))}: give a number, or one per channel"
        ) from None
    if len(values) not in (1, channels):
        raise DclsConvertError(
            f"calibration: {name} {_listed(values)} has {len(values)} values; give 1, "
            f"or {channels}, one per channel"
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


class PixelBatches(Sequence[Tensor]):
    """Batches (N, channels, rows, columns) in float32, stored as 8-bit pixels.

    A batch is normalised each time it is read, so only a few images are in memory as floats.
    """

    def __init__(self, pixels: Sequence[Tensor], normalisation: Normalisation) -> None:
        """Keep `pixels`: one tensor (channels, rows, columns) per image, as from `read_pixels`."""
        self.pixels = pixels
        self.normalisation = normalisation

    def __len__(self) -> int:
        return math.ceil(len(self.pixels) / BATCH)

    def __getitem__(self, index: Any) -> Any:
        first = range(0, len(self.pixels), BATCH)[index]  # raises IndexError after the last batch
        return normalised(torch.stack([*self.pixels[first : first + BATCH]]), self.normalisation)


def read_pixels(
    folder: Path, size: Sequence[int] | None, note: Note, *, max_images: int
) -> dict[Path, Tensor]:
    """Read images of a folder at the model's size: (channels, rows, columns) in uint8, by path.

    At most `max_images` are read, evenly spaced over the sorted paths, so that a folder of classes
    gives some of each class. Files that cannot be read are skipped and reported through `note`.
    """
    size = check_image_size(size)
    paths = sorted(image_paths(folder))
    count = min(len(paths), max_images)
    images: dict[Path, Tensor] = {}
    for index in range(count):
        path = paths[index * len(paths) // count]
        try:
            images[path] = to_pixels(open_image(path, size), size)
        except READ_ERRORS as error:
            note(f"skipped {path}: {one_line(error)[:200]}")
    return images


def check_image_size(size: Sequence[int] | None) -> Sequence[int]:
    """Return the size; refuse (DclsConvertError) one that image files cannot have."""
    if size is None:
        raise DclsConvertError(
            "images: the size of the model's images is not known; state input_size"
        )
    if len(size) != 3 or size[0] not in (1, 3):
        raise DclsConvertError(
            f"images: files have 1 or 3 channels, but the model takes {tuple(size)}"
        )
    return size


def open_image(path: Path, size: Sequence[int]) -> Image.Image:
    """Open an image upright, in 8-bit colour or grey according to the channels of the size.

    Raises:
        One of READ_ERRORS: The file is not an image, or its white level is unknown.
    """
    # Pillow warns of odd metadata.
    with suppress_output(), Image.open(path, formats=FORMATS) as image:
        # Pillow opens the 16-bit images of these two formats in its 32-bit mode "I".
        opened_as_32_bits = image.mode == "I" and image.format in ("PNG", "PPM")
        has_16_bits = opened_as_32_bits or image.mode.startswith("I;16")
        if image.mode in ("I", "F") and not has_16_bits:
            kind = "integers" if image.mode == "I" else "floating-point numbers"
            raise ValueError(
                f"its pixels are {kind} of 32 bits, and the white level is unknown; "
                "convert it to 8 or 16 bits per channel"
            )
        upright = ImageOps.exif_transpose(image)
        if has_16_bits:  # Pillow's own conversion would clip values to 8 bits
            upright = upright.convert("I").point(lambda value: value / 257).convert("L")
        return upright.convert("RGB" if size[0] == 3 else "L")


def corner_crops(image: Image.Image, size: Sequence[int]) -> list[Image.Image]:
    """Return crops of the image's four corners; none if it is not larger than the model's size."""
    if image.height <= size[1] or image.width <= size[2]:
        return []
    width = int(CROP_SHARE * image.width)
    height = int(CROP_SHARE * image.height)
    crops = []
    for left in (0, image.width - width):
        for top in (0, image.height - height):
            crops.append(image.crop((left, top, left + width, top + height)))
    return crops


def to_pixels(image: Image.Image, size: Sequence[int]) -> Tensor:
    """Crop and resize an image to the model's size: (channels, rows, columns), uint8."""
    channels, rows, columns = size
    fitted = ImageOps.fit(image, (columns, rows), Image.Resampling.BICUBIC)
    values = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return values.reshape(rows, columns, channels).movedim(-1, 0)


def normalised(pixels: Tensor, normalisation: Normalisation) -> Tensor:
    """Normalise 8-bit pixels (..., channels, rows, columns) for the model, in float32."""
    channels = pixels.shape[-3]
    mean = _value_per_channel(normalisation.mean, channels).view(-1, 1, 1)
    std = _value_per_channel(normalisation.std, channels).view(-1, 1, 1)
    return (pixels.float() / 255 - mean) / std


def _value_per_channel(values: Sequence[float], channels: int) -> Tensor:
    """Return the values for this number of channels: (channels,) or (1,).

    Models for grey images may state the values of colour images. Like timm, use their mean then.
    """
    if len(values) != channels:
        values = [sum(values) / len(values)]
    return torch.tensor(values)
