"""Fit the elements of a tie group so that constructed kernels are close to trained dense kernels.

Axes as in `boxes.py`: N kernel lines, L layers, E elements, A learnt axes, S cells of the box, K
cells of the old kernel.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.interpolation import find_interpolation
from .boxes import Box
from .fit_positions import fit_lines
from .fit_settings import FLOATS_AT_ONCE, FitSettings

SETTINGS = FitSettings()


class _LineRoots(NamedTuple):
    """Square roots of input covariances; a line's error is multiplied by its channel's root."""

    by_channel: Tensor  # (in_channels, S, S)
    channel_of_line: Tensor  # (N,)

    def for_lines(self, line_indices: Tensor) -> Tensor:
        """Return the roots of these lines: (lines, S, S)."""
        return self.by_channel[self.channel_of_line[line_indices]]


class _BoxElements(NamedTuple):
    """Elements of a tie group, line by line."""

    box_positions: Tensor  # (N, E, A)
    weights: Tensor  # (N, L, E)


def fit_elements(
    kernels: Sequence[Tensor],
    box: Box,
    *,
    kernel_count: int,
    covariance_roots: Tensor | None = None,
    seed: int = 0,
) -> tuple[list[Tensor], Tensor]:
    """Fit elements so that constructed kernels have the least squared distance to the old ones.

    The distances are summed over the layers of the group. No layer is farther from its old kernel
    than with the largest cells (`Box.largest_cells`). Positions stay within the box.

    Args:
        kernels: (O, I, *kernel size) of each layer.
        box: Box within which the kernels are fitted.
        kernel_count: Elements in each kernel.
        covariance_roots: (in_channels, S, S). With them, an error e of a line costs |e @ root|^2,
            with the root of the line's input channel; else |e|^2.
        seed: Seed for the starting positions.

    Returns:
        Weights (O, I, *D, E) of each layer, and the positions (A, O, I, *D, E).
    """
    largest_weights, largest_positions = box.largest_cells(kernels, kernel_count)
    one_for_each_cell = kernel_count >= len(box.old_cell_coordinates())
    is_exact = find_interpolation(box.interpolation).is_exact_on_cells
    nothing_to_gain = one_for_each_cell and is_exact
    if nothing_to_gain or kernels[0].is_meta:
        return largest_weights, largest_positions
    lines, scale = _scaled_lines(kernels, box)
    roots = _roots_of_lines(covariance_roots, kernels[0], len(lines))
    largest_cells = _BoxElements(
        box_positions=box.to_box(largest_positions.to(lines)),
        weights=_weights_by_line(largest_weights, lines) / scale,
    )
    starts = _number_of_starts(kernels[0], len(lines), to_outputs=roots is not None)
    noise = _starting_noise(largest_cells.box_positions, starts, seed)
    fitted = _fit(lines, largest_cells, box, roots, noise)
    best = _with_fallback_to_largest(lines, fitted, largest_cells, box, roots, scale)
    positions = box.from_box(best.box_positions, largest_positions.shape)
    weights = _weights_by_layer(best.weights * scale, largest_weights)
    return weights, positions.to(largest_positions)


def _scaled_lines(kernels: Sequence[Tensor], box: Box) -> tuple[Tensor, Tensor]:
    """Return the lines (N, L, S) divided by their scale, and the scale (N, 1, 1).

    Scaled values are of order 1, so that squares neither vanish nor overflow.
    """
    lines = _lines_of(kernels, box)
    scale = lines.abs().amax(dim=(1, 2), keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    return lines / scale, scale


def _number_of_starts(kernel: Tensor, line_count: int, *, to_outputs: bool) -> int:
    """Return how many starts each line gets in a fit to kernels or to outputs."""
    if not to_outputs:
        return SETTINGS.starts_for_kernels
    if line_count == len(kernel):  # one line for each output channel
        return SETTINGS.starts_for_outputs_depthwise
    return SETTINGS.starts_for_outputs_summed


def _starting_noise(box_positions: Tensor, starts: int, seed: int) -> Tensor:
    """Draw noise for the box positions (N, E, A) of each start: (starts, N, E, A), on the CPU.

    It is drawn for all lines at once, so that a seed gives the same noise on every device, however
    lines are split into chunks.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (starts, *box_positions.shape)
    return SETTINGS.jitter * torch.randn(shape, generator=generator, device="cpu")


def _fit(
    lines: Tensor,
    largest_cells: _BoxElements,
    box: Box,
    roots: _LineRoots | None,
    noise: Tensor,
) -> _BoxElements:
    """Fit elements to lines (N, L, S) from several starts, and return the best of each line.

    Starts are the largest cells plus `noise` (starts, N, E, A).
    """
    fitted = _BoxElements(
        torch.empty_like(largest_cells.box_positions), torch.empty_like(largest_cells.weights)
    )
    for chunk in _chunks(largest_cells, box):
        cells = largest_cells.box_positions[chunk]
        starts = cells + noise[:, chunk.to(noise.device)].to(cells)
        fitted.box_positions[chunk], fitted.weights[chunk] = fit_lines(
            lines[chunk],
            starts,
            box,
            settings=SETTINGS,
            covariance_roots=None if roots is None else roots.for_lines(chunk),
        )
    return fitted


def draw_fit_seed(generator: torch.Generator) -> int:
    """Draw the seed that all fits of a conversion share, so that none depends on the others."""
    return int(torch.randint(2**62, (), generator=generator, device="cpu"))


