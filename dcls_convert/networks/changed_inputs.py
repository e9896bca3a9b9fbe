"""The inputs and outputs of a measurement: small inputs, one changed cell, outputs by image."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .input_tensors import Inputs, pixel_count, with_batch
from .sides import MIN_CELLS

PLACES = (0.3, 0.5, 0.7)  # of the changed cells, one in each image of a batch
LARGE_IMAGE = 128 * 128  # pixels; of larger images, smaller ones are tried first
USUAL_STRIDE = 32  # of a network


def inputs_to_try(inputs: Inputs) -> Iterator[Inputs]:
    """Yield a batch of smaller images, or of the inputs if they are small; then the inputs."""
    dims = max(len(tensor.shape[2:]) for tensor in inputs)
    factor = 1
    while pixel_count(inputs) > LARGE_IMAGE * factor**dims and dims > 0:
        factor *= 2
    smaller = []
    for tensor in inputs:
        sides = [_smaller_side(side, factor) for side in tensor.shape[2:]]
        smaller.append(replace(tensor, shape=(*tensor.shape[:2], *sides)))
    yield with_batch(tuple(smaller), len(PLACES))
    yield inputs


def _smaller_side(side: int, factor: int) -> int:
    """Return a side that is smaller by about this factor, and can be halved as often as usual."""
    if factor == 1:
        return side
    return max(1, side // factor // USUAL_STRIDE) * min(side, USUAL_STRIDE)


def spatial_axes(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the axes on which an input may have an order.

    The second axis has channels or, as in (N, time, channels), an order of its own.
    """
    if tensor.dim() < 2:
        return []
    axes: list[tuple[int, ...]] = [(1,)]
    if tensor.dim() > 2:
        axes.append(tuple(range(2, tensor.dim())))
    return [some for some in axes if max(tensor.shape[axis] for axis in some) >= MIN_CELLS]


def with_changed_cells(tensor: Tensor, axes: Sequence[int]) -> tuple[list[list[int]], list[Tensor]]:
    """Change one cell of each image; return the cells, and the changed batches.

    There are several batches if one has fewer images than there are places.
    """
    cells = []
    batches = []
    for first in range(1 if len(tensor) >= len(PLACES) else len(PLACES)):
        changed = tensor.clone()
        for number, image in enumerate(changed):
            place = PLACES[(first + number) % len(PLACES)]
            cell = [int(place * tensor.shape[axis]) for axis in axes]
            index: list[Any] = [slice(None)] * image.dim()
            for axis, position in zip(axes, cell, strict=True):
                index[axis - 1] = position
            image[tuple(index)] = _other_values(image[tuple(index)], tensor)
            cells.append(cell)
        batches.append(changed)
    return cells, batches


def _other_values(values: Tensor, tensor: Tensor) -> Tensor:
    """Return values of the same range as those of a tensor, but others."""
    if tensor.dtype == torch.bool:
        return ~values
    if not tensor.is_floating_point() and not tensor.is_complex():
        least = int(tensor.amin())
        most = int(tensor.amax())
        count = most - least + 1
        return (least + (values.long() - least + 1 + (most - least) // 2) % count).to(values)
    return -values - values.sgn()


def comparable(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the outputs as real numbers, without those that torch cannot compare."""
    found = []
    for tensor in outputs:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            continue
        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        elif not tensor.is_floating_point():
            tensor = tensor.double()
        elif tensor.itemsize == 1:
            tensor = tensor.float()
        found.append(tensor)
    return found


def by_image(outputs: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Return outputs with an entry for each image, (N, ...), whatever the order of their axes.

    Images may be on the second axis, or on the first one together with time. Outputs of several
    times may be several tensors.
    """
    found = []
    for tensor in outputs:
        if tensor.dim() > 1 and len(tensor) != batch == tensor.shape[1]:
            tensor = tensor.transpose(0, 1)
        elif tensor.dim() and len(tensor) > batch and len(tensor) % batch == 0:
            tensor = tensor.reshape(batch, -1, *tensor.shape[1:])
        if tensor.dim() and len(tensor) == batch:
            found.append(tensor)
    if len(found) >= MIN_CELLS and len({tensor.shape for tensor in found}) == 1:
        return [torch.stack(found, 1)]
    return found
