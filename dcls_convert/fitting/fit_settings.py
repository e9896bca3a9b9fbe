"""The constants of a warm start and of counts by error, with their units and sources."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSettings:
    """Of `warm_start.py` and `least_squares.py`; chosen by benchmarks/fit_time.py unless stated.

    "With roots" means a fit to outputs, as a calibration does; otherwise kernels are fitted.
    """

    # Where fits start. One start is beside merged cells, the others are beside the largest cells.
    starts: int = 4
    starts_alone: int = 6  # with roots, where an output channel has one line
    # With roots, where an output channel sums several lines: solving for their weights together
    # makes up for most of what more starts would gain.
    starts_together: int = 2
    jitter: float = 0.3  # cells; at a cell's middle the cost has a kink, which a step models badly

    # Share of the energy of an element in the middle of a cell; bounds the weights of elements that
    # nearly coincide.
    ridge: float = 1e-3

    # How long fits last. After each look, only lines whose cost still falls are refined further.
    steps_between_looks: int = 8
    min_gain: float = 1e-2  # share of a line's cost, between two looks
    max_looks: int = 6
    max_looks_with_roots: int = 2  # calibration solves for the weights again

    # Levenberg-Marquardt: the damping is a factor on the diagonal of the curvature.
    longest_step: float = 0.5  # cells; the footprint changes its form from cell to cell
    initial_damping: float = 0.1
    damping_after_gain: float = 1 / 3  # factor
    damping_after_failure: float = 4.0  # factor
    min_damping: float = 1e-6
    max_damping: float = 1e6
    # The exact minimum of the quadratic model is no better, since the model is not exact.
    conjugate_gradient_steps: int = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class CountSettings:
    """Of `counts.py`: how exactly kernel counts are chosen by error."""

    max_units: int = 1 << 21  # of a budget; a larger one is counted in coarser units
    first_counts: int = 6  # counts at which a group's error is measured before the first choice
    measure_all: int = 9  # a group with at most so many possible counts is measured at all of them
    max_lines: int = 128  # kernel lines by which the error of a group is measured, about


# Sizes of blocks. They change no result but for the order of sums.
FLOATS_AT_ONCE = 60_000_000  # of memory, for the lines that are fitted together
FLOATS_IN_CACHE = 1_000_000  # of matrices, for the lines that a CPU works on at once
# Rows of a line's matrices up to which lines are innermost in memory. A product of larger matrices
# is worth a call of its own.
MAX_ROWS_INNERMOST = 24
