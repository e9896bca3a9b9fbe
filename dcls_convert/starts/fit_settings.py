"""Constants of warm starts and of kernel counts by error, with their units and sources."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSettings:
    """Constants of `warm_start.py` and `fit_positions.py`.

    They were chosen by the time and the kernel errors of ConvNeXt-T, window 17, and ResNet-50,
    window 7, with initial weights: such kernels have no structure and are the hardest to fit.

    A fit minimises errors of kernels, or errors of outputs if it is given covariance roots (in a
    calibration).
    """

    # Number of starts of each line, near its largest cells.
    starts_for_kernels: int = 6
    starts_for_outputs_depthwise: int = 9  # if an output channel has one line
    # If an output channel sums several lines. Solving for their weights together makes up for most
    # of what more starts would gain.
    starts_for_outputs_summed: int = 2
    # Standard deviation of the noise on starts, in cells. In the middle of a cell, the cost has a
    # kink, which a step models badly.
    jitter: float = 0.3

    # The ridge, as a share of the energy of an element in the middle of a cell. It bounds the
    # weights of elements that nearly coincide.
    ridge: float = 1e-3

    # Length of fits. After each round, only fits whose cost still falls are refined further.
    steps_per_round: int = 8
    min_gain: float = 1e-2  # a fit ends with a round that lowers its cost by less than this share
    # Rounds of the best start, including those in which the other starts are dropped. All other
    # starts are dropped even if that takes more rounds: 9 starts take 4 rounds.
    rounds: int = 6
    rounds_for_outputs: int = 2  # fewer, since the calibration solves for the weights again

    # Levenberg-Marquardt: the damping is a factor on the diagonal of the curvature.
    longest_step: float = 0.5  # cells; the footprint changes its form from cell to cell
    initial_damping: float = 0.1
    damping_after_gain: float = 1 / 3  # factor
    damping_after_failure: float = 4.0  # factor
    min_damping: float = 1e-6
    max_damping: float = 1e6
    # Going on to the exact minimum of the quadratic model is no better, since the model is not
    # exact.
    conjugate_gradient_steps: int = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class CountSettings:
    """Constants of `counts.py` and `allocation.py`, which choose kernel counts by error."""

    max_units: int = 1 << 21  # most units in a budget; a larger budget is counted in coarser units
    first_counts: int = 6  # counts at which a group's error is measured before the first choice
    # A group with at most this many possible counts is measured at all of them.
    measure_all: int = 9
    max_channel_pairs: int = 128  # approximate number of channel pairs to measure an error on


# Block sizes. They change results only by the order of summation.
FLOATS_AT_ONCE = 60_000_000  # memory for the lines that are fitted together
FLOATS_IN_CACHE = 1_000_000  # memory for the matrices of the fits that a CPU works on at once
# Lines are innermost in memory if a line's matrices have at most this many rows. Larger matrices
# are worth a separate product each.
MAX_ROWS_INNERMOST = 24
