"""`dcls-convert MODEL` on trained weights: what it prints and stores about its outcome."""

import json
from pathlib import Path

import pytest
import timm
import torch

from dcls_convert import find_convs, load_converted, plan_conversion, read_calibration_images
from dcls_convert.weights.files import read_weights

from ..command_line import run
from .trained import write_trained

MODEL = "test_efficientnet"


def convert(trained, *options):
    weights = ("--checkpoint", trained / "weights.safetensors", "--input-size", "3x32x32")
    out, _ = run(MODEL, "--dilated-size", 5, *weights, "--budget", 80, "--output", "out", *options)
    return out, json.loads(Path("out/report.json").read_text()), Path("out/README.md").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Write trained weights, and a folder of smooth images."""
    return write_trained(tmp_path_factory.mktemp("trained"), MODEL, images=12)


def test_without_images_it_ends_with_the_kernels_error_and_a_better_way(trained):
    out, report, card = convert(trained)
    errors = [layer["fit_error"] for layer in report["layers"]]
    mean = sum(errors) / len(errors)
    unknown = dict.fromkeys(
        ("same_top1", "kl", "same_largest", "output_error", "layer_error", "shifted")
    )
    assert report["outcome"] == {"kernel_error": pytest.approx(mean), "images": 0, **unknown}
    for text in (out, card):
        assert f"{mean:.3f}" in text
        assert "A calibration with some images would" in text


def test_with_images_it_ends_with_the_outputs_for_those_held_out(trained):
    out, report, card = convert(trained, "--calibrate", trained / "images", "--scope", "model")
    assert report["budget"]["scope"] == "model"
    outcome = report["outcome"]
    for text in (out, card):
        for agreement in (outcome, outcome["shifted"]):
            same = f"{agreement['same_top1'] * outcome['images']:.0f} of {outcome['images']}"
            assert f"{same} have the same top-1 class" in text
            assert f"{agreement['output_error']:.3f}" in text
    old = timm.create_model(MODEL).eval()
    old.load_state_dict(read_weights(trained / "weights.safetensors"))
    new = load_converted("out").eval()
    plan = plan_conversion(find_convs(old, (3, 32, 32)), dilated_size=5)
    images = torch.cat(list(read_calibration_images(old, plan, trained / "images").held_out))
    with torch.no_grad():
        before = old(images).double()
        after = new(images).double()
        shifted = old(torch.cat([images[..., :1], images[..., :-1]], dim=-1)).double()
    for agreement, outputs in ((outcome, after), (outcome["shifted"], shifted)):
        error = float((before - outputs).norm() / before.norm())
        assert agreement["output_error"] == pytest.approx(error, rel=1e-3)
        same = before.argmax(1) == outputs.argmax(1)
        assert agreement["same_top1"] == float(same.double().mean())
        log_ratio = before.log_softmax(1) - outputs.log_softmax(1)
        kl = (before.softmax(1) * log_ratio).sum(1).mean()
        assert agreement["kl"] == pytest.approx(float(kl), rel=1e-3, abs=1e-7)


def test_options_without_effect_are_ignored_with_a_note():
    options = ["--dilated-size", 7, "--dry-run", "--json"]
    expected, _ = run(MODEL, *options)
    ignored = ["--images", 100, "--checkpoint-key", "ema", "--output", "elsewhere", "-v"]
    out, err = run(MODEL, *options, *ignored)
    assert out == expected
    for option in ("the number of images", "the checkpoint key"):
        assert f"note: {option} has no effect without" in err
    assert not Path("elsewhere").exists()


def test_quiet_still_says_which_weights_are_taken(trained):
    weights = read_weights(trained / "weights.safetensors")
    torch.save({"model": weights, "ema": weights, "epoch": 3}, "run.pth")
    command = (MODEL, "--dilated-size", 7, "--checkpoint", "run.pth", "--init", "largest")
    out, err = run(*command, "--output", "out", "--quiet")
    assert out == "out\n"
    assert err.startswith("note: weights file run.pth: ")
    assert "ema" in err
