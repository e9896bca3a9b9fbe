"""Elements for a tie group from its trained dense kernels, for constructed kernels close to them.

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
from .merged_start import merged_neighbours

SETTINGS = FitSettings()  # of every fit


class RootsOfLines(NamedTuple):
    """The matrices by which errors of lines are multiplied."""

    by_channel: Tensor  # (in_channels, S, S)
    channel_of_line: Tensor  # (N,)

    def of(self, line_indices: Tensor) -> Tensor:
        """The roots of these lines: (lines, S, S)."""
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
    """Elements whose constructed kernels have the least squared distance to the old ones.

    The distances are summed over the layers of the group. No layer is farther from its old kernel
    than with the largest cells (`Box.largest`). Positions stay where the old kernel was.

    Args:
        kernels: (O, I, *kernel size) of each layer.
        box: In which the kernels are fitted.
        kernel_count: Elements in each kernel.
        covariance_roots: (in_channels, S, S). With them, an error e of a line counts as
            |e @ root|^2, with the root of the line's input channel; else as |e|^2.
        seed: Seed for the starting positions.

    Returns:
        Weights (O, I, *D, E) of each layer, and the positions (A, O, I, *D, E).
    """
    largest_weights, largest_positions = box.largest(kernels, kernel_count)
    one_for_each_cell = kernel_count >= len(box.old_cell_coordinates())
    exact = one_for_each_cell and find_interpolation(box.interpolation).exact_on_cells
    if exact or kernels[0].is_meta:
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
    """The lines (N, L, S) divided by their scale, and the scale (N, 1, 1).

    Scaled values are of order 1, so that squares neither vanish nor overflow.
    """
    lines = _lines_of(kernels, box)
    scale = lines.abs().amax(dim=(1, 2), keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    return lines / scale, scale


def _number_of_starts(kernel: Tensor, line_count: int, *, to_outputs: bool) -> int:
    """How many starts each line has, of a fit to kernels or to outputs."""
    if not to_outputs:
        return SETTINGS.starts_for_kernels
    if line_count == len(kernel):  # one line for each output channel
        return SETTINGS.starts_for_outputs_depthwise
    return SETTINGS.starts_for_outputs_summed


def _starting_noise(box_positions: Tensor, starts: int, seed: int) -> Tensor:
    """What is added to box positions (N, E, A) for each start: (starts, N, E, A), on the CPU.

    It is drawn for all lines at once, so a seed means the same on every device and for any chunks.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (starts, *box_positions.shape)
    return SETTINGS.jitter * torch.randn(shape, generator=generator, device="cpu")


def _fit(
    lines: Tensor,
    largest_cells: _BoxElements,
    box: Box,
    roots: RootsOfLines | None,
    noise: Tensor,
) -> _BoxElements:
    """The best elements for lines (N, L, S), from several starts beside the largest cells.

    The last start is beside merged cells. `noise` (starts, N, E, A) is added to the starts.
    """
    fitted = _BoxElements(
        torch.empty_like(largest_cells.box_positions), torch.empty_like(largest_cells.weights)
    )
    for chunk in _chunks(largest_cells, box):
        cells = largest_cells.box_positions[chunk]
        bases = [cells] * (len(noise) - 1)
        bases.append(merged_neighbours(lines[chunk], cells, box))
        jitter = noise[:, chunk.to(noise.device)].to(cells)
        starts = [base + jitter[start] for start, base in enumerate(bases)]
        fitted.box_positions[chunk], fitted.weights[chunk] = fit_lines(
            lines[chunk],
            starts,
            box,
            settings=SETTINGS,
            covariance_roots=None if roots is None else roots.of(chunk),
        )
    return fitted


def fit_seed(generator: torch.Generator) -> int:
    """The seed of every fit of a conversion: one for all, so that none depends on the others."""
    return int(torch.randint(2**62, (), generator=generator, device="cpu"))


def relative_errors(
    kernels: Sequence[Tensor],
    weights: Sequence[Tensor],
    positions: Tensor,
    box: Box,
    *,
    covariance_roots: Tensor | None = None,
) -> list[float]:
    """|new - old| / |old| of each layer's kernels; with roots, of the outputs that they give.

    Args:
        kernels: The old ones (O, I, *kernel size) of each layer.
        weights: (O, I, *D, E) of each layer.
        positions: (A, O, I, *D, E), from the window's centre.
        box: In which the kernels are fitted.
        covariance_roots: (in_channels, S, S), as in `fit_elements`.
    """
    lines = _lines_of(kernels, box)
    roots = _roots_of_lines(covariance_roots, kernels[0], len(lines))
    box_positions = box.to_box(positions.to(lines))
    new_weights = _weights_by_line(weights, lines)
    new = _BoxElements(box_positions, new_weights)
    nothing = _BoxElements(box_positions, torch.zeros_like(new_weights))
    errors = _squared_errors(lines, new, box, roots).sum(0).tolist()  # of each layer
    norms = _squared_errors(lines, nothing, box, roots).sum(0).tolist()
    relative = []
    for error, norm in zip(errors, norms, strict=True):
        relative.append(math.sqrt(error / norm) if norm else 0.0)
    return relative


