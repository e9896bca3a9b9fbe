"""The images of a calibration, from a folder or from tensors, with some of them held out.

Sizes are (channels, rows, columns).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, check_argument
from ..input import check_images
from ..networks.input_tensors import inputs_text
from ..options import CALIBRATION_IMAGES
from ..planning.plan import ConversionPlan
from ..progress import Note, ignore_messages
from ..text import shortened
from .image_files import (
    Normalisation,
    PixelBatches,
    check_image_size,
    corner_crops,
    normalisation_of,
    open_image,
    read_pixels,
    to_pixels,
)

# One image out of this many is held out. Nothing is fitted to it, so it shows what the conversion
# did to the outputs.
HELD_OUT_EVERY = 5
# Maximum number of files of a folder that are held out. With four crops of each, these are 200
# images, enough to compare outputs on.
MAX_FILES_HELD_OUT = 40
MAX_IN_BATCH = 64  # images; larger batches are split
# Images whose variation within an image is a smaller share of their root mean square are refused.
# Photographs have about 1 if normalised, 0.4 if not, and 0.002 with a mean on the scale 0..255.
MIN_VARIATION = 3e-3

# A folder; or tensors as the model takes them: one batch (N, channels, *spatial), several batches,
# or single images (channels, *spatial).
Images = str | Path | Tensor | Iterable[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The images of a calibration, in batches (N, channels, *spatial)."""

    batches: Sequence[Tensor]  # images that layers are fitted to
    held_out: Sequence[Tensor] = ()  # images on which outputs are compared
    # Number of held-out files, if crops of them are held out too; 0 for tensors, and if no file is
    # large enough for crops.
    images_cropped: int = 0

    def __len__(self) -> int:
        """The number of images in `batches`, without those held out."""
        if isinstance(self.batches, PixelBatches):  # iterating would normalise every batch
            return len(self.batches.pixels)
        return sum(map(len, self.batches))


