"""Evaluate the runs of a comparison: differences of accuracy, their intervals, and a sentence.

Each arm is compared with the original network, in differences paired by seed. An arm's interval has
two independent parts, Student's t intervals over the seeds and over the test images; their half
widths are added in quadrature. Claims about several arms are corrected by Holm's method (1979, "A
simple sequentially rejective multiple test procedure"). benchmarks/verdicts.py simulates how often
claims are false, and how often true differences are found.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import optimize, special

from .arms import ORIGINAL_LABEL
from .trainer import Run

MIN_SEEDS = 3  # fewest seeds for a statement about a difference
# Percentage points. An interval that contains 0 and reaches farther is too wide for an answer.
MAX_INCONCLUSIVE = 2.0
# Nominal chance that a comparison claims a difference where there is none, at its first look. Later
# looks add to it: LEVEL x (1 + 1/4 + 1/9 + ...), in total less than 8.3 %.
LEVEL = 0.05
POWER = 0.8  # chance of finding a difference of the size that is called detectable
MIN_P_VALUE = 1e-9  # smaller ones are reported as this value

FloatArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean and its 95 % confidence interval, in percentage points."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference between the accuracies of two networks, in percentage points.

    Half widths are of confidence intervals for the mean; a level of 0.05 means 95 % confidence.
    """

    by_seed: FloatArray  # (seeds,)
    by_image: FloatArray  # (images,); mean over the seeds

    @property
    def mean(self) -> float:
        return float(self.by_seed.mean())

    def half_width_over_seeds(self, level: float) -> float:
        """Return the half width of the t interval over seeds."""
        return _half_width(self.by_seed, level)

    def half_width_over_images(self, level: float) -> float:
        """Return the half width of the t interval over test images, or a lower bound if larger.

        If hardly any image differs, the t interval is too narrow, and the bound is larger. It is
        -ln(level) / n for n images: if this share of all possible images differed, the chance that
        none of n images differs would be the level. At the level 0.05, this is the rule of three
        (Hanley and Lippman-Hand 1983).
        """
        lower_bound = -100 * math.log(level) / len(self.by_image)
        return max(_half_width(self.by_image, level), lower_bound)

    def half_width(self, level: float) -> float:
        """Return the half width over seeds and images, added in quadrature."""
        return math.hypot(self.half_width_over_seeds(level), self.half_width_over_images(level))

    def p_value(self) -> float:
        """Return the level at which the interval over seeds and images just reaches 0."""
        distance = abs(self.mean)
        if self.half_width(MIN_P_VALUE) <= distance:
            return MIN_P_VALUE
        p_value = optimize.brentq(lambda level: self.half_width(level) - distance, MIN_P_VALUE, 1)
        return float(p_value)

    def detectable(self, level: float) -> float:
        """Return the true difference that would be found at this level with a chance of `POWER`."""
        # A true difference is missed if the measured one is too far below it. This one tail must
        # have a chance of 1 - POWER. A half width has half of its level in each tail.
        return self.half_width(level) + self.half_width(2 * (1 - POWER))


def _half_width(values: FloatArray, level: float) -> float:
    """Return the half width of Student's t interval for the mean of at least two values."""
    quantile = float(special.stdtrit(len(values) - 1, 1 - level / 2))
    return quantile * float(values.std(ddof=1)) / math.sqrt(len(values))