def relative_errors(
    kernels: Sequence[Tensor],
    weights: Sequence[Tensor],
    positions: Tensor,
    box: Box,
    *,
    covariance_roots: Tensor | None = None,
) -> list[float]:
    """Return |new - old| / |old| of each layer's kernels or, with roots, of their outputs.

    Args:
        kernels: The old kernels (O, I, *kernel size) of each layer.
        weights: (O, I, *D, E) of each layer.
        positions: (A, O, I, *D, E), from the window's centre.
        box: Box within which the kernels are fitted.
        covariance_roots: (in_channels, S, S), as in `fit_elements`.
    """
    lines = _lines_of(kernels, box)
    roots = _roots_of_lines(covariance_roots, kernels[0], len(lines))
    box_positions = box.to_box(positions.to(lines))
    new_weights = _weights_by_line(weights, lines)
    new_elements = _BoxElements(box_positions, new_weights)
    zero_elements = _BoxElements(box_positions, torch.zeros_like(new_weights))
    errors = _squared_errors(lines, new_elements, box, roots).sum(0).tolist()  # of each layer
    norms = _squared_errors(lines, zero_elements, box, roots).sum(0).tolist()
    relative = []
    for error, norm in zip(errors, norms, strict=True):
        relative.append(math.sqrt(error / norm) if norm else 0.0)
    return relative


def _lines_of(kernels: Sequence[Tensor], box: Box) -> Tensor:
    """Put the kernels of all layers into the box, line by line: (N, L, S)."""
    return torch.stack([box.lines_of(kernel) for kernel in kernels], dim=1)


def _weights_by_line(weights: Sequence[Tensor], lines: Tensor) -> Tensor:
    """Stack the weights (O, I, *D, E) of each layer line by line: (N, L, E), typed as `lines`."""
    return torch.stack([weight.flatten(0, -2) for weight in weights], dim=1).to(lines)


def _weights_by_layer(weights: Tensor, examples: Sequence[Tensor]) -> list[Tensor]:
    """Split weights (N, L, E) into each layer's (O, I, *D, E), shaped and typed as the examples."""
    split = []
    for layer_weights, example in zip(weights.unbind(1), examples, strict=True):
        split.append(layer_weights.reshape(example.shape).to(example))
    return split


def _roots_of_lines(
    covariance_roots: Tensor | None, kernel: Tensor, line_count: int
) -> _LineRoots | None:
    """Assign the covariance roots (in_channels, S, S) to lines, by their input channels."""
    if covariance_roots is None:
        return None
    device = kernel.device
    out_channels, inputs_per_group = kernel.shape[:2]
    groups = len(covariance_roots) // inputs_per_group
    outputs_per_group = out_channels // groups
    group = torch.arange(out_channels, device=device) // outputs_per_group
    input_in_group = torch.arange(inputs_per_group, device=device)
    channels = (group[:, None] * inputs_per_group + input_in_group).flatten()
    # Each cell of the dense axes has a line of its own, which sees the same channel.
    channels = channels.repeat_interleave(line_count // len(channels))  # (N,)
    by_channel = covariance_roots.to(device, torch.promote_types(kernel.dtype, torch.float32))
    return _LineRoots(by_channel, channels)


def _chunks(elements: _BoxElements, box: Box) -> Sequence[Tensor]:
    """Split the indices of lines into chunks that are fitted together, to bound memory."""
    lines, count, axes = elements.box_positions.shape
    layers = elements.weights.shape[1]
    coordinates = count * axes
    cells = math.prod(box.sides)
    # Floats in a step of one line: footprints and slopes, normal equations, residuals, a root. They
    # are counted for three starts.
    floats = 3 * coordinates * cells + 4 * coordinates**2 + 4 * layers * cells + cells**2
    lines_at_once = max(1, FLOATS_AT_ONCE // (3 * floats))
    indices = torch.arange(lines, device=elements.box_positions.device)
    return torch.split(indices, lines_at_once)


def _with_fallback_to_largest(
    lines: Tensor,
    fitted: _BoxElements,
    largest_cells: _BoxElements,
    box: Box,
    roots: _LineRoots | None,
    scale: Tensor,
) -> _BoxElements:
    """Replace lines of the fit by the largest cells, so that no layer as a whole gets worse.

    The fit minimises the sum over layers, in which a layer with small weights can lose.
    """
    squared_scale = scale.flatten(1).double().square()  # (N, 1)
    fitted_errors = squared_scale * _squared_errors(lines, fitted, box, roots)  # (N, L)
    largest_cells_errors = squared_scale * _squared_errors(lines, largest_cells, box, roots)
    falls_back = ~fitted_errors.isfinite().all(dim=1)  # (N,)
    # In each round, a layer that is worse as a whole falls back in every line in which it loses.
    # It then loses in no line, and is not worse in any later round: one round per layer is enough.
    for _ in range(lines.shape[1]):
        gain = torch.where(falls_back[:, None], 0.0, largest_cells_errors - fitted_errors)
        worse_layers = gain.sum(0) < 0  # (L,)
        if not worse_layers.any():
            break
        falls_back |= (gain < 0)[:, worse_layers].any(dim=1)
    by_line = falls_back[:, None, None]
    return _BoxElements(
        box_positions=torch.where(by_line, largest_cells.box_positions, fitted.box_positions),
        weights=torch.where(by_line, largest_cells.weights, fitted.weights),
    )


def _squared_errors(
    lines: Tensor, elements: _BoxElements, box: Box, roots: _LineRoots | None
) -> Tensor:
    """Return the squared distances between constructed kernels and lines: (N, L), in float64."""
    errors = []
    for chunk in _chunks(elements, box):
        constructed = elements.weights[chunk] @ box.footprint(elements.box_positions[chunk])
        error = (lines[chunk] - constructed).double()
        if roots is not None:
            error = error @ roots.for_lines(chunk).double()
        errors.append(error.square().sum(-1))
    return torch.cat(errors)
