"""Compare the speed of our algebra of many small matrices with torch's.

    python benchmarks/batched_algebra.py [--threads N]

The script solves and multiplies as `starts/fit_positions.py` does, on shapes that occur in fits.
Both ways are timed in turn, in one process; the numbers are minima. `innermost` says whether lines
are innermost in memory in this fit.
"""

import torch
from measuring import fastest_in_turn, script_parser
from torch import Tensor

from dcls_convert.starts.batched_linalg import (
    lines_innermost,
    matmul,
    solve_positive_definite,
)

ROUNDS = 30
# Kernel lines N, elements E, cells S, and whether lines are innermost in memory.
SHAPES = {
    "ResNet-18, 3x3 to 7x7": (3571, 5, 9, True),
    "EfficientNet-Lite0, 3x3, for outputs": (1500, 5, 9, True),
    "EfficientNet-Lite0, 5x5, for outputs": (560, 12, 25, False),
    "ConvNeXt-T, 7x7 to 17x17": (88, 34, 49, False),
}


def by_torch(matrix: Tensor, right: Tensor) -> Tensor:
    factor, _ = torch.linalg.cholesky_ex(matrix)
    return torch.cholesky_solve(right, factor)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    for name, (lines, elements, cells, innermost) in SHAPES.items():
        footprint = torch.rand(lines, elements, cells)
        matrix = footprint @ footprint.mT + torch.eye(elements)
        slopes = torch.rand(lines, 2 * elements, cells)
        ours = [matrix, footprint, slopes]
        if innermost:
            ours = [lines_innermost(tensor) for tensor in ours]
        our_matrix, our_footprint, our_slopes = ours
        solve_ours, solve_lu, solve_cholesky = fastest_in_turn(
            [
                lambda a=our_matrix, b=our_footprint: solve_positive_definite(a, b),
                lambda a=matrix, b=footprint: torch.linalg.solve_ex(a, b),
                lambda a=matrix, b=footprint: by_torch(a, b),
            ],
            ROUNDS,
        )
        multiply_ours, multiply_torch = fastest_in_turn(
            [
                lambda a=our_slopes, b=our_footprint: matmul(a, b.mT),
                lambda a=slopes, b=footprint: torch.bmm(a, b.mT),
            ],
            ROUNDS,
        )
        print(f"{name}: {lines} lines, {elements} elements, {cells} cells, innermost {innermost}")
        print(f"    solve: ours {1000 * solve_ours:.2f} ms; times as long:", end=" ")
        print(f"solve_ex {solve_lu / solve_ours:.1f}, Cholesky {solve_cholesky / solve_ours:.1f}")
        print(f"    product: ours {1000 * multiply_ours:.2f} ms; times as long:", end=" ")
        print(f"bmm {multiply_torch / multiply_ours:.1f}")


if __name__ == "__main__":
    main()
