"""examples/compare.py compares networks fairly, and its answer follows from the runs: intervals are
right, and it claims nothing where there is nothing.
"""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from .conftest import many_examples
from .digits import write_digits

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import compare
import finetune

from dcls_convert import DclsConvertError
from dcls_convert.tuning import no_weight_decay

# timm leaves images open until they are collected.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
POINTS = st.lists(st.floats(-20, 20).map(lambda value: round(value, 2)), min_size=2, max_size=8)
OPTIONS = "--data digits --input-size 3 32 32 --sizes 9 --seeds 3 --epochs 1 --batch-size 16"


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs the script, and returns what it printed."""

    def run_script(arguments):
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments.split()])
        compare.main()
        return capsys.readouterr().out

    return run_script


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    write_digits(folder / "digits", images=30)
    return folder


def lines_of(folder):
    """Return the runs in a folder, without their times."""
    runs = {}
    for line in (folder / "runs.jsonl").read_text().splitlines():
        run = json.loads(line)
        del run["seconds"]
        runs[run["network"], run["seed"]] = run
    return runs


@pytest.mark.slow
def test_an_answer_comes_again_from_its_file_and_from_a_job_array(folder, run, monkeypatch):
    monkeypatch.chdir(folder)
    arguments = f"test_convnext {OPTIONS}"
    printed = run(f"{arguments} --output whole")
    answer = printed[printed.index("| network") :]
    assert "\n9: nothing to tell" in answer
    # timm's layer scale of 1e-6 leaves the blocks without effect.
    assert "WARNING: original and 9 are right on exactly the same images (seeds 0, 1, 2)" in answer
    assert "Try --model-kwargs ls_init_value=0.1" in answer
    names = run(f"{arguments} --list").split()
    assert names == [f"{network}:{seed}" for seed in range(3) for network in ("original", "9")]
    for name in reversed(names):
        printed = run(f"{arguments} --output jobs --only {name}")
        assert ("Provisional" in printed) == (name != names[0])
    assert lines_of(folder / "jobs") == lines_of(folder / "whole")
    monkeypatch.setattr(finetune, "Training", None)  # nothing is trained again
    assert run(f"{arguments} --output whole") == answer
    with pytest.raises(
        DclsConvertError, match=r"holds a run with lr 0\.001, not 0\.5; use another"
    ):
        run(f"{arguments} --output whole --lr 0.5")


def test_networks_start_alike_and_see_the_same_images(folder, monkeypatch):
    monkeypatch.chdir(folder)
    seen = {}
    started = {}

    def note_start(training, *arguments):
        original_init(training, *arguments)
        state = training.model.state_dict()
        started[training.options.output.name] = {key: state[key].clone() for key in state}
        seen[training.options.output.name] = []

    def note_images(training, images, labels):
        seen[training.options.output.name].append(images.clone())
        return training.parallel(images).mean()

    original_init = finetune.Training.__init__
    monkeypatch.setattr(finetune.Training, "__init__", note_start)
    monkeypatch.setattr(finetune.Training, "_loss", note_images)
    monkeypatch.setattr(finetune.Training, "test", lambda training: torch.ones(2))
    networks = ["original", "9", "9-dense"]
    arguments = f"test_convnext {OPTIONS} --batch-size 48 --output starts"
    more = f"--model-kwargs drop_path_rate=0.2 --sizes {','.join(networks[1:])} --seeds 2"
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments.split(), *more.split()])
    compare.main()
    for name, seed in itertools.product(networks, (0, 1)):
        original = f"original-{seed}"
        for images, expected in zip(seen[f"{name}-{seed}"], seen[original], strict=True):
            assert torch.equal(images, expected)
        for key, value in started[original].items():
            if "conv_dw.weight" not in key:
                assert torch.equal(started[f"{name}-{seed}"][key], value)
    assert not torch.equal(seen["9-0"][0], seen["9-1"][0])
    assert not torch.equal(started["9-0"]["head.fc.weight"], started["9-1"]["head.fc.weight"])


def test_words_behind_a_size_say_what_is_not_trained_and_what_is_dense(monkeypatch):
    arguments = f"test_convnext {OPTIONS}"
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments.split()])
    options = compare.parse_arguments()
    options.seed = 0

    def built(name):
        model = compare.build_network(name, 4, None, options)
        return dict(model.named_parameters())

    positions = "stages.0.blocks.0.conv_dw.positions"
    assert built("9")[positions].requires_grad
    assert not built("9-frozen")[positions].requires_grad
    assert torch.equal(built("9")[positions], built("9-frozen")[positions])
    assert not torch.equal(built("9")[positions], built("9-uniform")[positions])
    assert built("9-dense")["stages.0.blocks.0.conv_dw.weight"].shape[-2:] == (9, 9)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("test_convnext --sizes 9,9-thawed", "'thawed' is not a word for a network"),
        (
            "torchvision.models:resnet18 --sizes 9-kernel --pretrained",
            "with --pretrained, trained kernels set the start",
        ),
        ("test_convnext --sizes 9,8", "window 8 .* must be odd as the kernel 7 is"),
        ("test_convnext --sizes 9,5", "window 5 .* is smaller than the kernel 7"),
        ("test_convnext --sizes 9,7-dense", "--sizes 7-dense: no window is larger than its kernel"),
        ("test_convnexx", "test_convnexx: Unknown model"),
        ("digits", "digits: is a folder; give a name of timm's"),
        ("nowhere:build", "nowhere:build: No module named 'nowhere'"),
        ("json:build", "json:build: module 'json' has no attribute 'build'"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(folder, run, monkeypatch, mistake, says):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(finetune, "Training", None)
    model, *more = mistake.split()
    with pytest.raises(DclsConvertError, match=says):
        run(" ".join([model, *OPTIONS.split(), *more]))


@pytest.mark.parametrize("option", ["--seeds", "--epochs", "--batch-size"])
def test_numbers_are_positive(run, option, capsys):
    with pytest.raises(SystemExit):
        run(f"test_convnext {OPTIONS} {option} 0")
    assert capsys.readouterr().err.endswith(f"error: argument {option}: 0 is less than 1\n")


def test_frozen_networks_train_no_positions_of_any_tie_group(monkeypatch):
    widths = (4, 4, 8, 8)  # of two tie groups, whose positions are at one module

    def build(options, classes):
        convs = [torch.nn.Conv2d(n, n, 3, padding=1, groups=n) for n in widths]
        return torch.nn.Sequential(*convs[:2], torch.nn.Conv2d(4, 8, 1), *convs[2:])

    monkeypatch.setattr(compare, "build_original", build)
    monkeypatch.setattr(sys, "argv", ["compare.py", "pairs", *OPTIONS.split()])
    options = compare.parse_arguments()
    options.seed = 0
    options.input_size = (4, 32, 32)
    model = compare.build_network("9-frozen", 4, None, options)
    frozen = {name for name, tensor in model.named_parameters() if not tensor.requires_grad}
    assert frozen == no_weight_decay(model) == {"dcls_positions", "dcls_positions_2"}


MINE = """
import timm
def build(num_classes):
    return timm.create_model("test_convnext", num_classes=num_classes, ls_init_value=1.0)
