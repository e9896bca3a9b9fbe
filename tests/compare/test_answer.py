"""The answer of a comparison follows from its runs: intervals are correct, and a sentence claims no
gain where there is none.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dcls_convert.compare.answer import (
    LEVEL,
    POWER,
    Correction,
    Difference,
    Interval,
    compare_arms,
    holm,
    sentence,
    summarize_difference,
)
from dcls_convert.compare.arms import Arm, make_arms
from dcls_convert.compare.trainer import Run

from ..conftest import many_examples

POINTS = st.lists(st.floats(-20, 20).map(lambda value: round(value, 2)), min_size=2, max_size=8)
ALONE = Correction()


def make_run(arm, seed, right, step_ms=10.0):
    return Run(
        arm=arm,
        seed=seed,
        device="cpu",
        processes=1,
        params=100,
        macs=None,
        step_ms=step_ms,
        images_per_second=5.0,
        peak_mib=None,
        loss=(1.0,),
        top1=(100 * right.count("1") / len(right),),
        seconds=(1.0,),
        right=right,
        moved=None,
    )


def make_difference(by_seed, over_images):
    """Make a difference whose interval over images has this half width at the 5 % level."""
    by_seed = np.array(by_seed)
    images = 10_000
    scale = over_images * math.sqrt(images - 1) / stats.t.ppf(1 - LEVEL / 2, images - 1)
    return Difference(
        by_seed=by_seed, by_image=by_seed.mean() + scale * np.resize([-1.0, 1.0], images)
    )


@many_examples
@given(POINTS, POINTS)
def test_the_interval_over_seeds_is_that_of_a_paired_t_test(ours, theirs):
    pairs = list(zip(ours, theirs, strict=False))
    differences = np.array([our_points - their_points for our_points, their_points in pairs])
    half_width = Difference(by_seed=differences, by_image=np.zeros(9)).half_width_over_seeds(LEVEL)
    if np.ptp(differences) < 1e-9:
        assert half_width < 1e-6
        return
    expected = stats.ttest_rel(*zip(*pairs, strict=True)).confidence_interval(0.95)
    mean = differences.mean()
    assert [mean - half_width, mean + half_width] == pytest.approx(
        [expected.low, expected.high], rel=1e-9, abs=1e-9
    )


def test_the_interval_over_many_images_is_close_to_that_of_the_bootstrap():
    differences = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], 4000, p=[0.1, 0.7, 0.2])
    difference = summarize_difference(differences[np.newaxis])
    resampled = stats.bootstrap(
        (100 * differences,), np.mean, n_resamples=2000, batch=50, rng=np.random.default_rng(0)
    )
    low, high = resampled.confidence_interval
    assert difference.mean == pytest.approx(100 * differences.mean())
    assert difference.half_width_over_images(LEVEL) == pytest.approx((high - low) / 2, rel=0.1)


@pytest.mark.parametrize("level", [0.05, 0.01, 0.001])
def test_if_no_image_differs_the_bound_is_the_share_missed_with_a_chance_of_the_level(level):
    images = 400
    share = summarize_difference(np.zeros((3, images))).half_width_over_images(level) / 100
    assert (1 - share) ** images == pytest.approx(level, rel=0.1)


@many_examples
@given(POINTS, st.floats(0.1, 10))
def test_half_widths_add_in_quadrature_and_reach_0_at_the_p_value(by_seed, over_images):
    difference = make_difference(by_seed, over_images)
    assert difference.half_width_over_images(LEVEL) == pytest.approx(over_images)
    for level in (LEVEL, 0.001):
        seeds = difference.half_width_over_seeds(level)
        images = difference.half_width_over_images(level)
        assert difference.half_width(level) ** 2 == pytest.approx(seeds**2 + images**2)
    p_value = difference.p_value()
    if 1e-8 < p_value < 0.99:
        assert difference.half_width(p_value) == pytest.approx(abs(difference.mean), rel=1e-3)


@many_examples
@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=6), st.integers(0, 2))
def test_holm_is_the_closed_test_of_bonferroni(p_values, untested):
    """A hypothesis is rejected if Bonferroni rejects every set of hypotheses that contains it."""
    all_p_values = [*p_values, *[1.0] * untested]
    corrected = holm(dict(enumerate(p_values)), len(all_p_values))
    for hypothesis in range(len(p_values)):
        largest = 0.0
        for size in range(1, len(all_p_values) + 1):
            for subset in itertools.combinations(range(len(all_p_values)), size):
                if hypothesis in subset:
                    largest = max(largest, size * min(all_p_values[index] for index in subset))
        assert corrected[hypothesis] == pytest.approx(min(1, largest))


@many_examples
@given(POINTS, st.floats(0.1, 10), st.integers(1, 6), st.integers(1, 3))
def test_a_gain_or_a_loss_is_claimed_only_if_the_corrected_interval_excludes_0(
    by_seed, over_images, conversions, looks
):
    difference = make_difference(by_seed, over_images)
    factor = conversions * looks**2
    p_corrected = min(1.0, factor * difference.p_value())
    correction = Correction(conversions=conversions, looks=looks)
    text = sentence(difference, p_corrected, correction, 1.0)
    corrected_half_width = difference.half_width(LEVEL / factor)
    is_significant = abs(difference.mean) > corrected_half_width
    assert is_significant == text.startswith(("helps by", "harms by"))
    assert not is_significant or text.startswith("helps") == (difference.mean > 0)
    if text.startswith("no difference larger than"):
        assert float(text.split()[4]) >= abs(difference.mean) + corrected_half_width


def test_each_kind_of_difference_has_its_sentence():
    gain = make_difference([1.2, 1.2, 1.2], 0.5)
    assert sentence(gain, 0.01, ALONE, 1.31) == "helps by 1.2 ± 0.5 points at 1.3 times the time"
    assert (
        sentence(gain, 0.06, Correction(conversions=60), 1.31)
        == "+1.2 ± 0.5 points: significant alone, but not after correction"
    )
    small = make_difference([0.1, 0.1, 0.1], 0.7)
    assert (
        sentence(small, 0.7, ALONE, 2.0)
        == "no difference larger than 0.8 points, at 2 times the time"
    )
    assert (
        sentence(make_difference([0.3, -0.4], 0.7), None, ALONE, 1.0)
        == "too few seeds to tell: differences of +0.3, -0.4 points"
    )
    inconclusive = "to tell: differences of +0.3, -0.4, +1.1 points"
    unsure = make_difference([0.3, -0.4, 1.1], 0.7)
    assert sentence(unsure, 0.5, ALONE, 1.0) == f"too few seeds {inconclusive}"
    unsure = make_difference([0.3, -0.4, 1.1], 2.7)
    assert sentence(unsure, 0.5, ALONE, 1.0) == f"too few test images {inconclusive}"


def simulated(gain, repetitions=300, networks=5, seeds=10, images=1000):
    """Simulate comparisons, and yield the differences of networks 1, 2, ... from network 0.

    All networks except 0 score higher by `gain`. Scores also vary by image, by image for each
    network, and by training run.
    """
    draw = np.random.default_rng(0)
    for _ in range(repetitions):
        scores = 1 + draw.standard_normal(images)
        scores = scores + 0.3 * draw.standard_normal((networks, 1, images))
        scores = scores + 0.04 * draw.standard_normal((networks, seeds, 1))
        scores = scores + 0.3 * draw.standard_normal((networks, seeds, images))
        scores[1:] += gain
        right = (scores > 0).astype(np.float64)  # (networks, seeds, images)
        yield [summarize_difference(converted - right[0]) for converted in right[1:]]


def test_at_most_one_comparison_in_twenty_claims_a_difference_where_there_is_none():
    """Holm's correction ensures this for four conversions; uncorrected tests at 5 % do not."""
    uncorrected = []
    corrected = []
    for differences in simulated(gain=0):
        p_values = [difference.p_value() for difference in differences]
        uncorrected.append(min(p_values) <= LEVEL)
        corrected.append(min(holm(dict(enumerate(p_values)), 4).values()) <= LEVEL)
    assert np.mean(corrected) <= LEVEL < np.mean(uncorrected)


