"""Construct the dense kernel of a convolution from weight, positions and sigma.

Source: arXiv:2112.03740.

Axes: O output channels, I input channels per group, E elements, A learnt axes. `positions[0]` is
along the first learnt axis (the row in 2-D), in cells from the kernel centre, which is cell
`size // 2`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..geometry import along_learnt_axes
from .bilinear import bilinear_kernel
from .interpolation import Interpolation, find_interpolation
from .profiles import cells_of, construct_by_profiles


def construct_kernel(
    weight: Tensor,
    positions: Tensor,
    size: Sequence[int],
    *,
    interpolation: str = "bilinear",
    sigma: Tensor | None = None,
    dense_axes: Sequence[int] = (),
) -> Tensor:
    """Construct the dense kernel of a DCLS layer.

    Every element is spread over the cells around its position, and overlapping elements add up.

    Args:
        weight: (O, I, E); with dense axes of D cells, (O, I, D, E) and so on.
        positions: (A, *weight.shape), in cells from the kernel centre. A position outside the
            window counts as the nearest one at its border.
        size: Dilated kernel size, one entry for every spatial axis.
        interpolation: One of `options.INTERPOLATION_NAMES`. "bilinear" is the paper's eq. 2-4.
            Elements of interpolations with a sigma (arXiv:2306.00817) are normalised to sum to 1
            inside the window.
        sigma: Shaped like positions, in cells; only for interpolations with a sigma. Values below
            the interpolation's `min_sigma` count as `min_sigma`. Sigma is the half-width of the
            triangle, and the standard deviation of the Gaussian.
        dense_axes: Spatial axes that are dense, not learnt: each of their cells has its own E
            elements (the paper's N-MD kernels).

    Returns:
        (O, I, *size) in the dtype of weight. A narrower dtype than float32 is computed in float32,
        also under autocast.

    Gradients of positions follow the paper's Algorithm 2. Where the derivative jumps, as at integer
    positions of bilinear elements, the gradient is the right-hand derivative. At the upper border
    and beyond it, the gradient is the derivative that points inward.

    Raises:
        ValueError: Shapes do not fit together, the interpolation is unknown, or sigma is missing or
            superfluous.
    """
    properties = find_interpolation(interpolation)
    if properties.has_sigma != (sigma is not None):
        need = "needs a" if properties.has_sigma else "has no"
        raise ValueError(f"{interpolation} interpolation {need} sigma")
    dense = [size[axis] for axis in sorted(dense_axes)]
    shape = (*weight.shape[:2], *dense, weight.shape[-1])
    shape_of_positions = (len(size) - len(dense), *shape)
    for name, tensor, expected in (
        ("weight", weight, shape),
        ("positions", positions, shape_of_positions),
        ("sigma", sigma, shape_of_positions),
    ):
        if tensor is not None and tensor.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; for size={tuple(size)} and "
                f"dense_axes={tuple(dense_axes)} it must be {expected}"
            )
    learnt_size = along_learnt_axes(size, dense_axes)
    return construct_unchecked(weight, positions, sigma, learnt_size, dense_axes, properties)


def construct_unchecked(
    weight: Tensor,
    positions: Tensor,
    sigma: Tensor | None,
    learnt_size: tuple[int, ...],
    dense_axes: Sequence[int],
    interpolation: Interpolation,
) -> Tensor:
    """Construct kernels as `construct_kernel` does, without checking arguments.

    `learnt_size` is the size along the learnt axes.
    """
    device = weight.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        # Autocast would run the matrix products in half precision.
        with torch.autocast(device, enabled=False):
            return construct_unchecked(
                weight, positions, sigma, learnt_size, dense_axes, interpolation
            )
    # Compute in float32 at least: at 8 cells from the centre, neighbouring bfloat16 numbers are a
    # sixteenth of a cell apart.
    dtype = torch.promote_types(weight.dtype, positions.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    exact_weight = weight.to(dtype)
    exact_positions = positions.to(dtype)
    if interpolation.name == "bilinear":
        kernel = bilinear_kernel(exact_weight, exact_positions, learnt_size)
    else:
        cells = cells_of(exact_positions, learnt_size)
        if sigma is not None:
            sigma = sigma.to(dtype)
        kernel = construct_by_profiles(exact_weight, cells, sigma, learnt_size, interpolation)
    # The dense axes come first; move them to their places.
    places = sorted(dense_axes)
    first_axes = list(range(len(places)))
    if places != first_axes:
        kernel = kernel.movedim([2 + axis for axis in first_axes], [2 + axis for axis in places])
    return kernel.to(weight.dtype)  # (O, I, *size)
