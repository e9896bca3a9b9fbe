"""examples/compare.py compares networks fairly, and claims nothing where there is nothing."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from .digits import write_digits

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import compare
import finetune

# timm leaves images open until they are collected.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
OPTIONS = """test_convnext --data digits --input-size 3 32 32 --epochs 1 --batch-size 12 --seeds 2
--model-kwargs drop_path_rate=0.2 --sizes 9-frozen,9-dense"""


def test_networks_start_alike_and_see_the_same_images(empty_folder, monkeypatch):
    seen = {}
    started = {}

    def note_start(training, *arguments):
        original_init(training, *arguments)
        name = training.options.output.name
        state = training.model.state_dict(keep_vars=True)
        started[name] = {key: tensor.detach().clone() for key, tensor in state.items()}
        seen[name] = []
        frozen = [key for key, tensor in state.items() if not tensor.requires_grad]
        positions = [key for key in state if key.endswith("positions")]
        assert frozen == (positions if "frozen" in name else [])

    def note_images(training, images, labels):
        seen[training.options.output.name].append(images.clone())
        return training.parallel(images).mean()

    original_init = finetune.Training.__init__
    monkeypatch.setattr(finetune.Training, "__init__", note_start)
    monkeypatch.setattr(finetune.Training, "_loss", note_images)
    monkeypatch.setattr(finetune.Training, "test", lambda training, loader: torch.ones(2))
    monkeypatch.setattr(sys, "argv", ["compare.py", *OPTIONS.split()])
    write_digits(empty_folder / "digits")
    compare.main()
    for name, seed in itertools.product(("9-frozen", "9-dense"), (0, 1)):
        assert torch.equal(torch.cat(seen[f"{name}-{seed}"]), torch.cat(seen[f"original-{seed}"]))
        for key, value in started[f"original-{seed}"].items():
            if "conv_dw.weight" not in key:
                assert torch.equal(started[f"{name}-{seed}"][key], value)
    assert not torch.equal(torch.cat(seen["original-0"]), torch.cat(seen["original-1"]))
    head = "head.fc.weight"
    assert not torch.equal(started["original-0"][head], started["original-1"][head])
    first = "stages.0.blocks.0.conv_dw.weight"
    assert started["9-dense-0"][first].shape[-2:] == (9, 9)


def test_p_values_are_corrected_by_holm():
    corrected = compare.holm({"a": 0.03, "b": 0.01, "c": 0.02}, tests=4)
    assert corrected == pytest.approx({"a": 0.06, "b": 0.04, "c": 0.06})


def simulated(gain, repetitions, networks=5, seeds=10, images=1000):
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
    for differences in simulated(gain=0, repetitions=100):
        p_values = [difference.p_value() for difference in differences]
        uncorrected.append(min(p_values) <= compare.LEVEL)
        corrected.append(min(compare.holm(dict(enumerate(p_values)), 4).values()) <= compare.LEVEL)
    assert np.mean(corrected) <= compare.LEVEL < np.mean(uncorrected)


def test_a_large_difference_is_claimed_with_its_sign():
    for gain, claim in ((0.5, "helps by"), (-0.5, "harms by")):
        for (difference,) in simulated(gain, repetitions=5, networks=2):
            assert compare.sentence(difference, difference.p_value(), 1).startswith(claim)


def test_runs_are_paired_by_seed():
    def run_of(digits):
        accuracy = 100 * digits.count("1") / len(digits)
        return {"right": digits, "params": 1, "epochs": [{"accuracy": accuracy}]}

    runs = {
        ("original", 1): run_of("1000"),
        ("original", 2): run_of("0000"),
        ("17", 0): run_of("1111"),
        ("17", 1): run_of("1100"),
        ("17", 2): run_of("1000"),
    }
    text = compare.answer(runs, ["original", "17"])
    assert "17: too few seeds to tell: differences of +25.0, +25.0 points" in text


@pytest.mark.parametrize(
    ("model", "kwargs", "other_seed", "advised"),
    [
        ("convnext_tiny", "{}", "10", True),
        ("convnext_tiny", "{}", "01", False),  # the networks differ with this seed
        ("convnext_tiny", "{'ls_init_value': 0.1}", "10", False),
        ("resnet50", "{}", "10", False),  # has no layer scale
    ],
)
def test_a_layer_scale_is_advised_only_where_it_may_be_the_cause(
    model, kwargs, other_seed, advised
):
    def run_of(right):
        settings = {"model": model, "model_kwargs": kwargs}
        return {"right": right, "settings": settings}

    runs = {("original", seed): run_of("10") for seed in (0, 1)}
    runs |= {("17", 0): run_of("10"), ("17", 1): run_of(other_seed)}
    warning, *advice = compare.warnings(runs, ["original", "17"])
    seeds = "0, 1" if other_seed == "10" else "0"
    assert warning.endswith(f"are right on the same ones of 2 test images (seeds {seeds})")
    assert advice == ([compare.WHY_THE_SAME] if advised else [])