def test_a_detectable_difference_is_found_four_times_in_five():
    means = []
    detectable = []
    found = []
    for (difference,) in simulated(gain=0.1, networks=2):
        means.append(difference.mean)
        detectable.append(difference.detectable(LEVEL))
        found.append(difference.p_value() <= LEVEL)
    assert np.mean(means) == pytest.approx(np.mean(detectable), rel=0.05)  # by choice of the gain
    assert abs(np.mean(found) - POWER) < 0.08


def test_results_pair_runs_by_seed():
    original, converted = make_arms([17], ["normal"])
    runs = [
        make_run(original, 0, "1100"),
        make_run(original, 1, "1000"),
        make_run(original, 2, "0000"),
    ]
    runs += [make_run(converted, 1, "1100", 30.0), make_run(converted, 2, "1000", 30.0)]
    first, second = compare_arms(runs, ALONE)
    assert (first.label, first.top1, first.sentence) == ("as it is", 25, None)
    assert (second.differences, second.slower, second.seeds) == ((25, 25), 3, (1, 2))
    assert second.over_seeds == Interval(mean=25, low=25, high=25)
    assert second.over_images.mean == 25
    same = [replace(run, arm=arm) for arm in (original, converted) for run in runs[:3]]
    assert (
        compare_arms(same, ALONE)[1].sentence
        == "17x17: too few test images to tell: differences of +0.0, +0.0, +0.0 points"
    )


def test_labels_and_file_names_of_arms_are_unique():
    arms = make_arms([None, 17, (17, 9), "+4"], ["normal", "uniform"], ablate=True)
    assert (
        len({arm.label for arm in arms})
        == len({arm.file_name for arm in arms})
        == len(arms)
        == 1 + 4 * 5
    )
    assert {"as it is", "17x17", "17x17 uniform", "17x17 frozen", "17x17 dense", "17x9", "+4"} < {
        arm.label for arm in arms
    }
    assert Arm(kind="frozen", size=9, positions="uniform").label == "9x9 frozen uniform"
