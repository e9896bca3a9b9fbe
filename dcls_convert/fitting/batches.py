"""Algebra of many small matrices at once, (N, P, Q): a matrix for each line.

Lines innermost in memory are the fastest for tiny matrices. All functions take and keep either
layout.
"""

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 11  # rows that are eliminated together


def lines_innermost(tensor: Tensor) -> Tensor:
    """The same values, with the lines innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def like(example: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in the example's layout."""
    return lines_innermost(tensor) if _is_innermost(example) else tensor.contiguous()


def joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """torch.cat, along an axis other than the first."""
    if not _is_innermost(tensors[0]):
        return torch.cat(list(tensors), axis)
    return torch.cat([tensor.movedim(0, -1) for tensor in tensors], axis - 1).movedim(-1, 0)


def product(one: Tensor, two: Tensor) -> Tensor:
    """(N, P, K), (N, K, Q) -> (N, P, Q)."""
    if not _is_innermost(one):
        return torch.bmm(one, two)
    total = one[:, :, :1] * two[:, :1]
    for index in range(1, one.shape[2]):
        total.addcmul_(one[:, :, index, None], two[:, None, index])
    return total


def last_summed(tensor: Tensor) -> Tensor:
    """(N, ..., K) -> (N, ...)."""
    return (
        functools.reduce(operator.add, tensor.unbind(-1))
        if _is_innermost(tensor)
        else tensor.sum(-1)
    )


def solved(matrix: Tensor, right: Tensor) -> Tensor:
    """Positive definite (N, P, P), (N, P, Q) -> (N, P, Q), by Gauss-Jordan elimination: LAPACK goes
    line by line."""
    rows = joined([matrix, right], 2)
    (_eliminate_ if _is_innermost(rows) else _eliminate_blocks_)(rows)
    return rows[:, :, matrix.shape[2] :]


def _eliminate_(rows: Tensor) -> None:
    for pivot in range(rows.shape[1]):
        ahead, factors = rows[:, :, pivot + 1 :], rows[:, :, pivot]
        known = ahead[:, pivot] / factors[:, pivot, None]
        ahead.addcmul_(factors.unsqueeze(2), known.unsqueeze(1), value=-1)
        ahead[:, pivot] = known


def _eliminate_blocks_(rows: Tensor) -> None:
    for first in range(0, rows.shape[1], BLOCK):
        block = slice(first, min(first + BLOCK, rows.shape[1]))
        corner = rows[:, block, block]
        unit = torch.eye(corner.shape[1], dtype=rows.dtype, device=rows.device).expand_as(corner)
        within = lines_innermost(torch.cat([corner, unit], 2))
        _eliminate_(within)
        inverse = within[:, :, corner.shape[1] :].contiguous()
        ahead, factors = rows[:, :, first + corner.shape[1] :], rows[:, :, block]
        known = inverse @ ahead[:, block]
        ahead -= factors @ known
        ahead[:, block] = known


def _is_innermost(tensor: Tensor) -> bool:
    return tensor.stride(0) == 1
