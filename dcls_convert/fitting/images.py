"""The images of a calibration: read from a folder as the model takes them, some of them held
out."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
CORNER = 0.75  # of the sides of an image
# every fifth image of a folder is not fitted to, and shows what the conversion did to the outputs
HELD_OUT = 5
BATCH = 8  # images
# Of a file's contents, whatever its name says. Pillow has more, of which PostScript would be run as
# a program.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF")
UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    Image.DecompressionBombError,
)  # what Pillow's readers raise

# A folder; or as the model takes them: batches (N, channels, *spatial), or one, or images without
# the first axis.
Images = str | Path | Tensor | Iterable[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """What is taken off each channel of an image with values from 0 to 1, and what the rest is
    divided by."""

    mean: tuple[float, ...]  # for each channel, or one for all
    std: tuple[float, ...]


IMAGENET = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def stated_normalisation(model: nn.Module) -> Normalisation | None:
    """What timm's models state, and torchvision's were trained with; None for others."""
    config = getattr(model, "pretrained_cfg", None) or {}
    if config.get("mean") and config.get("std"):
        return Normalisation(mean=tuple(config["mean"]), std=tuple(config["std"]))
    if type(model).__module__.startswith("torchvision.models."):
        return IMAGENET
    return None


def _normalisation_of(
    model: nn.Module, channels: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Normalisation:
    """The given one, else the model's; DclsConvertError where there is neither, or not one for all
    channels."""
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
    """Batches of images (N, channels, *spatial) to fit outputs to, and others to measure them
    on."""

    batches: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.batches))


def calibrate(
    model: nn.Module,
    plan: ConversionPlan,
    images: Images | Calibration,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    note: Notify = silent,
) -> Calibration:
    """Images by which a conversion keeps outputs, for `apply_plan_(calibration=...)`.

    Args:
        model: Its preprocessing, as timm states it, scales and normalises the images of a folder.
            Left as it is.
        plan: Made for it; states the images' size.
        images: A folder, of which 80 images spread evenly over the order of their names are taken,
            and every fifth of these held out, with the corners of each that is larger than the
            model's images; or batches (N, channels, *spatial) as the model takes them, one batch, a
            list of images (channels, *spatial), or lists that begin with batches, as a loader gives
            with labels. Of these, none is held out.
        mean, std: With which the images of a folder, whose values are from 0 to 1, are normalised,
            for each channel or one for all; needed where the model does not state them.
        note: Told about files that are not taken.

    Raises:
        DclsConvertError: There are no images, or values that are not finite, or it is not known how
            to normalise them.
    """
    if not isinstance(images, str | Path) and (mean is not None or std is not None):
        raise DclsConvertError(
            "calibration: mean and std are for a folder of images; tensors are taken as they are"
        )
    if isinstance(images, Calibration):
        return images
    if isinstance(images, str | Path):
        check_images(Path(images))
        size = _size_of_files(plan.input_size)
        normalisation = _normalisation_of(model, size[0], mean, std)
        whole = read_images(Path(images), normalisation, size, note)
        every = slice(HELD_OUT - 1, None, HELD_OUT) if len(whole) >= HELD_OUT else slice(1, 2)
        held = []
        for path in list(whole)[every]:
            held.append(whole.pop(path))
            for crop in _corners(_opened(path, size), size):
                held.append(_as_taken(crop, normalisation, size))
        calibration = Calibration(batches=_batches([*whole.values()]), held_out=_batches(held))
    else:
        image_axes = 3 if plan.input_size is None else len(plan.input_size)
        calibration = Calibration(batches=tuple(_given_batches(images, image_axes)))
    if not len(calibration):
        raise DclsConvertError(f"calibration: there are no images in {shown(images)}")
    if not all(bool(batch.isfinite().all()) for batch in calibration.batches):
        raise DclsConvertError(
            "calibration: the images have values that are not finite (NaN or infinite)"
        )
    return calibration


def _given_batches(images: Tensor | Iterable[Any], image_axes: int) -> Iterator[Tensor]:
    """The batches in what was given: one batch, batches, images, or what a loader gives."""
    for given in [images] if isinstance(images, Tensor) else images:
        tensor = given[0] if isinstance(given, list | tuple) else given
        if not isinstance(tensor, Tensor) or tensor.dim() not in (image_axes, image_axes + 1):
            kind = type(tensor).__name__
            found = (
                f"a tensor of {tensor.dim()} axes" if isinstance(tensor, Tensor) else f"a {kind}"
            )
            raise DclsConvertError(
                f"calibration: found {found}; give batches of {image_axes + 1} axes, (N, "
                f"channels, *spatial), "
                f"or images of {image_axes}"
            )
        batch = tensor.unsqueeze(0) if tensor.dim() == image_axes else tensor
        if len(batch):
            yield batch


def _batches(images: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        torch.stack(images[first : first + BATCH]) for first in range(0, len(images), BATCH)
    )


def read_images(
    folder: Path,
    normalisation: Normalisation,
    size: Sequence[int] | None,
    note: Notify,
    *,
    most: int = MOST_IMAGES,
) -> dict[Path, Tensor]:
    """So many images of a folder at most, evenly spaced over the order of their names, as the model
    takes them."""
    size, paths, images = _size_of_files(size), sorted(image_paths(folder)), {}
    most = min(len(paths), most)
    for path in (
        paths[index * len(paths) // most] for index in range(most)
    ):  # a folder of classes gives some of each
        try:
            images[path] = _as_taken(_opened(path, size), normalisation, size)
        except UNREADABLE as error:
            note(f"{path} is not taken: {one_line(error)[:200]}")
    return images


def _size_of_files(size: Sequence[int] | None) -> Sequence[int]:
    """A model's size, if files can have it."""
    if size is None:
        raise DclsConvertError(
            "images: the size of the model's images is not known; state input_size"
        )
    if len(size) != 3 or size[0] not in (1, 3):
        raise DclsConvertError(
            f"images: files are images of 1 or 3 channels; the model takes {tuple(size)}"
        )
    return size