def calibrate(
    model: nn.Module,
    plan: ConversionPlan,
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
        model: Its normalisation, as timm states it, is applied to the images of a folder. The model
            is not changed.
        plan: A plan for the model; states the size of its images.
        images: A folder, or tensors normalised as the model expects. Tensors are one batch (N,
            channels, *spatial), several batches, single images (channels, *spatial), or the items
            of a data loader: lists that begin with a batch. They all stay in memory.
        held_out: Images to compare outputs on, in the same forms as `images`. Nothing is fitted to
            them. By default, every fifth image is held out. From a folder, at most 40 are held
            out, and crops of their corners are added if they are larger than the model's images. Of
            fewer than five images, the second one is held out if they are files, and none if they
            are tensors. With an empty list, no image is held out.
        most_images: Maximum number of images to read from a folder, evenly spread over the order of
            their names; 80 by default. An image stays in memory as 8-bit pixels.
        mean, std: Normalisation of a folder's images, whose values are from 0 to 1: a value for
            each channel, or one for all. Required if the model does not state them.
        note: Called with a message for each file that cannot be read.

    Raises:
        DclsConvertError: There are no images, their values are not finite or do not vary, or their
            normalisation is not known.
    """
    check_argument("model", model, nn.Module)
    check_argument("plan", plan, ConversionPlan)
    image_size = _image_size(plan)
    if not isinstance(images, str | Path):
        for name, value in (("mean", mean), ("std", std), ("most_images", most_images)):
            if value is not None:
                raise DclsConvertError(
                    f"calibration: {name} is for a folder of images, "
                    "not for tensors or a Calibration"
                )
    if isinstance(images, Calibration):
        if held_out is not None:
            raise DclsConvertError("calibration: a Calibration states what it holds out itself")
        return images
    image_axes = 3 if image_size is None else len(image_size)
    max_images = CALIBRATION_IMAGES if most_images is None else most_images

    def read(source: Images, *, holds_out: bool) -> Calibration:
        if isinstance(source, str | Path):
            size = check_image_size(image_size)
            normalisation = normalisation_of(model, size[0], mean, std)
            return _read_folder(
                Path(source), size, normalisation, note, max_images=max_images, holds_out=holds_out
            )
        batches = tuple(_given_batches(source, image_axes, image_size))
        _refuse_infinite(batches)
        if holds_out:
            return _with_every_fifth_held_out(batches)
        return Calibration(batches=batches)

    calibration = read(images, holds_out=held_out is None)
    if held_out is not None:
        others = read(held_out, holds_out=False)
        calibration = replace(calibration, held_out=others.batches)
    if not len(calibration):
        raise DclsConvertError(f"calibration: there are no images in {shortened(images)}")
    _refuse_constant(calibration.batches)
    return calibration


def _image_size(plan: ConversionPlan) -> tuple[int, ...] | None:
    """Return the size of the images, if it is known; refuse a network of other inputs."""
    if plan.example_inputs is not None:
        raise DclsConvertError(
            "calibration: images are for a network of one image, and this one takes "
            f"{inputs_text(plan.example_inputs)}; convert it without them"
        )
    return plan.input_size


def _refuse_infinite(batches: Sequence[Tensor]) -> None:
    for batch in batches:
        if not bool(batch.isfinite().all()):
            raise DclsConvertError(
                "calibration: the images have values that are not finite (NaN or infinite)"
            )


def _refuse_constant(batches: Sequence[Tensor]) -> None:
    """Refuse images without any content: kernels that are fitted to them lose everything else."""
    energy = 0.0
    energy_of_variation = 0.0
    for batch in batches:
        channels = batch.float().flatten(2)  # (N, channels, places)
        energy += float(channels.square().sum())
        energy_of_variation += float((channels - channels.mean(2, keepdim=True)).square().sum())
    if energy_of_variation <= MIN_VARIATION**2 * energy:
        raise DclsConvertError(
            "calibration: the images are constant, or nearly so: their values hardly vary from "
            "place to place; check how they are normalised (mean and std)"
        )


def _read_folder(
    folder: Path,
    size: Sequence[int],
    normalisation: Normalisation,
    note: Note,
    *,
    max_images: int,
    holds_out: bool,
) -> Calibration:
    check_images(folder)
    pixels_of_path = read_pixels(folder, size, note, max_images=max_images)
    count = len(pixels_of_path)
    held_out_every = max(HELD_OUT_EVERY, math.ceil(count / MAX_FILES_HELD_OUT))
    first_held_out = held_out_every - 1
    if count < HELD_OUT_EVERY:  # too few for every fifth: hold out the second
        first_held_out = 1
    fitted: list[Tensor] = []
    held_out: list[Tensor] = []
    images_held_out = 0
    for index, (path, pixels) in enumerate(pixels_of_path.items()):
        if not holds_out or index % held_out_every != first_held_out:
            fitted.append(pixels)
            continue
        images_held_out += 1
        held_out.append(pixels)
        for crop in corner_crops(open_image(path, size), size):
            held_out.append(to_pixels(crop, size))
    return Calibration(
        batches=PixelBatches(fitted, normalisation),
        held_out=PixelBatches(held_out, normalisation),
        images_cropped=images_held_out if len(held_out) > images_held_out else 0,
    )


def _with_every_fifth_held_out(batches: Sequence[Tensor]) -> Calibration:
    """Hold out every fifth image of the batches; none if there are fewer than five."""
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


def _given_batches(
    images: Tensor | Iterable[Any], image_axes: int, input_size: Sequence[int] | None
) -> Iterator[Tensor]:
    """Yield batches from one batch, several batches, single images, or the items of a loader."""
    if isinstance(images, Tensor):
        images = [images]
    if not isinstance(images, Iterable) or isinstance(images, Mapping):
        raise _wrong_tensor(images, image_axes)
    for item in images:
        tensor = item
        if isinstance(item, list | tuple):  # a loader's batch, with labels
            tensor = item[0]
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise _wrong_tensor(tensor, image_axes)
        if tensor.dim() not in (image_axes, image_axes + 1):
            raise _wrong_tensor(tensor, image_axes)
        if input_size is not None and _has_channels_last(tensor, image_axes, input_size[0]):
            raise _wrong_tensor(tensor, image_axes, str(input_size[0]))
        batch = tensor
        if tensor.dim() == image_axes:
            batch = tensor.unsqueeze(0)
        if len(batch):
            yield from torch.split(batch, MAX_IN_BATCH)


def _has_channels_last(images: Tensor, image_axes: int, channels: int) -> bool:
    return images.shape[-image_axes] != channels and images.shape[-1] == channels


def _wrong_tensor(found: object, image_axes: int, channels: str = "channels") -> DclsConvertError:
    """Return the error that says what was found instead of images.

    Args:
        channels: The number of channels, if it is known.
    """
    kind = f"a value of type {type(found).__name__}"
    if isinstance(found, Tensor):
        dtype = str(found.dtype).removeprefix("torch.")
        kind = f"a tensor of {tuple(found.shape)}, {dtype}"
    spatial = "rows, columns"
    if image_axes != 3:
        spatial = "*spatial"
    return DclsConvertError(
        f"calibration: found {kind}; give float images (N, {channels}, {spatial}), "
        "normalised as the model takes them"
    )
