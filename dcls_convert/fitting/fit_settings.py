"""The constants of a warm start and of counts by error, with their units and sources."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSettings:
    """The constants of `warm_start.py` and `fit_positions.py`, chosen by benchmarks/fit_time.py.

    A fit minimises the errors of kernels or, in a calibration, those of outputs; it then has
    covariance roots.
    """

    # Where fits start. One start is beside merged cells, the others are beside the largest cells.
    starts_for_kernels: int = 4
    starts_for_outputs_depthwise: int = 6  # where an output channel has one line
    # Where an output channel sums several lines. Solving for their weights together makes up for
    # most of what more starts would gain.
    starts_for_outputs_summed: int = 2
    jitter: float = 0.3  # cells; at a cell's middle the cost has a kink, which a step models badly

    # The ridge is this share of the energy of an element in the middle of a cell. It bounds the
    # weights of elements that nearly coincide.
    ridge: float = 1e-3

    # How long fits last. After each round, only fits whose cost still falls are refined further.
    steps_per_round: int = 8
    min_gain: float = 1e-2  # how much a round must lower a fit's cost, as a share of the cost
    # Rounds of the last fit, with those that dropped the other starts. Dropping starts is never cut
    # short: 6 starts take 3 rounds.
    rounds: int = 6
    rounds_for_outputs: int = 2  # fewer, since the calibration solves for the weights again

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
    """The constants of `counts.py` and `allocation.py`, which choose kernel counts by error."""

    max_units: int = 1 << 21  # most units of a budget; a larger one is counted in coarser units
    first_counts: int = 6  # counts at which a group's error is measured before the first choice
    measure_all: int = 9  # a group with at most so many possible counts is measured at all of them
    max_channel_pairs: int = 128  # of channels on which a group's error is measured, about


# Sizes of blocks. They change no result but for the order of sums.
FLOATS_AT_ONCE = 60_000_000  # memory for the lines that are fitted together
FLOATS_IN_CACHE = 1_000_000  # matrices of the fits that a CPU works on at once
# Rows of a line's matrices up to which lines are innermost in memory. A product of larger matrices
# is worth a call of its own.
MAX_ROWS_INNERMOST = 24