def _opened(path: Path, size: Sequence[int]) -> Image.Image:
    """Upright, in colours or grey of 8 bits."""
    with (
        quietly(),
        Image.open(path, formats=FORMATS) as image,
    ):  # it warns of metadata that no pixel needs
        upright = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16") or (
            image.mode == "I" and image.format in ("PNG", "PPM")
        ):  # of 16 bits all
            upright = upright.convert("I").point(lambda value: value / 257).convert("L")
        if upright.mode in ("I", "F"):
            kind = "integers" if image.mode == "I" else "floating-point numbers"
            raise ValueError(
                f"its pixels are {kind} of 32 bits, and nothing says which is white; give it "
                f"8 or 16 bits"
            )
        return upright.convert("RGB" if size[0] == 3 else "L")


def _corners(image: Image.Image, size: Sequence[int]) -> list[Image.Image]:
    """Four crops of an image that is larger than the model's, of CORNER of its sides."""
    if image.height <= size[1] or image.width <= size[2]:
        return []
    width, height = int(CORNER * image.width), int(CORNER * image.height)
    places = itertools.product((0, image.width - width), (0, image.height - height))
    return [image.crop((left, top, left + width, top + height)) for left, top in places]


def _as_taken(image: Image.Image, normalisation: Normalisation, size: Sequence[int]) -> Tensor:
    channels, rows, columns = size
    mean = torch.tensor(normalisation.mean[:channels]).view(-1, 1, 1)
    std = torch.tensor(normalisation.std[:channels]).view(-1, 1, 1)
    fitted = ImageOps.fit(image, (columns, rows), Image.Resampling.BICUBIC)
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8).reshape(
        rows, columns, channels
    )
    return (pixels.movedim(-1, 0).float() / 255 - mean) / std