def summarize_difference(differences: FloatArray) -> Difference:
    """Summarize the difference between two networks.

    Args:
        differences: (seeds, images): 1 if only this network is correct, -1 if only the original
            is, else 0.
    """
    return Difference(
        by_seed=100 * differences.mean(axis=1), by_image=100 * differences.mean(axis=0)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The numbers of tests for which the level of a claim is corrected."""

    conversions: int = 1  # conversions in this call; all are compared with the same original
    # Finished comparisons in the folder, including this one, each with a different number of seeds.
    looks: int = 1

    @property
    def level(self) -> float:
        """The level for all conversions together, at this look.

        Every look has its own level, and the levels add up. The level of the n-th look is LEVEL /
        n squared, so that the sum over all looks is less than 1.65 times the level of the first.
        """
        return LEVEL / self.looks**2

    @property
    def level_of_each(self) -> float:
        """The level of one conversion that is valid whatever the others show (Bonferroni)."""
        return self.level / self.conversions


def holm(p_values: Mapping[str, float], tests: int) -> dict[str, float]:
    """Correct p-values for several tests by Holm's method.

    Args:
        p_values: Name of each test -> its p-value.
        tests: Number of all tests, including those that have no p-value yet.
    """
    corrected = {}
    largest_so_far = 0.0
    ascending = sorted(p_values.items(), key=lambda item: item[1])
    for rank, (name, p_value) in enumerate(ascending):
        largest_so_far = max(largest_so_far, (tests - rank) * p_value)
        corrected[name] = min(1.0, largest_so_far)
    return corrected


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """The results of one arm, over its finished runs."""

    label: str
    seeds: tuple[int, ...]  # of the finished runs
    params: int
    macs: int | None  # for one image; None if they could not be counted
    step_ms: float  # median over the runs
    images_per_second: float  # in training; median over the runs
    peak_mib: float | None  # peak GPU memory in training; maximum over the runs; None on a CPU
    top1: float  # mean over the runs, in percent
    top1_deviation: float | None  # standard deviation over the runs; None for one run
    # Before training: mean over the runs, in percent. None if no run recorded it.
    top1_before: float | None = None
    # The following fields, up to `slower`, compare the arm with the original, paired by seed. The
    # original itself, and an arm that has no seed in common with it, have the defaults.
    differences: tuple[float, ...] = ()  # percentage points, for each seed that both have
    over_seeds: Interval | None = None  # by Student's t; also None for one seed
    over_images: Interval | None = None  # over the test images, by Student's t
    # The next four are also None if there are fewer than MIN_SEEDS seeds.
    half_width: float | None = None  # of the 95 % interval over seeds and test images together
    p_value: float | None = None  # of this arm alone
    p_corrected: float | None = None  # corrected for the number of conversions and of looks
    # True difference, in points, that would be found with a chance of POWER.
    detectable: float | None = None
    # Step time as a multiple of the original's; also None if they were trained on other devices.
    slower: float | None = None
    # How far positions moved: means over the runs; None without DCLS layers.
    distance: float | None = None  # cells; mean over the elements
    outside: float | None = None  # share of elements that are outside the old kernel in the end
    sentence: str | None = None  # None if the arm is not compared with the original


def compare_arms(runs: Sequence[Run], correction: Correction) -> tuple[ArmResult, ...]:
    """Return the result of each arm, in the order of the runs."""
    by_arm: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm.label, {})[run.seed] = run
    original = by_arm.get(ORIGINAL_LABEL, {})
    differences = {}
    for label, arm_runs in by_arm.items():
        difference = _paired_difference(arm_runs, original)
        if label != ORIGINAL_LABEL and difference is not None:
            differences[label] = difference
    p_corrected = _corrected_p_values(differences, correction)
    results = []
    for label, arm_runs in by_arm.items():
        result = _own_result(label, list(arm_runs.values()))
        if label in differences:
            result = _with_difference(
                result,
                differences[label],
                correction,
                p_corrected=p_corrected.get(label),
                time_ratio=_time_ratio(arm_runs, original),
            )
        results.append(result)
    return tuple(results)


def _corrected_p_values(
    differences: Mapping[str, Difference], correction: Correction
) -> dict[str, float]:
    """Return corrected p-values by label, for arms with enough seeds; significant up to `LEVEL`."""
    p_values = {}
    for label, difference in differences.items():
        if len(difference.by_seed) >= MIN_SEEDS:
            p_values[label] = difference.p_value()
    corrected = {}
    for label, p_value in holm(p_values, correction.conversions).items():
        corrected[label] = min(1.0, p_value * LEVEL / correction.level)
    return corrected


def _paired_difference(runs: Mapping[int, Run], original: Mapping[int, Run]) -> Difference | None:
    """Return the difference of an arm from the original; None if they have no seed in common."""
    differences = []  # for each pair of runs: (images,), -1, 0 or 1
    for seed, run in runs.items():
        if seed in original:
            differences.append(run.correct() - original[seed].correct())
    if not differences:
        return None
    return summarize_difference(np.stack(differences))


def _own_result(label: str, runs: Sequence[Run]) -> ArmResult:
    """Return an arm's result without its difference from the original."""
    top1 = [run.top1[-1] for run in runs]
    top1_deviation = None
    if len(top1) > 1:
        top1_deviation = statistics.stdev(top1)
    distances = []
    outside = []
    peaks = []
    for run in runs:
        if run.moved is not None:
            distances.append(run.moved.distance)
            outside.append(run.moved.outside)
        if run.peak_mib is not None:
            peaks.append(run.peak_mib)
    return ArmResult(
        label=label,
        seeds=tuple(run.seed for run in runs),
        params=runs[0].params,
        macs=runs[0].macs,
        step_ms=_median_step_ms(runs),
        images_per_second=statistics.median(run.images_per_second for run in runs),
        peak_mib=max(peaks, default=None),
        top1=statistics.mean(top1),
        top1_before=_mean([run.top1_before for run in runs if run.top1_before is not None]),
        top1_deviation=top1_deviation,
        distance=_mean(distances),
        outside=_mean(outside),
    )


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return statistics.mean(values)


def _median_step_ms(runs: Iterable[Run]) -> float:
    return statistics.median(run.step_ms for run in runs)


def _with_difference(
    result: ArmResult,
    difference: Difference,
    correction: Correction,
    *,
    p_corrected: float | None,
    time_ratio: float | None,
) -> ArmResult:
    """Return an arm's result with its difference from the original filled in.

    `p_corrected` is None if there are too few seeds for an answer.
    """
    over_seeds = None
    if len(difference.by_seed) > 1:
        over_seeds = _interval(difference.mean, difference.half_width_over_seeds(LEVEL))
    text = sentence(difference, p_corrected, correction, time_ratio)
    result = replace(
        result,
        differences=tuple(difference.by_seed.tolist()),
        over_seeds=over_seeds,
        over_images=_interval(difference.mean, difference.half_width_over_images(LEVEL)),
        p_corrected=p_corrected,
        slower=time_ratio,
        sentence=f"{result.label}: {text}",
    )
    if p_corrected is None:
        return result
    return replace(
        result,
        half_width=difference.half_width(LEVEL),
        p_value=difference.p_value(),
        detectable=difference.detectable(correction.level_of_each),
    )


def _interval(mean: float, half_width: float) -> Interval:
    return Interval(mean=mean, low=mean - half_width, high=mean + half_width)


def _time_ratio(runs: Mapping[int, Run], original: Mapping[int, Run]) -> float | None:
    """Return the step time as a multiple of the original's, over pairs trained on equal devices.

    It is None if there is no such pair.
    """
    paired_runs = []
    paired_originals = []
    for seed, run in runs.items():
        original_run = original.get(seed)
        if original_run is None:
            continue
        if (run.device, run.processes) == (original_run.device, original_run.processes):
            paired_runs.append(run)
            paired_originals.append(original_run)
    if not paired_runs:
        return None
    return _median_step_ms(paired_runs) / _median_step_ms(paired_originals)


def _time_in_words(time_ratio: float | None) -> str:
    if time_ratio is None:
        return "trained on other devices, so times are not compared"
    if f"{time_ratio:.2g}" == "1":
        return "at the same speed"
    return f"at {time_ratio:.2g} times the time"


def sentence(
    difference: Difference,
    p_corrected: float | None,
    correction: Correction,
    time_ratio: float | None,
) -> str:
    """State what the difference shows.

    Claims that there is a difference, or none, hold at the corrected level. The `±` is the half
    width of a 95 % interval.

    Args:
        difference: Difference from the original.
        p_corrected: Corrected p-value of the difference; None if there are too few seeds.
        correction: The numbers of tests for which the level is corrected.
        time_ratio: Step time as a multiple of the original's; None if they were trained on
            different devices.
    """
    all_differences = ", ".join(f"{points:+.1f}" for points in difference.by_seed)
    if p_corrected is None:
        return f"too few seeds to tell: differences of {all_differences} points"
    time = _time_in_words(time_ratio)
    mean = difference.mean
    half_width = difference.half_width(LEVEL)
    if p_corrected <= LEVEL:
        effect = "helps" if mean > 0 else "harms"
        return f"{effect} by {abs(mean):.1f} ± {half_width:.1f} points {time}"
    if abs(mean) >= half_width:
        return f"{mean:+.1f} ± {half_width:.1f} points: significant alone, but not after correction"
    largest = abs(mean) + difference.half_width(correction.level_of_each)
    if largest > MAX_INCONCLUSIVE:
        scarce = "test images"
        if difference.half_width_over_seeds(LEVEL) > difference.half_width_over_images(LEVEL):
            scarce = "seeds"
        return f"too few {scarce} to tell: differences of {all_differences} points"
    rounded_up = math.ceil(10 * largest) / 10
    return f"no difference larger than {rounded_up:.1f} points, {time}"
