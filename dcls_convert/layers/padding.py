"""Pad an input before and after each axis."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from ..geometry import Pair, padding_with_new_cells


def pad(input: Tensor, padding: Sequence[Pair], new: Sequence[Pair], mode: str) -> Tensor:
    """Add cells before and after the last axes of an input (N, C, *spatial).

    Args:
        input: The input.
        padding, new, mode: As in `geometry.padding_with_new_cells`.
    """
    by_mode, zeros = padding_with_new_cells(padding, new, mode)
    input = F.pad(input, widths_of(by_mode), mode=torch_mode(mode))
    if any(map(any, zeros)):
        input = F.pad(input, widths_of(zeros))
    return input


def widths_of(pairs: Sequence[Pair]) -> list[int]:
    """Return the widths for F.pad: (before, after) of each axis, the last axis first."""
    widths: list[int] = []
    for pair in reversed(pairs):
        widths += pair
    return widths


def torch_mode(padding_mode: str) -> str:
    """Return the name that F.pad has for a convolution's padding mode."""
    return "constant" if padding_mode == "zeros" else padding_mode
