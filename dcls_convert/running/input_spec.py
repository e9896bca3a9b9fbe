"""Description of the tensors that a network's forward takes, as plain values: shapes and dtypes."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from ..errors import PlanError
from ..geometry import plain_numbers, size_text
from ..text import shortened

FLOAT32 = "float32"
FLOATS = ("float16", "bfloat16", FLOAT32, "float64")
OTHER_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "complex64", "complex128")
MAX_INTEGER = 2**63 - 2  # largest random integer of torch
LARGE_IMAGE = 128 * 128  # pixels; `smaller_inputs` halves the sides of larger images
USUAL_STRIDE = 32  # input cells per output cell of most networks
AXES_OF_IMAGE = range(2, 5)  # channels, and one to three spatial axes


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor that forward takes, described well enough to make random tensors like it."""

    name: str | None = None  # name of the keyword argument; None if passed by position
    shape: tuple[int, ...]  # with the batch axis, if there is one
    dtype: str = FLOAT32  # as torch names it
    # Smallest and largest value of the user's example; None for normal floats, bits, and complex
    # numbers.
    range: tuple[int, int] | tuple[float, float] | None = None


InputSpec = tuple[TensorSpec, ...]  # all tensors that forward takes


def image_inputs(input_size: Sequence[int]) -> InputSpec:
    """Return the inputs of a network that takes images (channels, *spatial)."""
    return (TensorSpec(shape=(1, *input_size)),)


def one_image(inputs: InputSpec, dims: Container[int]) -> InputSpec:
    """Return inputs for one image, if `inputs` are a batch of images with so many sides.

    The dtype is float32: when the model runs, images get the model's own dtype.
    """
    if not _are_images(inputs, dims):
        return inputs
    return (replace(inputs[0], shape=(1, *inputs[0].shape[1:]), dtype=FLOAT32),)


def as_image_size(inputs: InputSpec | None, dims: Container[int]) -> tuple[int, ...] | None:
    """Return (channels, *spatial) if the only input is one image with so many sides."""
    if inputs is None or not _are_images(inputs, dims) or inputs[0].shape[0] != 1:
        return None
    return inputs[0].shape[1:]


def _are_images(inputs: InputSpec, dims: Container[int]) -> bool:
    """True if the only input is a batch of images, by position."""
    tensor = inputs[0]
    is_image = tensor.name is None and tensor.dtype in FLOATS and len(tensor.shape) - 2 in dims
    return len(inputs) == 1 and is_image


def in_unit_range(inputs: InputSpec) -> InputSpec:
    """Return the inputs, where floats without a stated range get the range from 0 to 1."""
    found = []
    for tensor in inputs:
        if tensor.dtype in FLOATS and tensor.range is None:
            tensor = replace(tensor, range=(0.0, 1.0))
        found.append(tensor)
    return tuple(found)


def checked_input_size(given: object) -> tuple[int, ...]:
    """Return the image size that a user gave as a tuple.

    Raises:
        PlanError: The size is not a sequence of channels and spatial sizes, all positive integers.
    """
    size = plain_numbers(given)
    if isinstance(size, Sequence) and len(size) in AXES_OF_IMAGE:
        if all(isinstance(side, int) and side >= 1 for side in size):
            return tuple(size)
    raise PlanError(
        f"input size {shortened(repr(given), 120)} must be channels and spatial sizes, such as "
        "(3, 224, 224); for any other input, give example_inputs in Python"
    )


def check_inputs(inputs: InputSpec) -> None:
    """Raise PlanError for descriptions from which no inputs can be made."""
    names = [tensor.name for tensor in inputs if tensor.name is not None]
    if not inputs or len(set(names)) < len(names):
        raise PlanError("example inputs: there are none, or two of one name")
    for tensor in inputs:
        where = f"example inputs: {shortened(inputs_text((tensor,)))}"
        if tensor.dtype not in FLOATS + OTHER_DTYPES:
            raise PlanError(f"{where}: this dtype is not supported")
        if min(tensor.shape, default=1) < 1:
            raise PlanError(f"{where}: is empty")
        least, most = tensor.range or (0, 1)
        if not -MAX_INTEGER <= least <= most <= MAX_INTEGER:
            raise PlanError(f"{where}: impossible range {shortened(str(tensor.range))}")


def inputs_text(inputs: InputSpec) -> str:
    """Format inputs for messages: "x 1x3x16x16, ids 1x9 int64"."""
    texts = []
    for tensor in inputs:
        text = f"{tensor.name or ''} {size_text(tensor.shape) or '()'}"
        if tensor.dtype != FLOAT32:
            text += f" {tensor.dtype}"
        texts.append(text.lstrip())
    return ", ".join(texts)


def have_batch_axis(inputs: InputSpec) -> bool:
    """True if the first axes of all inputs have the same length."""
    first_axes = {tensor.shape[:1] for tensor in inputs}
    return len(first_axes) == 1 and () not in first_axes


def with_batch(inputs: InputSpec, batch: int) -> InputSpec:
    """Return the inputs for another batch size; without a batch axis, the inputs as they are."""
    if not have_batch_axis(inputs):
        return inputs
    return tuple(replace(tensor, shape=(batch, *tensor.shape[1:])) for tensor in inputs)


def sides_of_image(inputs: InputSpec, dims: int) -> tuple[int, ...] | None:
    """Return the sides of the first input that has `dims` sides, or None if no input has."""
    for tensor in inputs:
        if len(tensor.shape) == dims + 2:
            return tensor.shape[2:]
    return None


def pixel_count(inputs: InputSpec) -> int:
    """Return the number of pixels or voxels of the largest input (of elements, if no image)."""
    return max(math.prod(tensor.shape[2:] or tensor.shape) for tensor in inputs)


def smaller_inputs(inputs: InputSpec) -> InputSpec:
    """Return the inputs, with the sides of large images reduced."""
    dims = max(len(tensor.shape[2:]) for tensor in inputs)
    factor = 1
    while pixel_count(inputs) > LARGE_IMAGE * factor**dims and dims > 0:
        factor *= 2
    smaller = []
    for tensor in inputs:
        sides = [_smaller_side(side, factor) for side in tensor.shape[2:]]
        smaller.append(replace(tensor, shape=(*tensor.shape[:2], *sides)))
    return tuple(smaller)


def _smaller_side(side: int, factor: int) -> int:
    """Return a side that is smaller by about this factor, and a multiple of the usual stride."""
    if factor == 1:
        return side
    return max(1, side // factor // USUAL_STRIDE) * min(side, USUAL_STRIDE)
