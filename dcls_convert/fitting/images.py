"""The images of a calibration: read from a folder as the model takes them, some of them held out."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
HELD_OUT = 5  # every fifth image of a folder is not fitted to, and shows what the conversion did to the outputs
BATCH = 8  # images
# Of a file's contents, whatever its name says. Pillow has more, of which PostScript would be run as a program.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF")
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow's readers raise
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # where the model states none

Images = str | Path | Iterable[Tensor]  # a folder, or batches (N, channels, *spatial) as the model takes them


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Batches of images (N, channels, *spatial) to fit outputs to, and others to measure them on."""

    batches: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.batches))


def calibrate(
    model: nn.Module, plan: ConversionPlan, images: Images | Calibration, *, note: Notify = silent
) -> Calibration:
    """Images by which a conversion keeps outputs, for `apply_plan_(calibration=...)`.

    Args:
        model: Its preprocessing, as timm states it, scales and normalises the images of a folder. Left as it is.
        plan: Made for it; states the images' size.
        images: A folder, of which 80 images spread evenly over the order of their names are taken, and every fifth of
            these held out, with the corners of each that is larger than the model's images; or batches
            (N, channels, *spatial) as the model takes them, or lists that begin with these, as a loader gives with
            labels, of which none is held out.
        note: Told about files that are not taken.

    Raises:
        DclsConvertError: There are no images, or values that are not finite.
    """
    if isinstance(images, Calibration):
        return images
    if isinstance(images, str | Path):
        check_images(Path(images))
        size = _size_of_files(plan.input_size)
        whole = read_images(Path(images), model, size, note)
        every = slice(HELD_OUT - 1, None, HELD_OUT) if len(whole) >= HELD_OUT else slice(1, 2)
        held = []
        for path in list(whole)[every]:
            held += [whole.pop(path), *(_as_taken(crop, model, size) for crop in _corners(_opened(path, size), size))]
        calibration = Calibration(batches=_batches([*whole.values()]), held_out=_batches(held))
    else:
        batches = (batch[0] if isinstance(batch, list | tuple) else batch for batch in images)
        calibration = Calibration(batches=tuple(batch for batch in batches if len(batch)))
    if not len(calibration):
        raise DclsConvertError(f"calibration: there are no images in {shown(images)}")
    if not all(bool(batch.isfinite().all()) for batch in calibration.batches):
        raise DclsConvertError("calibration: the images have values that are not finite (NaN or infinite)")
    return calibration


def _batches(images: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(images[first : first + BATCH]) for first in range(0, len(images), BATCH))


def read_images(
    folder: Path, model: nn.Module, size: Sequence[int] | None, note: Notify, *, most: int = MOST_IMAGES
) -> dict[Path, Tensor]:
    """So many images of a folder at most, evenly spaced over the order of their names, as the model takes them."""
    size, paths, images = _size_of_files(size), sorted(image_paths(folder)), {}
    most = min(len(paths), most)
    for path in (paths[index * len(paths) // most] for index in range(most)):  # a folder of classes gives some of each
        try:
            images[path] = _as_taken(_opened(path, size), model, size)
        except UNREADABLE as error:
            note(f"{path} is not taken: {one_line(error)[:200]}")
    return images


def _size_of_files(size: Sequence[int] | None) -> Sequence[int]:
    """A model's size, if files can have it."""
    if size is None:
        raise DclsConvertError("images: the size of the model's images is not known; state input_size")
    if len(size) != 3 or size[0] not in (1, 3):
        raise DclsConvertError(f"images: files are images of 1 or 3 channels; the model takes {tuple(size)}")
    return size


def _opened(path: Path, size: Sequence[int]) -> Image.Image:
    """Upright, in colours or grey of 8 bits."""
    with quietly(), Image.open(path, formats=FORMATS) as image:  # it warns of metadata that no pixel needs
        upright = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # of 16 bits all
            upright = upright.convert("I").point(lambda value: value / 257).convert("L")
        if upright.mode in ("I", "F"):
            kind = "integers" if image.mode == "I" else "floating-point numbers"
            raise ValueError(f"its pixels are {kind} of 32 bits, and nothing says which is white; give it 8 or 16 bits")
        return upright.convert("RGB" if size[0] == 3 else "L")


def _corners(image: Image.Image, size: Sequence[int]) -> list[Image.Image]:
    """Four crops of an image that is larger than the model's, of CORNER of its sides."""
    if image.height <= size[1] or image.width <= size[2]:
        return []
    width, height = int(CORNER * image.width), int(CORNER * image.height)
    places = itertools.product((0, image.width - width), (0, image.height - height))
    return [image.crop((left, top, left + width, top + height)) for left, top in places]


def _as_taken(image: Image.Image, model: nn.Module, size: Sequence[int]) -> Tensor:
    channels, rows, columns = size
    stated = getattr(model, "pretrained_cfg", None) or {}
    usual = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    mean, std = (torch.tensor(tuple(stated.get(name) or usual[name])[:channels]).view(-1, 1, 1) for name in usual)
    fitted = ImageOps.fit(image, (columns, rows), Image.Resampling.BICUBIC)
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8).reshape(rows, columns, channels)
    return (pixels.movedim(-1, 0).float() / 255 - mean) / std
