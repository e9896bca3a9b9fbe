"""Linear algebra of many small matrices at once, (N, P, Q): a matrix for each kernel line.

They have one of two layouts in memory: the usual one, for which torch has the operations, or with
the lines innermost, for tiny matrices. All functions take either layout and keep it.

With 3x3 kernels, torch's operations on the usual layout take 3.2 to 4.5 times as long to solve
(`torch.linalg.solve_ex`, Cholesky) as ours with lines innermost, and 1.9 to 2.4 times as long to
multiply (`torch.bmm`): benchmarks/batched_algebra.py, on one thread of an x86-64 CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def lines_innermost(tensor: Tensor) -> Tensor:
    """The same values, in the layout with the lines innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def in_layout_of(example: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in the example's layout."""
    if _is_innermost(example):
        return lines_innermost(tensor)
    return tensor.contiguous()


def cat(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """torch.cat, along an axis other than the first."""
    if not _is_innermost(tensors[0]):
        return torch.cat(list(tensors), axis)
    lines_last = [tensor.movedim(0, -1) for tensor in tensors]
    return torch.cat(lines_last, axis - 1).movedim(-1, 0)


def matmul(one: Tensor, two: Tensor) -> Tensor:
    """The matrix product of each line: (N, P, K), (N, K, Q) -> (N, P, Q)."""
    if not _is_innermost(one):
        return torch.bmm(one, two)
    total = one[:, :, :1] * two[:, :1]
    for index in range(1, one.shape[2]):
        total.addcmul_(one[:, :, index, None], two[:, None, index])
    return total


def sum_last(tensor: Tensor) -> Tensor:
    """The sum over the last axis: (N, ..., K) -> (N, ...)."""
    if not _is_innermost(tensor):
        return tensor.sum(-1)
    total, *others = tensor.unbind(-1)
    for other in others:
        total = total + other
    return total


def solve_positive_definite(matrix: Tensor, right: Tensor) -> Tensor:
    """The x of matrix @ x = right in each line, for positive definite matrices.

    (N, P, P), (N, P, Q) -> (N, P, Q). With lines innermost, by Gauss-Jordan elimination over all
    lines at once; LAPACK goes line by line, which is slow for tiny matrices.
    """
    if not _is_innermost(matrix):
        factor, _ = torch.linalg.cholesky_ex(matrix)
        return torch.cholesky_solve(right, factor)
    rows = cat([matrix, right], 2)  # (N, P, P + Q), the augmented matrix
    _eliminate_(rows)
    return rows[:, :, matrix.shape[2] :]


def _eliminate_(rows: Tensor) -> None:
    """Gauss-Jordan elimination, one pivot after the other; columns of the matrix are left as is."""
    for pivot in range(rows.shape[1]):
        column = rows[:, :, pivot]  # (N, P)
        following = rows[:, :, pivot + 1 :]
        pivot_row = following[:, pivot] / column[:, pivot, None]
        following.addcmul_(column.unsqueeze(2), pivot_row.unsqueeze(1), value=-1)
        following[:, pivot] = pivot_row


def _is_innermost(tensor: Tensor) -> bool:
    return tensor.stride(0) == 1
