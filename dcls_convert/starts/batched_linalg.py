"""Linear algebra on batches of small matrices (N, P, Q), one matrix for each kernel line.

A batch has one of two memory layouts: the usual one, on which torch's operations work, or one with
the lines innermost, which is faster for tiny matrices. All functions accept either layout and keep
it.

With 3x3 kernels, torch's operations on the usual layout take 3.2 to 4.5 times as long to solve
(`torch.linalg.solve_ex`, Cholesky) as ours with lines innermost, and, depending on the CPU, 0.8 to
2.4 times as long to multiply (`torch.bmm`): benchmarks/batched_algebra.py, on one x86-64 thread.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def lines_innermost(tensor: Tensor) -> Tensor:
    """Copy the tensor to the memory layout with the lines innermost; its shape stays the same."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def in_layout_of(example: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in the memory layout of the example."""
    if _has_lines_innermost(example):
        return lines_innermost(tensor)
    return tensor.contiguous()


def cat(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate tensors along an axis other than the first."""
    if not _has_lines_innermost(tensors[0]):
        return torch.cat(list(tensors), axis)
    lines_last = [tensor.movedim(0, -1) for tensor in tensors]
    return torch.cat(lines_last, axis - 1).movedim(-1, 0)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply the matrices of each line: (N, P, K), (N, K, Q) -> (N, P, Q)."""
    if not _has_lines_innermost(left):
        return torch.bmm(left, right)
    total = left[:, :, :1] * right[:, :1]
    for index in range(1, left.shape[2]):
        total.addcmul_(left[:, :, index, None], right[:, None, index])
    return total


def sum_last(tensor: Tensor) -> Tensor:
    """Sum over the last axis: (N, ..., K) -> (N, ...)."""
    if not _has_lines_innermost(tensor):
        return tensor.sum(-1)
    total, *others = tensor.unbind(-1)
    for other in others:
        total = total + other
    return total


def solve_positive_definite(matrix: Tensor, right_side: Tensor) -> Tensor:
    """Solve matrix @ x = right_side for each line, where the matrices are positive definite.

    (N, P, P), (N, P, Q) -> (N, P, Q). With lines innermost, Gauss-Jordan elimination runs over all
    lines at once; LAPACK works line by line, which is slow for tiny matrices.
    """
    if not _has_lines_innermost(matrix):
        factor, _ = torch.linalg.cholesky_ex(matrix)
        return torch.cholesky_solve(right_side, factor)
    rows = cat([matrix, right_side], 2)  # (N, P, P + Q), the augmented matrix
    _eliminate_(rows)
    return rows[:, :, matrix.shape[2] :]


def _eliminate_(rows: Tensor) -> None:
    """Run Gauss-Jordan elimination, one pivot after the other.

    Column p is not written after pivot p, since nothing reads it any more.
    """
    for pivot in range(rows.shape[1]):
        column = rows[:, :, pivot]  # (N, P)
        following = rows[:, :, pivot + 1 :]
        pivot_row = following[:, pivot] / column[:, pivot, None]
        following.addcmul_(column.unsqueeze(2), pivot_row.unsqueeze(1), value=-1)
        following[:, pivot] = pivot_row


def _has_lines_innermost(tensor: Tensor) -> bool:
    return tensor.stride(0) == 1
