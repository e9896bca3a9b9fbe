"""Algebra of many small matrices at once, (N, P, Q): a matrix for each kernel line.

They have one of two layouts in memory: the usual one, or with the lines innermost, which is the
fastest for tiny matrices. All functions take either layout and keep it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 11  # rows that are eliminated together


def lines_innermost(tensor: Tensor) -> Tensor:
    """The same values, in the layout with the lines innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def like(example: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in the example's layout."""
    if _is_innermost(example):
        return lines_innermost(tensor)
    return tensor.contiguous()


def joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """torch.cat, along an axis other than the first."""
    if not _is_innermost(tensors[0]):
        return torch.cat(list(tensors), axis)
    lines_last = [tensor.movedim(0, -1) for tensor in tensors]
    return torch.cat(lines_last, axis - 1).movedim(-1, 0)


def product(one: Tensor, two: Tensor) -> Tensor:
    """The matrix product of each line: (N, P, K), (N, K, Q) -> (N, P, Q)."""
    if not _is_innermost(one):
        return torch.bmm(one, two)
    total = one[:, :, :1] * two[:, :1]
    for index in range(1, one.shape[2]):
        total.addcmul_(one[:, :, index, None], two[:, None, index])
    return total


def last_summed(tensor: Tensor) -> Tensor:
    """The sum over the last axis: (N, ..., K) -> (N, ...)."""
    if not _is_innermost(tensor):
        return tensor.sum(-1)
    total, *others = tensor.unbind(-1)
    for other in others:
        total = total + other
    return total


def solved(matrix: Tensor, right: Tensor) -> Tensor:
    """The x of matrix @ x = right in each line, for positive definite matrices.

    (N, P, P), (N, P, Q) -> (N, P, Q), by Gauss-Jordan elimination over all lines at once; LAPACK
    goes line by line, which is slow for small matrices.
    """
    rows = joined([matrix, right], 2)  # (N, P, P + Q), the augmented matrix
    if _is_innermost(rows):
        _eliminate_(rows)
    else:
        _eliminate_blocks_(rows)
    return rows[:, :, matrix.shape[2] :]


def _eliminate_(rows: Tensor) -> None:
    """Gauss-Jordan elimination, one pivot after the other; columns of the matrix are left as is."""
    for pivot in range(rows.shape[1]):
        column = rows[:, :, pivot]  # (N, P)
        following = rows[:, :, pivot + 1 :]
        pivot_row = following[:, pivot] / column[:, pivot, None]
        following.addcmul_(column.unsqueeze(2), pivot_row.unsqueeze(1), value=-1)
        following[:, pivot] = pivot_row


def _eliminate_blocks_(rows: Tensor) -> None:
    """Gauss-Jordan elimination by blocks of pivots: most of the work is in matrix products."""
    for first in range(0, rows.shape[1], BLOCK):
        block = slice(first, min(first + BLOCK, rows.shape[1]))
        pivots = rows[:, block, block]
        size = pivots.shape[1]
        identity = torch.eye(size, dtype=rows.dtype, device=rows.device).expand_as(pivots)
        augmented = lines_innermost(torch.cat([pivots, identity], 2))
        _eliminate_(augmented)
        inverse = augmented[:, :, size:].contiguous()
        columns = rows[:, :, block]
        following = rows[:, :, first + size :]
        pivot_rows = inverse @ following[:, block]
        following -= columns @ pivot_rows
        following[:, block] = pivot_rows


def _is_innermost(tensor: Tensor) -> bool:
    return tensor.stride(0) == 1
