"""Elements for a tie group from its trained dense kernels, so that the constructed kernels are
close to them.

Axes as in `boxes`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.interpolation import find_interpolation
from .boxes import Box
from .least_squares import fit_lines

STARTS = 4  # the last one beside merged cells, the others beside the largest ones
# With roots, for outputs. Where an output channel sums several lines, solving for their weights
# together makes up for
# most of what more starts would gain.
STARTS_ALONE, STARTS_TOGETHER = 6, 2
JITTER = 0.3  # cells; at a cell's middle the cost has a kink, where a step models it badly
FLOATS_AT_ONCE = 60_000_000  # of memory for the lines that are fitted together

Metric = Callable[
    [Tensor], Tensor
]  # indices of lines -> (lines, S, S), by which their errors are multiplied


def fit_elements(
    kernels: Sequence[Tensor],
    box: Box,
    *,
    kernel_count: int,
    roots: Tensor | None = None,
    seed: int = 0,
) -> tuple[list[Tensor], Tensor]:
    """Elements whose constructed kernels have the least squared distance to the old ones, summed
    over the group.

    Arguments and result as of `largest_elements`, than which no layer is farther. Positions stay
    where the old kernel was. With roots (in_channels, S, S), an error e of a line that sees that
    channel counts as the squares of e @ root.
    """
    largest, grid = box.largest(kernels, kernel_count)
    exact = (
        kernel_count >= len(box.cells()) and find_interpolation(box.interpolation).exact_on_cells
    )
    if exact or kernels[0].is_meta:
        return largest, grid
    lines = torch.stack([box.lines_of(kernel) for kernel in kernels], dim=1)  # (N, L, S)
    scale = lines.abs().amax(dim=(1, 2), keepdim=True)
    scale = torch.where(
        scale > 0, scale, 1.0
    )  # of each line, so that squares neither vanish nor overflow
    lines = lines / scale
    metric = _metric(roots, kernels[0], len(lines))
    fallback = _Elements(box.places_of(grid.to(lines)), _stacked(largest, lines) / scale)
    fitted = _Elements(*map(torch.empty_like, fallback))
    # Drawn on the CPU and for all lines, so that a seed means the same on every device, however
    # lines are split.
    generator = torch.Generator().manual_seed(seed)
    starts = (
        STARTS
        if roots is None
        else STARTS_ALONE
        if len(lines) == len(kernels[0])
        else STARTS_TOGETHER
    )
    noise = JITTER * torch.randn(starts, *fallback.places.shape, generator=generator, device="cpu")
    for chunk in _chunks(fallback, box):
        cells = fallback.places[chunk]
        bases = [cells] * (starts - 1) + [_merged_neighbours(lines[chunk], cells, box)]
        beside = noise[:, chunk.to(noise.device)].to(cells)
        first = [base + moved for base, moved in zip(bases, beside, strict=True)]
        seen = None if metric is None else metric(chunk)
        fitted.places[chunk], fitted.weights[chunk] = fit_lines(
            lines[chunk], first, box, roots=seen
        )
    best = _no_layer_worse(lines, fitted, fallback, box, metric, scale)
    positions = (
        (best.places + lines.new_tensor(box.origin)).movedim(-1, 0).reshape(grid.shape).to(grid)
    )
    weights = [
        weight.reshape(old.shape).to(old)
        for weight, old in zip((best.weights * scale).unbind(1), largest, strict=True)
    ]
    return weights, positions


def fit_seed(generator: torch.Generator) -> int:
    """The seed of every fit of a conversion: one for all, so that none depends on the others."""
    return int(torch.randint(2**62, (), generator=generator, device="cpu"))


def relative_errors(
    kernels: Sequence[Tensor],
    weights: Sequence[Tensor],
    positions: Tensor,
    box: Box,
    *,
    roots: Tensor | None = None,
) -> list[float]:
    """|new - old| / |old| of each layer's kernels, or with `roots` of what they give; arguments as
    `fit_elements`."""
    lines = torch.stack([box.lines_of(kernel) for kernel in kernels], dim=1)  # (N, L, S)
    metric = _metric(roots, kernels[0], len(lines))
    places, ours = box.places_of(positions.to(lines)), _stacked(weights, lines)
    left, whole = (
        _errors(lines, _Elements(places, part), box, metric).sum(0)
        for part in (ours, torch.zeros_like(ours))
    )
    return [
        math.sqrt(part / of) if of else 0.0
        for part, of in zip(left.tolist(), whole.tolist(), strict=True)
    ]


def _stacked(
    weights: Sequence[Tensor], lines: Tensor
) -> Tensor:  # each layer's (O, I, *D, E) -> (N, L, E)
    return torch.stack([weight.flatten(0, -2) for weight in weights], dim=1).to(lines)


class _Elements(NamedTuple):
    places: Tensor  # (N, E, A), in cells of the box
    weights: Tensor  # (N, L, E)


def _metric(roots: Tensor | None, kernel: Tensor, lines: int) -> Metric | None:
    if roots is None:
        return None
    out_channels, per_group = kernel.shape[:2]
    groups = len(roots) // per_group
    group = torch.arange(out_channels, device=kernel.device) // (out_channels // groups)
    channels = (
        group[:, None] * per_group + torch.arange(per_group, device=kernel.device)
    ).flatten()
    # Cells of dense axes are lines of their own, and see the same channel.
    channels = channels.repeat_interleave(lines // len(channels))
    roots = roots.to(kernel.device, torch.promote_types(kernel.dtype, torch.float32))
    return lambda chosen: roots[channels[chosen]]


def _chunks(elements: _Elements, box: Box) -> Sequence[Tensor]:
    """Indices of lines that are fitted together."""
    (lines, count, axes), layers = elements.places.shape, elements.weights.shape[1]
    moving, cells = count * axes, math.prod(box.sides)
    floats = 3 * moving * cells + 4 * moving**2 + 4 * layers * cells + cells**2
    indices = torch.arange(lines, device=elements.places.device)
    return torch.split(indices, max(1, FLOATS_AT_ONCE // (3 * floats)))


def _merged_neighbours(lines: Tensor, grid: Tensor, box: Box) -> Tensor:
    """(N, E, A): cells that go together cheaply are one element between them, greedily, until as
    many are left.

    Two neighbours, with weights u and v over the layers, are one element as far as the matrix (u,
    v) has rank one; the smaller singular value is lost. The grid as it is where cells are not
    neighbours, or elements suffice.
    """
    cells, count = box.cells().to(lines.device), grid.shape[1]  # (K, A)
    apart = (cells[:, None] - cells[None]).abs()
    pairs = ((apart.sum(-1) == 1) & (apart.amax(-1) == 1)).triu().nonzero()  # (P, 2)
    surplus = len(cells) - count
    if not len(pairs) or surplus <= 0:
        return grid
    values = lines[..., box.flat_cells().to(lines.device)]  # (N, L, K)
    one, two = values[..., pairs[:, 0]], values[..., pairs[:, 1]]
    first, second, both = one.square().sum(1), two.square().sum(1), (one * two).sum(1)  # (N, P)
    lost = (first + second) / 2 - (((first - second) / 2).square() + both.square()).sqrt()
    lost = torch.where(both > 0, lost, torch.minimum(first, second))
    angle = 0.5 * torch.atan2(2 * both, first - second)
    share = angle.sin().abs() / (angle.sin().abs() + angle.cos().abs())  # of the second cell
    share = torch.where(both > 0, share, (second > first).to(share))
    free = values.new_ones(values.shape[0], len(cells), dtype=torch.bool)
    merged = values.new_zeros(values.shape[0], len(pairs), dtype=torch.bool)
    rows, left = (
        torch.arange(len(lines), device=lines.device),
        torch.full((len(lines),), surplus, device=lines.device),
    )
    for pair in lost.argsort(dim=1, stable=True).T:
        ends = pairs[pair]  # (N, 2)
        takes = free[rows, ends[:, 0]] & free[rows, ends[:, 1]] & (left > 0)
        free[rows, ends[:, 0]] &= ~takes
        free[rows, ends[:, 1]] &= ~takes
        merged[rows, pair] |= takes
        left = left - takes.to(left)
    between = cells[pairs[:, 0]] + share.unsqueeze(-1) * (
        cells[pairs[:, 1]] - cells[pairs[:, 0]]
    )  # (N, P, A)
    singles = torch.where(
        free, values.square().sum(1), -1.0
    )  # (N, K): the largest of the rest stay
    rank = torch.cat([torch.where(merged, torch.inf, -1.0), singles], dim=1)
    candidates = torch.cat([between, cells.to(between).expand(len(lines), -1, -1)], dim=1)
    chosen = rank.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
    return candidates.gather(1, chosen.unsqueeze(-1).expand(-1, -1, candidates.shape[-1]))


def _no_layer_worse(
    lines: Tensor,
    fitted: _Elements,
    fallback: _Elements,
    box: Box,
    metric: Metric | None,
    scale: Tensor,
) -> _Elements:
    """The fit, with the fallback for some lines, so that no layer as a whole is worse: one of small
    weights can be."""
    worth = scale.flatten(1).double().square()  # (N, 1)
    errors, others = (
        worth * _errors(lines, elements, box, metric) for elements in (fitted, fallback)
    )  # (N, L)
    leave = ~errors.isfinite().all(dim=1)
    for _ in range(lines.shape[1]):
        gain = torch.where(leave[:, None], 0.0, others - errors)
        worse = gain.sum(0) < 0  # (L,)
        if not worse.any():
            break
        leave |= (gain < 0)[:, worse].any(dim=1)
    return _Elements(
        *(torch.where(leave[:, None, None], *pair) for pair in zip(fallback, fitted, strict=True))
    )


def _errors(lines: Tensor, elements: _Elements, box: Box, metric: Metric | None) -> Tensor:
    """(N, L): squared distances, in float64."""
    parts = []
    for chunk in _chunks(elements, box):
        error = (
            lines[chunk] - elements.weights[chunk] @ box.footprint(elements.places[chunk])
        ).double()
        if metric is not None:
            error = error @ metric(chunk).double()
        parts.append(error.square().sum(-1))
    return torch.cat(parts)
