"""Starting positions for a fit: cells of the old kernel, with some neighbouring cells merged.

Axes: N kernel lines, L layers, S cells of the box, K cells of the old kernel, P pairs of
neighbours, E elements, A axes.
"""

import torch
from torch import Tensor

from .boxes import Box


def merged_neighbours(lines: Tensor, largest_positions: Tensor, box: Box) -> Tensor:
    """Return box positions to start from, with one element for two cells where that loses little.

    Pairs of neighbouring cells are merged greedily, those with the least loss first, until there is
    an element for each merged pair and each single cell. If pairs run out before that, the smallest
    single cells get no element. If no cells are neighbours, or there is an element for each
    cell, the positions of the largest cells are returned as they are.

    Args:
        lines: (N, L, S).
        largest_positions: Box positions (N, E, A) of the largest cells.
        box: Box within which the kernels are fitted.

    Returns:
        (N, E, A).
    """
    cells = box.old_cell_coordinates().to(lines.device)  # (K, A)
    count = largest_positions.shape[1]
    surplus = len(cells) - count
    pairs = _neighbours(cells)  # (P, 2)
    if not len(pairs) or surplus <= 0:
        return largest_positions
    values = lines[..., box.old_cell_indices().to(lines.device)]  # (N, L, K)
    loss, share = _merging_losses(values[..., pairs[:, 0]], values[..., pairs[:, 1]])
    merged, single = _merge_greedily(loss, pairs, len(cells), surplus)
    first_cells = cells[pairs[:, 0]]
    second_cells = cells[pairs[:, 1]]
    between = first_cells + share.unsqueeze(-1) * (second_cells - first_cells)  # (N, P, A)
    # Choose all merged pairs, then the largest of the single cells.
    energy = torch.where(single, values.square().sum(1), -1.0)  # (N, K)
    priority = torch.cat([torch.where(merged, torch.inf, -1.0), energy], dim=1)  # (N, P + K)
    candidates = torch.cat([between, cells.to(between).expand(len(lines), -1, -1)], dim=1)
    order = priority.argsort(dim=1, descending=True, stable=True)
    chosen = order[:, :count].sort(dim=1).values
    index = chosen.unsqueeze(-1).expand(-1, -1, candidates.shape[-1])
    return candidates.gather(1, index)


def _neighbours(cells: Tensor) -> Tensor:
    """Return the indices (P, 2) of the cells that are one step apart along one axis."""
    distance = (cells[:, None] - cells[None]).abs()  # (K, K, A)
    adjacent = distance.sum(-1) == 1
    return adjacent.triu().nonzero()


def _merging_losses(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss when a pair of cells becomes one element, and the second cell's share of it.

    Both are (N, P). Let u and v be the weights of the two cells over the layers: (N, L, P) each.
    One element can replace both as far as the matrix (u, v) has rank one: the smaller singular
    value is lost, and the vector of the larger one gives the shares. If u'v <= 0, the smaller cell
    is lost.
    """
    uu = first.square().sum(1)  # (N, P), like all tensors below
    vv = second.square().sum(1)
    uv = (first * second).sum(1)
    smaller_eigenvalue = (uu + vv) / 2 - (((uu - vv) / 2).square() + uv.square()).sqrt()
    loss = torch.where(uv > 0, smaller_eigenvalue, torch.minimum(uu, vv))
    angle = 0.5 * torch.atan2(2 * uv, uu - vv)  # of the larger singular value's vector
    share = angle.sin().abs() / (angle.sin().abs() + angle.cos().abs())
    share = torch.where(uv > 0, share, (vv > uu).to(share))
    return loss, share


def _merge_greedily(loss: Tensor, pairs: Tensor, cells: int, surplus: int) -> tuple[Tensor, Tensor]:
    """Merge up to `surplus` pairs in each line, least loss first; no cell is merged twice.

    Returns which pairs are merged (N, P), and which cells are in no merged pair (N, K).
    """
    lines = torch.arange(len(loss), device=loss.device)
    single = loss.new_ones(len(loss), cells, dtype=torch.bool)
    merged = torch.zeros_like(loss, dtype=torch.bool)
    merges_left = torch.full((len(loss),), surplus, device=loss.device)
    for pair in loss.argsort(dim=1, stable=True).T:  # (N,): the next pair of each line
        first = pairs[pair, 0]
        second = pairs[pair, 1]
        can_merge = single[lines, first] & single[lines, second] & (merges_left > 0)  # (N,)
        single[lines, first] &= ~can_merge
        single[lines, second] &= ~can_merge
        merged[lines, pair] |= can_merge
        merges_left = merges_left - can_merge.to(merges_left)
    return merged, single
