"""What a comparison says follows from its runs: intervals, and a sentence that claims no gain
without one.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dcls_convert.compare.answer import Interval, over_all_images, over_all_seeds, results, sentence
from dcls_convert.compare.arms import Arm, make_arms
from dcls_convert.compare.runs import Run

from ..conftest import many_examples

POINTS = st.lists(st.floats(-20, 20).map(lambda value: round(value, 2)), min_size=2, max_size=8)


def run(arm, seed, right, step_ms=10.0):
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


@many_examples
@given(POINTS, POINTS)
def test_the_interval_over_seeds_is_that_of_a_paired_t_test(ours, theirs):
    pairs = list(zip(ours, theirs, strict=False))
    interval = over_all_seeds([one - other for one, other in pairs])
    if np.ptp([one - other for one, other in pairs]) < 1e-9:
        assert interval.high - interval.low < 1e-6
        return
    expected = stats.ttest_rel(*zip(*pairs, strict=True)).confidence_interval(0.95)
    assert [interval.low, interval.high] == pytest.approx(
        [expected.low, expected.high], rel=1e-9, abs=1e-9
    )


def test_the_interval_over_images_is_near_the_normal_one_for_many():
    differences = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], 4000, p=[0.1, 0.7, 0.2])
    interval = over_all_images(differences)
    half = 1.96 * 100 * differences.std() / math.sqrt(len(differences))
    assert interval.mean == 100 * differences.mean()
    assert [interval.mean - interval.low, interval.high - interval.mean] == pytest.approx(
        [half] * 2, rel=0.1
    )


@many_examples
@given(POINTS, st.floats(0, 10), st.floats(0.1, 10))
def test_a_gain_or_a_loss_is_claimed_only_where_no_interval_holds_0(differences, half, slower):
    seeds = over_all_seeds(differences)
    images = Interval(mean=seeds.mean, low=seeds.mean - half, high=seeds.mean + half)
    said = sentence(differences, seeds, images, slower)
    low = min(seeds.low, images.low)
    high = max(seeds.high, images.high)
    clear = len(differences) >= 3 and (low > 0 or high < 0)
    assert clear == said.startswith(("helps by", "harms by"))
    assert not clear or said.startswith("helps") == (seeds.mean > 0)
    if said.startswith("no difference larger than"):
        assert float(said.split()[4]) >= max(-low, high)


def test_the_three_answers():
    narrow = Interval(mean=1.2, low=0.7, high=1.7)
    assert (
        sentence([1.2, 1.1, 1.3], narrow, narrow, 1.31)
        == "helps by 1.2 ± 0.5 points at 1.3 times the time"
    )
    around = Interval(mean=0.1, low=-0.6, high=0.8)
    assert (
        sentence([0.1] * 3, around, around, 2.0)
        == "no difference larger than 0.8 points, at 2 times the time"
    )
    assert (
        sentence([0.3, -0.4], around, around, 1.0)
        == "too few seeds to tell: differences of +0.3, -0.4 points"
    )


def test_results_pair_runs_by_seed():
    original, converted = make_arms([17], ["normal"])
    runs = [run(original, 0, "1100"), run(original, 1, "1000"), run(original, 2, "0000")]
    runs += [run(converted, 1, "1100", 30.0), run(converted, 2, "1000", 30.0)]
    first, second = results(runs)
    assert (first.label, first.top1, first.sentence) == ("as it is", 25, None)
    assert (second.differences, second.slower, second.seeds) == ((25, 25), 3, (1, 2))
    assert second.over_seeds == Interval(mean=25, low=25, high=25)
    assert second.over_images.mean == 25
    same = [replace(one, arm=arm) for arm in (original, converted) for one in runs[:3]]
    assert (
        results(same)[1].sentence
        == "17x17: too few test images to tell: differences of +0.0, +0.0, +0.0 points"
    )


def test_labels_and_names_of_files_tell_arms_apart():
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