"""


@pytest.mark.slow
def test_conversions_of_trained_networks_start_close_to_them(folder, monkeypatch):
    monkeypatch.chdir(folder)
    Path("mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "argv", ["compare.py", "mine:build", *OPTIONS.split(), "--pretrained"])
    options = compare.parse_arguments()
    options.seed = 0
    train, test = finetune.read_images(options.data)
    original = compare.build_network("original", 4, train, options).eval()
    converted = compare.build_network("9", 4, train, options).eval()
    finetune.set_transforms_(train, test, original, options)
    images = torch.stack([test[index][0] for index in range(len(test))])
    with torch.no_grad():
        expected = original(images)
        assert (converted(images) - expected).norm() < 0.3 * expected.norm()
    del sys.modules["mine"]


# The answer.


def make_difference(by_seed, over_images):
    """Make a difference whose interval over images has this half width at the 5 % level."""
    by_seed = np.array(by_seed)
    images = 10_000
    scale = over_images * math.sqrt(images - 1) / stats.t.ppf(0.975, images - 1)
    by_image = by_seed.mean() + scale * np.resize([-1.0, 1.0], images)
    return compare.Difference(by_seed=by_seed, by_image=by_image)


@many_examples
@given(POINTS, POINTS)
def test_the_interval_over_seeds_is_that_of_a_paired_t_test(ours, theirs):
    pairs = list(zip(ours, theirs, strict=False))
    differences = np.array([our_points - their_points for our_points, their_points in pairs])
    half_width = compare.student(differences, compare.LEVEL)
    if np.ptp(differences) < 1e-9:
        assert half_width < 1e-6
        return
    expected = stats.ttest_rel(*zip(*pairs, strict=True)).confidence_interval(0.95)
    mean = differences.mean()
    assert [mean - half_width, mean + half_width] == pytest.approx(
        [expected.low, expected.high], rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize("level", [0.05, 0.01, 0.001])
def test_if_no_image_differs_the_bound_is_the_share_missed_with_a_chance_of_the_level(level):
    images = 400
    share = compare.difference_of(np.zeros((3, images))).half_width(level) / 100
    assert (1 - share) ** images == pytest.approx(level, rel=0.1)


@many_examples
@given(POINTS, st.floats(0.1, 10))
def test_half_widths_add_in_quadrature_and_reach_0_at_the_p_value(by_seed, over_images):
    difference = make_difference(by_seed, over_images)
    seeds = compare.student(difference.by_seed, compare.LEVEL)
    assert difference.half_width(compare.LEVEL) ** 2 == pytest.approx(seeds**2 + over_images**2)
    p_value = difference.p_value()
    if 1e-8 < p_value < 0.99:
        assert difference.half_width(p_value) == pytest.approx(abs(difference.mean), rel=1e-3)


@many_examples
@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=6), st.integers(0, 2))
def test_holm_is_the_closed_test_of_bonferroni(p_values, untested):
    """A hypothesis is rejected if Bonferroni rejects every set of hypotheses that contains it."""
    all_p_values = [*p_values, *[1.0] * untested]
    corrected = compare.holm(dict(enumerate(p_values)), len(all_p_values))
    for hypothesis in range(len(p_values)):
        largest = 0.0
        for size in range(1, len(all_p_values) + 1):
            for subset in itertools.combinations(range(len(all_p_values)), size):
                if hypothesis in subset:
                    largest = max(largest, size * min(all_p_values[index] for index in subset))
        assert corrected[hypothesis] == pytest.approx(min(1, largest))


@many_examples
@given(POINTS, st.floats(0.1, 10), st.integers(1, 6))
def test_a_gain_or_a_loss_is_claimed_only_if_the_corrected_interval_excludes_0(
    by_seed, over_images, conversions
):
    difference = make_difference(by_seed, over_images)
    p_corrected = min(1.0, conversions * difference.p_value())
    text = compare.sentence(difference, p_corrected, conversions)
    corrected_half_width = difference.half_width(compare.LEVEL / conversions)
    is_significant = abs(difference.mean) > corrected_half_width
    assert is_significant == text.startswith(("helps by", "harms by"))
    assert not is_significant or text.startswith("helps") == (difference.mean > 0)
    if text.startswith("no difference larger than"):
        assert float(text.split()[4]) >= abs(difference.mean) + corrected_half_width


def test_each_kind_of_difference_has_its_sentence():
    gain = make_difference([1.2, 1.2, 1.2], 0.5)
    assert compare.sentence(gain, 0.01, 1) == "helps by 1.2 ± 0.5 points"
    assert (
        compare.sentence(gain, 0.06, 60)
        == "+1.2 ± 0.5 points: significant alone, but not after correction"
    )
    small = make_difference([0.1, 0.1, 0.1], 0.7)
    assert compare.sentence(small, 0.7, 1) == "no difference larger than 0.8 points"
    few = compare.sentence(make_difference([0.3, -0.4], 0.7), None, 1)
    assert few == "too few seeds to tell: differences of +0.3, -0.4 points"
    inconclusive = "to tell: differences of +0.3, -0.4, +1.1 points"
    for over_images, scarce in ((0.7, "seeds"), (2.7, "test images")):
        unsure = make_difference([0.3, -0.4, 1.1], over_images)
        assert compare.sentence(unsure, 0.5, 1) == f"too few {scarce} {inconclusive}"


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
        yield [compare.difference_of(converted - right[0]) for converted in right[1:]]


def test_at_most_one_comparison_in_twenty_claims_a_difference_where_there_is_none():
    """Holm's correction ensures this for four conversions; uncorrected tests at 5 % do not."""
    uncorrected = []
    corrected = []
    for differences in simulated(gain=0):
        p_values = [difference.p_value() for difference in differences]
        uncorrected.append(min(p_values) <= compare.LEVEL)
        corrected.append(min(compare.holm(dict(enumerate(p_values)), 4).values()) <= compare.LEVEL)
    assert np.mean(corrected) <= compare.LEVEL < np.mean(uncorrected)


