"""Fit the elements of a tie group so that constructed kernels are close to trained dense kernels.

Axes: O output channels, I input channels per group, D cells of the dense axes, N = O * I * D kernel
lines (see `layers/elements.py`), L layers, E elements, A learnt axes, S cells of the box in which
kernels are fitted (see `boxes.py`).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .boxes import Box
from .positions import LineRoots, fit_lines, squared_errors


def fit_elements(
    kernels: Sequence[Tensor],
    box: Box,
    *,
    kernel_count: int,
    cost_roots: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Fit elements so that constructed kernels have the least squared distance to the old ones.

    The distances are summed over the layers of the group. For each kernel line, the result is at
    least as close as the largest cells (`Box.largest_cells`). Positions stay within the box.

    Args:
        kernels: (O, I, *kernel size) of each layer.
        box: Box within which the kernels are fitted.
        kernel_count: Elements in each kernel.
        cost_roots: (in_channels, S, S). With them, an error e of a line costs |e @ root|^2,
            with the root of the line's input channel; else |e|^2.

    Returns:
        Weights (O, I, *D, E) of each layer, and the positions (A, O, I, *D, E).
    """
    largest_weights, largest_positions = box.largest_cells(kernels, kernel_count)
    one_for_each_cell = kernel_count >= math.prod(box.kernel_size)
    nothing_to_gain = one_for_each_cell and box.interpolation.is_exact_on_cells
    if nothing_to_gain or kernels[0].is_meta:
        return largest_weights, largest_positions
    lines = lines_of(kernels, box)
    # Scaled values are of order 1, so that squares neither vanish nor overflow.
    scale = lines.abs().amax(dim=(1, 2), keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    lines = lines / scale
    roots = roots_of_lines(cost_roots, kernels[0], len(lines))
    positions, weights = fit_lines(lines, kernel_count, box, roots)
    by_line = [weight.flatten(0, -2) for weight in largest_weights]
    cells_weights = torch.stack(by_line, dim=1).to(lines) / scale
    cells_positions = box.to_box(largest_positions.to(lines))
    errors = squared_errors(lines, positions, weights, box, roots).sum(1)
    cells_errors = squared_errors(lines, cells_positions, cells_weights, box, roots).sum(1)
    is_better = (errors <= cells_errors)[:, None, None]
    positions = torch.where(is_better, positions, cells_positions)
    weights = torch.where(is_better, weights, cells_weights) * scale
    split = []
    for layer_weights, example in zip(weights.unbind(1), largest_weights, strict=True):
        split.append(layer_weights.reshape(example.shape).to(example))
    return split, box.from_box(positions, largest_positions.shape).to(largest_positions)


def lines_of(kernels: Sequence[Tensor], box: Box) -> Tensor:
    """Put the kernels (O, I, *kernel size) of all layers into the box, line by line: (N, L, S)."""
    return torch.stack([box.lines_of(kernel) for kernel in kernels], dim=1)


def roots_of_lines(cost_roots: Tensor | None, kernel: Tensor, line_count: int) -> LineRoots | None:
    """Assign the covariance roots (in_channels, S, S) to lines, by their input channels."""
    if cost_roots is None:
        return None
    device = kernel.device
    out_channels, inputs_per_group = kernel.shape[:2]
    groups = len(cost_roots) // inputs_per_group
    outputs_per_group = out_channels // groups
    group = torch.arange(out_channels, device=device) // outputs_per_group
    input_in_group = torch.arange(inputs_per_group, device=device)
    channels = (group[:, None] * inputs_per_group + input_in_group).flatten()
    # Each cell of the dense axes has a line of its own, which sees the same channel.
    channels = channels.repeat_interleave(line_count // len(channels))  # (N,)
    by_channel = cost_roots.to(device, torch.promote_types(kernel.dtype, torch.float32))
    return LineRoots(by_channel, channels)
