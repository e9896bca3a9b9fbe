"""What a comparison's runs say: paired differences of accuracy with their intervals, and one
sentence of each arm."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from .arms import AS_IT_IS
from .runs import Run

LEAST_SEEDS = 3  # for a sentence about a difference
LARGE = 2.0  # points; intervals without a gain that reach farther say too little
CONFIDENCE = 0.95
RESAMPLES = 2000
UNSEEN = (
    3  # images: of n where nothing differs, with 95 % confidence less than 3/n of all images do
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean, and where it lies with 95 % confidence; in points of percent."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """What is known of an arm; differences are to the network as it is, paired by seed."""

    label: str
    seeds: tuple[int, ...]  # of the runs that are there
    params: int
    macs: int | None  # for one image
    step_ms: float  # median over the runs
    images_per_second: float  # in training
    peak_mib: float | None  # of an accelerator's memory, in training
    top1: float  # mean over the runs, in percent
    top1_deviation: float | None  # standard deviation; None for one run
    differences: tuple[float, ...] = ()  # points, for each seed that both have
    over_seeds: Interval | None = None  # by Student's t
    over_images: Interval | None = None  # by bootstrap over the images to test
    slower: float | None = None  # time of a step, as a multiple of the original's
    distance: float | None = None  # cells; how far positions went
    outside: float | None = None  # share of the elements that end outside the old kernel
    sentence: str | None = None  # None for the original


def results(runs: Sequence[Run]) -> tuple[ArmResult, ...]:
    """One for each arm, in the order of the runs."""
    by_arm: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm.label, {})[run.seed] = run
    return tuple(_result(label, own, by_arm.get(AS_IT_IS, {})) for label, own in by_arm.items())


def _result(label: str, runs: dict[int, Run], original: dict[int, Run]) -> ArmResult:
    first = next(iter(runs.values()))
    top1 = [run.top1[-1] for run in runs.values()]
    step_ms = statistics.median(run.step_ms for run in runs.values())
    moved = [run.moved for run in runs.values() if run.moved is not None]
    result = ArmResult(
        label=label,
        seeds=tuple(runs),
        params=first.params,
        macs=first.macs,
        step_ms=step_ms,
        images_per_second=statistics.median(run.images_per_second for run in runs.values()),
        peak_mib=max(
            (run.peak_mib for run in runs.values() if run.peak_mib is not None), default=None
        ),
        top1=statistics.mean(top1),
        top1_deviation=statistics.stdev(top1) if len(top1) > 1 else None,
        distance=statistics.mean(one.distance for one in moved) if moved else None,
        outside=statistics.mean(one.outside for one in moved) if moved else None,
    )
    pairs = [(runs[seed], original[seed]) for seed in runs if seed in original]
    if runs is original or not pairs:
        return result
    differences = tuple(one.top1[-1] - other.top1[-1] for one, other in pairs)
    slower = step_ms / statistics.median(run.step_ms for run in original.values())
    # Of each image, the mean over the seeds.
    images = np.mean([one.correct() - other.correct() for one, other in pairs], axis=0)
    over_seeds, over_images = over_all_seeds(differences), over_all_images(images)
    return replace(
        result,
        differences=differences,
        over_seeds=over_seeds,
        over_images=over_images,
        slower=slower,
        sentence=f"{label}: {sentence(differences, over_seeds, over_images, slower)}",
    )


def over_all_seeds(differences: Sequence[float]) -> Interval | None:
    """Student's interval for the mean; None for a single difference."""
    if len(differences) < 2:
        return None
    mean = statistics.mean(differences)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)) * statistics.stdev(
        differences
    )
    half /= math.sqrt(len(differences))
    return Interval(mean=mean, low=mean - half, high=mean + half)


def over_all_images(differences: "np.ndarray[Any, np.dtype[np.float64]]") -> Interval:
    """Percentiles of the means of resampled images; the differences are each image's, from -1 to
    1."""
    drawn = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=50,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = (100 * float(bound) for bound in drawn.confidence_interval)
    mean, least = 100 * float(np.mean(differences)), 100 * UNSEEN / len(differences)
    return Interval(mean=mean, low=min(low, mean - least), high=max(high, mean + least))


def sentence(
    differences: Sequence[float], seeds: Interval | None, images: Interval, slower: float
) -> str:
    """What the differences say, by the wider of both intervals; a gain or loss only where neither
    holds 0."""
    time = "at the same speed" if f"{slower:.2g}" == "1" else f"at {slower:.2g} times the time"
    listed = ", ".join(f"{difference:+.1f}" for difference in differences)
    if seeds is None or len(differences) < LEAST_SEEDS:
        return f"too few seeds to tell: differences of {listed} points"
    low, high = min(seeds.low, images.low), max(seeds.high, images.high)
    half = max(high - seeds.mean, seeds.mean - low)
    if low > 0 or high < 0:
        return (
            f"{'helps' if low > 0 else 'harms'} by {abs(seeds.mean):.1f} ± {half:.1f} points {time}"
        )
    most = max(-low, high)
    if most > LARGE:
        few = (
            "seeds" if seeds.high - seeds.low > images.high - images.low else "images to test with"
        )
        return f"too few {few} to tell: differences of {listed} points"
    return f"no difference larger than {math.ceil(10 * most) / 10:.1f} points, {time}"
