"""Check on a device that depthwise convolutions by matrix products are accurate."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ..depthwise.choice import VARIABLE, Preference, fastest_conv2d
from ..networks.running import full_precision
from .gpu_report import GpuRow, failure_text

# Sizes of the accuracy check.
ACCURACY_WINDOW = 17
ACCURACY_IMAGES = 2
# (channels, side of the map). The last one exceeds matmul.MAX_BYTES in every dtype, so its channels
# are processed in parts.
ACCURACY_MAPS = ((8, 7), (8, 13), (8, 16), (1600, 28))
# Largest allowed relative error, in Frobenius norms; every dtype holds the inputs exactly. The
# limits of bfloat16 and float16 are about five times the error of rounding the result. That of
# float32 is exceeded if TF32 or a lower precision is used.
MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def accuracy_rows(device: torch.device) -> Iterator[GpuRow]:
    """Measure the largest error of matrix products for each map and dtype."""
    for channels, side in ACCURACY_MAPS:
        for dtype, max_error in MAX_ERROR.items():
            error = None
            problem = None
            try:
                with full_precision(), forced_algorithm("matmul"):
                    error = largest_error(channels, side, dtype, device)
            except Exception as failure:  # finding failures of libraries is what this is for
                problem = failure_text(failure)
            if error is not None and not error <= max_error:  # also true for NaN
                problem = f"wrong: {error:.1e}, where {max_error:g} is allowed"
                error = None
            yield GpuRow(
                part="proof",
                what=f"{channels} channels of {side}x{side}, {_name(dtype)}",
                way="matmul",
                batch=ACCURACY_IMAGES,
                error=error,
                problem=problem,
            )


def largest_error(channels: int, side: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest relative error of a depthwise convolution and its gradients.

    The device's results are compared with float64 on the CPU, in Frobenius norms. The inputs are
    rounded to bfloat16, so they are the same in every dtype.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (ACCURACY_IMAGES, channels, side, side),
        (channels, 1, ACCURACY_WINDOW, ACCURACY_WINDOW),
        (ACCURACY_IMAGES, channels, side, side),
    )
    inputs = []
    for shape in shapes:
        inputs.append(torch.randn(shape, generator=generator).bfloat16().double())
    padding = ACCURACY_WINDOW // 2
    maps, kernel, grad = (tensor.to(dtype).to(device) for tensor in inputs)
    output = fastest_conv2d(
        maps.requires_grad_(),
        kernel.requires_grad_(),
        None,
        (1, 1),
        (padding,) * 2,
        (1, 1),
        channels,
    )
    results = [output, *torch.autograd.grad(output, (maps, kernel), grad)]
    maps, kernel, grad = inputs
    output = F.conv2d(
        maps.requires_grad_(), kernel.requires_grad_(), padding=padding, groups=channels
    )
    expected = [output, *torch.autograd.grad(output, (maps, kernel), grad)]
    errors = []
    for result, reference in zip(results, expected, strict=True):
        errors.append((result.detach().cpu().double() - reference).norm() / reference.norm())
    return torch.stack(errors).max().item()  # NaN if any error is NaN


@contextlib.contextmanager
def forced_algorithm(algorithm: Preference) -> Iterator[None]:
    """Make depthwise layers use this algorithm inside the block.

    They read the environment variable in every forward pass.
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = algorithm
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
