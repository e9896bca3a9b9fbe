"""The answer of a comparison's runs: differences of accuracy, their intervals, and a sentence.

Differences are paired by seed; each arm but the network as it is has a sentence.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from .arms import AS_IT_IS
from .runs import Run

LEAST_SEEDS = 3  # for a sentence about a difference
# Points. An interval that contains 0 and reaches farther is too wide for an answer.
LARGE = 2.0
CONFIDENCE = 0.95
RESAMPLES = 2000
# Rule of three: if none of n test images differs, with 95 % confidence less than 3/n of all do.
RULE_OF_THREE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean and its 95 % confidence interval, in percentage points."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """What is known of an arm.

    Differences are to the network as it is, paired by seed. For that network itself, and for an arm
    without a seed in common, they are empty, and intervals, `slower` and `sentence` are None.
    """

    label: str
    seeds: tuple[int, ...]  # of the finished runs
    params: int
    macs: int | None  # for one image
    step_ms: float  # median over the runs
    images_per_second: float  # in training; median over the runs
    peak_mib: float | None  # of a GPU's memory, in training; largest of the runs
    top1: float  # mean over the runs, in percent
    top1_deviation: float | None  # standard deviation; None for one run
    top1_before: float | None = None  # before training: mean over the runs, in percent
    differences: tuple[float, ...] = ()  # percentage points, for each seed that both have
    over_seeds: Interval | None = None  # by Student's t
    over_images: Interval | None = None  # by bootstrap over the test images
    slower: float | None = None  # time of a step, as a multiple of the original's
    distance: float | None = None  # cells; mean distance that elements moved in training
    outside: float | None = None  # share of the elements that end outside the old kernel
    sentence: str | None = None


def results(runs: Sequence[Run]) -> tuple[ArmResult, ...]:
    """The result of each arm, in the order of the runs."""
    by_arm: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm.label, {})[run.seed] = run
    original = by_arm.get(AS_IT_IS, {})
    found = []
    for label, arm_runs in by_arm.items():
        result = _own_result(label, list(arm_runs.values()))
        if label != AS_IT_IS:
            result = _compared_result(result, arm_runs, original)
        found.append(result)
    return tuple(found)


def _own_result(label: str, runs: Sequence[Run]) -> ArmResult:
    """An arm's result from its runs alone."""
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


def _compared_result(
    result: ArmResult, runs: Mapping[int, Run], original: Mapping[int, Run]
) -> ArmResult:
    """An arm's result with its differences to the network as it is; runs are by seed."""
    differences: list[float] = []
    image_differences = []  # of each pair: (images,), -1, 0 or 1
    for seed, run in runs.items():
        if seed in original:
            differences.append(run.top1[-1] - original[seed].top1[-1])
            image_differences.append(run.correct() - original[seed].correct())
    if not differences:
        return result
    slower = _slower(runs, original)
    over_seeds = over_all_seeds(differences)
    over_images = over_all_images(np.mean(image_differences, axis=0))
    said = sentence(differences, over_seeds, over_images, slower)
    return replace(
        result,
        differences=tuple(differences),
        over_seeds=over_seeds,
        over_images=over_images,
        slower=slower,
        sentence=f"{result.label}: {said}",
    )


def _slower(runs: Mapping[int, Run], original: Mapping[int, Run]) -> float | None:
    """Time of a step as a multiple of the original's, over pairs that one device trained.

    None if there is no such pair.
    """
    own = []
    others = []
    for seed, run in runs.items():
        other = original.get(seed)
        if other is None:
            continue
        if (run.device, run.processes) == (other.device, other.processes):
            own.append(run)
            others.append(other)
    if not own:
        return None
    return _median_step_ms(own) / _median_step_ms(others)


def over_all_seeds(differences: Sequence[float]) -> Interval | None:
    """Student's t interval for the mean difference; None for a single difference."""
    if len(differences) < 2:
        return None
    mean = statistics.mean(differences)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1))
    half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return Interval(mean=mean, low=mean - half, high=mean + half)


def over_all_images(differences: "np.ndarray[Any, np.dtype[np.float64]]") -> Interval:
    """Bootstrap interval (percentiles) for the mean difference over the test images.

    Args:
        differences: (images,); of each image, the mean over the seeds of correct minus originally
            correct, from -1 to 1.
    """
    resampled = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=50,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low = 100 * float(resampled.confidence_interval.low)
    high = 100 * float(resampled.confidence_interval.high)
    mean = 100 * float(np.mean(differences))
    # The bootstrap says nothing of differences that are too rare to occur in these images.
    least_half = 100 * RULE_OF_THREE / len(differences)
    return Interval(mean=mean, low=min(low, mean - least_half), high=max(high, mean + least_half))


def _time_in_words(slower: float | None) -> str:
    if slower is None:
        return "trained on other devices, so times are not compared"
    if f"{slower:.2g}" == "1":
        return "at the same speed"
    return f"at {slower:.2g} times the time"


def sentence(
    differences: Sequence[float], seeds: Interval | None, images: Interval, slower: float | None
) -> str:
    """What the differences say, by the union of both intervals.

    A gain or loss is claimed only if this does not contain 0.

    Args:
        differences: Percentage points, for each seed.
        seeds: The interval over the seeds, of `over_all_seeds`.
        images: The interval over the test images, of `over_all_images`.
        slower: Time of a step, as a multiple of the original's; None if other devices trained it.
    """
    every_difference = ", ".join(f"{difference:+.1f}" for difference in differences)
    if seeds is None or len(differences) < LEAST_SEEDS:
        return f"too few seeds to tell: differences of {every_difference} points"
    time = _time_in_words(slower)
    low = min(seeds.low, images.low)
    high = max(seeds.high, images.high)
    if low > 0 or high < 0:
        effect = "helps" if low > 0 else "harms"
        half = max(high - seeds.mean, seeds.mean - low)
        return f"{effect} by {abs(seeds.mean):.1f} ± {half:.1f} points {time}"
    largest = max(-low, high)
    if largest > LARGE:
        scarce = "test images"
        if seeds.high - seeds.low > images.high - images.low:
            scarce = "seeds"
        return f"too few {scarce} to tell: differences of {every_difference} points"
    rounded_up = math.ceil(10 * largest) / 10
    return f"no difference larger than {rounded_up:.1f} points, {time}"
