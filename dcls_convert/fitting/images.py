"""The images of a calibration: of a folder or as tensors, and some of them held out.

Sizes are (channels, rows, columns).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, shown
from ..files import check_images
from ..planning.plan import ConversionPlan
from ..progress import Notify, silent
from .image_files import (
    corners,
    normalisation_of,
    open_image,
    read_images,
    size_of_files,
    to_tensor,
)

# One image in so many is held out: not fitted to, it shows what the conversion did
# to the outputs.
HELD_OUT_EVERY = 5
BATCH = 8  # images
NOISE_CORRELATION = 0.1  # of neighbouring pixels; photographs have 0.8 and more

# A folder; or tensors as the model takes them: one batch (N, channels, *spatial), several batches,
# or single images (channels, *spatial).
Images = str | Path | Tensor | Iterable[Tensor]


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
    size = size_of_files(plan.input_size)
    normalisation = normalisation_of(model, size[0], mean, std)
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
        for crop in corners(open_image(path, size), size):
            held_out.append(to_tensor(crop, normalisation, size))
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