@pytest.mark.slow
def test_a_detectable_difference_is_found_four_times_in_five():
    means = []
    detectable = []
    found = []
    for (difference,) in simulated(gain=0.1, networks=2):
        means.append(difference.mean)
        detectable.append(difference.detectable(compare.LEVEL))
        found.append(difference.p_value() <= compare.LEVEL)
    assert np.mean(means) == pytest.approx(np.mean(detectable), rel=0.05)  # by choice of the gain
    assert abs(np.mean(found) - compare.POWER) < 0.08


def test_runs_are_paired_by_seed():
    def run_of(digits):
        accuracy = 100 * digits.count("1") / len(digits)
        return {"right": digits, "params": 1, "epochs": [{"accuracy": accuracy}]}

    runs = {
        ("original", 0): run_of("1100"),
        ("original", 1): run_of("1000"),
        ("original", 2): run_of("0000"),
        ("17", 1): run_of("1100"),
        ("17", 2): run_of("1000"),
    }
    text = compare.answer(runs, ["original", "17"])
    assert "17: too few seeds to tell: differences of +25.0, +25.0 points" in text
    assert "WARNING" not in text
    for seed in range(3):
        runs["17", seed] = runs["original", seed]
    text = compare.answer(runs, ["original", "17"])
    assert "17: nothing to tell: right on the same images as the original" in text
    assert "WARNING: original and 17 are right on exactly the same images" in text
