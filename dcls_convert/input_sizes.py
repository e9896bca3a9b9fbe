"""The sizes of a network's inputs, as plain values: one tuple, or one for each of several inputs.

A size is that of a tensor without its batch axis: (channels, *spatial) for an image.
"""

import math
from collections.abc import Sequence
from typing import cast

from .errors import PlanError
from .geometry import size_text
from .text import shortened

TensorSize = tuple[int, ...]
# Of the only tensor that forward takes, or of each one that it takes by position.
InputSizes = TensorSize | tuple[TensorSize, ...]
# As a user gives it.
GivenInputSizes = Sequence[int] | Sequence[Sequence[int]]
MAX_AXES = 4  # channels, and three spatial axes


def each_size(input_size: InputSizes) -> tuple[TensorSize, ...]:
    """Return the size of each input: ((3, 64, 64),) for (3, 64, 64)."""
    if all(isinstance(side, int) for side in input_size):
        return (cast(TensorSize, input_size),)
    return cast(tuple[TensorSize, ...], input_size)


def input_size_text(input_size: InputSizes) -> str:
    """Format sizes as the command line takes them: "3x64x64", or "3x64x64,16" for two inputs."""
    return ",".join(size_text(size) or "()" for size in each_size(input_size))


def checked_input_size(given: object) -> InputSizes:
    """Return a user's value as tuples.

    Raises:
        PlanError: It is neither a size nor a sequence of sizes, of positive integers; or none of
            them has channels and a side.
    """
    sizes = given
    if _is_size(given):
        sizes = [given]
    if not isinstance(sizes, Sequence) or not all(map(_is_size, sizes)):
        raise _wrong(given)
    if max(map(len, sizes), default=0) < 2:  # a convolution needs channels and a side
        raise _wrong(given)
    if len(sizes) == 1:
        return tuple(sizes[0])
    return tuple(map(tuple, sizes))


def _is_size(value: object) -> bool:
    if not isinstance(value, Sequence) or len(value) > MAX_AXES:
        return False
    return all(isinstance(side, int) and side >= 1 for side in value)


def _wrong(given: object) -> PlanError:
    return PlanError(
        f"input size {shortened(repr(given), 120)} must be channels and spatial sizes, such as "
        "(3, 224, 224), or one size for each input, such as ((3, 64, 64), (1, 64, 64))"
    )


def sides_of_image(input_size: InputSizes, dims: int) -> TensorSize | None:
    """Return the sides of the first input that has this many, or None if none has."""
    for size in each_size(input_size):
        if len(size) == dims + 1:
            return size[1:]
    return None


def pixel_count(input_size: InputSizes) -> int:
    """Return the pixels or voxels of the largest input."""
    return max(math.prod(size[1:]) for size in each_size(input_size))
