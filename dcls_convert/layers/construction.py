"""Kernel construction: (weight, positions, sigma) to the dense kernel that a convolution takes (arXiv:2112.03740).

Axes: O output channels, I input channels per group, E elements, A learnt axes; `positions[0]` is of the first learnt
axis (the row in 2-D), in cells from the kernel centre, cell `size // 2`.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from .interpolation import find_interpolation, learnt_axes


def construct_kernel(
    weight: Tensor,
    positions: Tensor,
    size: Sequence[int],
    *,
    interpolation: str = "bilinear",
    sigma: Tensor | None = None,
    dense_axes: Sequence[int] = (),
) -> Tensor:
    """The dense kernel of a DCLS layer: every element spread over the cells around its position, overlaps added.

    Args:
        weight: (O, I, E); with dense axes of D cells, (O, I, D, E) and so on.
        positions: (A, *weight.shape), in cells from the kernel centre. Outside the window, the border is taken.
        size: Dilated kernel size, one entry for every spatial axis.
        interpolation: "bilinear" (the paper's eq. 2-4), "triangle" or "gaussian" (versions "max" and "gauss" of the
            authors' package, arXiv:2306.00817), the last two normalised to sum 1 inside the window.
        sigma: As positions, in cells: the triangle's half-width (at least 1), the Gaussian's deviation (at least 0.27).
        dense_axes: Spatial axes that are not learnt but dense: each of their cells has its own E elements (the paper's
            N-MD kernels).

    Returns:
        (O, I, *size) in the dtype of weight; computed in float32 where that is narrower, also under autocast.

    Gradients are the paper's Algorithm 2 everywhere: at integer positions the right-hand derivative, at the upper
    border, and beyond it, the derivative that points inward.

    Raises:
        ValueError: Shapes that do not belong together, an unknown interpolation, sigma missing or superfluous.
    """
    if len(set(dense_axes)) != len(dense_axes) or not set(dense_axes) <= set(range(len(size))):
        raise ValueError(
            f"dense_axes={tuple(dense_axes)} must be different axes from 0 to {len(size) - 1}"
        )
    axes = learnt_axes(len(size), dense_axes)
    order = [*sorted(dense_axes), *axes]
    dense = [size[axis] for axis in sorted(dense_axes)]
    method = find_interpolation(interpolation)
    if method.has_sigma != (sigma is not None):
        raise ValueError(
            f"{interpolation} interpolation {'needs a' if method.has_sigma else 'has no'} sigma"
        )
    if weight.dim() != 3 + len(dense) or list(weight.shape[2:-1]) != dense:
        shape = ", ".join(["out", "in/groups", *map(str, dense), "count"])
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; with size={tuple(size)} it must be ({shape})"
        )
    expected = (len(axes), *weight.shape)
    for name, tensor in (("positions", positions), ("sigma", sigma)):
        if tensor is not None and tensor.shape != expected:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)}; for this weight it must be {expected}"
            )
    # In float32 at least: at 8 cells from the centre, bfloat16 positions are a sixteenth of a cell apart. And without
    # autocast: the matrix products of the construction would run in half precision.
    dtype = torch.promote_types(torch.promote_types(weight.dtype, positions.dtype), torch.float32)
    device = weight.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        spread = None if sigma is None else sigma.to(dtype)
        kernel = method.kernel(
            weight.to(dtype), positions.to(dtype), spread, [size[axis] for axis in axes]
        )
    spatial = [2 + order.index(axis) for axis in range(len(size))]
    return kernel.permute(0, 1, *spatial).to(weight.dtype)  # (O, I, *size)