def _lines_of(kernels: Sequence[Tensor], box: Box) -> Tensor:
    """The kernels of all layers in the box, line by line: (N, L, S)."""
    return torch.stack([box.lines_of(kernel) for kernel in kernels], dim=1)


def _weights_by_line(weights: Sequence[Tensor], lines: Tensor) -> Tensor:
    """Each layer's (O, I, *D, E) -> (N, L, E), in the dtype of `lines`."""
    return torch.stack([weight.flatten(0, -2) for weight in weights], dim=1).to(lines)


def _weights_by_layer(weights: Tensor, examples: Sequence[Tensor]) -> list[Tensor]:
    """Weights (N, L, E) -> (O, I, *D, E) of each layer, as the examples are."""
    layers = []
    for of_layer, example in zip(weights.unbind(1), examples, strict=True):
        layers.append(of_layer.reshape(example.shape).to(example))
    return layers


def _roots_of_lines(
    covariance_roots: Tensor | None, kernel: Tensor, line_count: int
) -> RootsOfLines | None:
    """The covariance roots (in_channels, S, S), by the indices of lines."""
    if covariance_roots is None:
        return None
    device = kernel.device
    out_channels, inputs_per_group = kernel.shape[:2]
    groups = len(covariance_roots) // inputs_per_group
    outputs_per_group = out_channels // groups
    group = torch.arange(out_channels, device=device) // outputs_per_group
    input_in_group = torch.arange(inputs_per_group, device=device)
    channels = (group[:, None] * inputs_per_group + input_in_group).flatten()
    # Cells of dense axes are lines of their own, and see the same channel.
    channels = channels.repeat_interleave(line_count // len(channels))  # (N,)
    by_channel = covariance_roots.to(device, torch.promote_types(kernel.dtype, torch.float32))
    return RootsOfLines(by_channel, channels)


def _chunks(elements: _BoxElements, box: Box) -> Sequence[Tensor]:
    """Indices of lines that are fitted together; few enough for the memory."""
    lines, count, axes = elements.box_positions.shape
    layers = elements.weights.shape[1]
    coordinates = count * axes
    cells = math.prod(box.sides)
    # What a step of a line holds: footprints and their slopes, normal equations, residuals, a root;
    # three starts of it are in memory at once.
    floats = 3 * coordinates * cells + 4 * coordinates**2 + 4 * layers * cells + cells**2
    lines_at_once = max(1, FLOATS_AT_ONCE // (3 * floats))
    indices = torch.arange(lines, device=elements.box_positions.device)
    return torch.split(indices, lines_at_once)


def _with_fallback_to_largest(
    lines: Tensor,
    fitted: _BoxElements,
    largest_cells: _BoxElements,
    box: Box,
    roots: RootsOfLines | None,
    scale: Tensor,
) -> _BoxElements:
    """The fit, with the largest cells for some lines, so that no layer as a whole is worse.

    The fit minimises the sum over layers, where a layer of small weights can lose.
    """
    squared_scale = scale.flatten(1).double().square()  # (N, 1)
    fitted_errors = squared_scale * _squared_errors(lines, fitted, box, roots)  # (N, L)
    largest_cells_errors = squared_scale * _squared_errors(lines, largest_cells, box, roots)
    falls_back = ~fitted_errors.isfinite().all(dim=1)  # (N,)
    # In each round, layers that are worse take back all their losing lines, and cannot become worse
    # again. So as many rounds as layers are enough.
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
    lines: Tensor, elements: _BoxElements, box: Box, roots: RootsOfLines | None
) -> Tensor:
    """Squared distance between the constructed kernel and the line: (N, L), in float64."""
    errors = []
    for chunk in _chunks(elements, box):
        constructed = elements.weights[chunk] @ box.footprint(elements.box_positions[chunk])
        error = (lines[chunk] - constructed).double()
        if roots is not None:
            error = error @ roots.of(chunk).double()
        errors.append(error.square().sum(-1))
    return torch.cat(errors)
