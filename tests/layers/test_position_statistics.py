"""Statistics of positions equal those computed by plain loops."""

import math

import pytest

from dcls_convert.layers import position_statistics
from dcls_convert.layers.position_statistics import (
    border_share,
    mean_distance,
    overlap_share,
    rms_per_axis,
)

from .common import randn


def slow_overlap(kernels):
    """Return the share of overlapping elements; `kernels` has the coordinates of each element."""
    overlaps = []
    for kernel in kernels:
        for index, element in enumerate(kernel):
            others = kernel[:index] + kernel[index + 1 :]
            overlaps.append(any(math.dist(element, other) < 0.5 for other in others))
    return sum(overlaps) / len(overlaps)


def slow_border(elements, size, grow=("both",) * 3):
    def at_border(place, side, grow):
        first = grow != "ahead" and place <= 0.5 - side // 2
        last = grow != "back" and place >= (side - 1) // 2 - 0.5
        return side > 1 and (first or last)

    return sum(any(map(at_border, element, size, grow)) for element in elements) / len(elements)


@pytest.mark.parametrize(
    "shape", [(1, 4, 1, 6), (2, 3, 2, 5), (2, 9, 1, 1), (3, 2, 2, 4), (2, 3, 1, 4, 7)]
)
# On a grid of half cells, neighbours are exactly that far apart, and some elements coincide.
@pytest.mark.parametrize("on_grid", [False, True])
def test_statistics_equal_those_of_plain_loops(shape, on_grid, monkeypatch):
    positions = 2 * randn(*shape)
    positions = (2 * positions).round() / 2 if on_grid else positions
    size = (5, 8, 1)[: shape[0]]
    kernels = positions.reshape(shape[0], -1, shape[-1]).permute(1, 2, 0).tolist()
    elements = [element for kernel in kernels for element in kernel]
    for max_distances in (1, 7, 40, 1 << 22):
        monkeypatch.setattr(position_statistics, "MAX_DISTANCES", max_distances)
        assert overlap_share(positions) == slow_overlap(kernels)
    assert border_share(positions, size) == slow_border(elements, size)
    grow = ("back", "ahead", "both")[: shape[0]]
    assert border_share(positions, size, grow) == slow_border(elements, size, grow)
    squares = [sum(place**2 for place in axis) / len(axis) for axis in zip(*elements, strict=True)]
    assert rms_per_axis(positions) == pytest.approx([math.sqrt(square) for square in squares])
    assert mean_distance(positions) == pytest.approx(
        sum(map(math.hypot, *zip(*elements, strict=True))) / len(elements)
    )
