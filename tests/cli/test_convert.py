"""`dcls-convert MODEL` on trained weights: what it says at the end, and where that stands."""

import json

import pytest
import timm
import torch

from dcls_convert import calibrate, find_convs, load_converted, plan_conversion
from dcls_convert.networks.weights_files import read_weights

from ..command_line import run
from .trained import write_trained

MODEL = "test_efficientnet"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights, and a folder of smooth images."""
    return write_trained(tmp_path_factory.mktemp("trained"), MODEL, images=12)


def convert(trained, tmp_path, *options, output="out"):
    given = (
        "--dilated-size",
        5,
        "--checkpoint",
        trained / "weights.safetensors",
        "--output",
        tmp_path / output,
    )
    out, _ = run(MODEL, *given, "--budget", 80, "--input-size", "3x32x32", *options)
    report = json.loads((tmp_path / output / "report.json").read_text())
    return out, report, (tmp_path / output / "README.md").read_text()


def test_without_images_it_ends_with_the_kernels_error_and_a_better_way(trained, tmp_path):
    out, report, card = convert(trained, tmp_path)
    errors = [layer["fit_error"] for layer in report["layers"]]
    mean = sum(errors) / len(errors)
    unknown = dict.fromkeys(("same_top1", "kl", "output_error", "shifted")) | {"images": 0}
    assert report["outcome"] == {"kernel_error": pytest.approx(mean), **unknown}
    for text in (out[out.index("Fine-tune it") :], card):
        assert f"{mean:.3f}" in text
        assert "--calibrate FOLDER" in text


def test_with_images_it_ends_with_the_outputs_for_those_held_out(trained, tmp_path):
    out, report, card = convert(trained, tmp_path, "--calibrate", trained / "images")
    assert "Error: what each layer's outputs lost" in out
    # In the mean: a layer of which small images show few places stays close to its old kernel.
    output_errors = [layer["output_error"] for layer in report["layers"]]
    fit_errors = [layer["fit_error"] for layer in report["layers"]]
    assert sum(output_errors) < sum(fit_errors)
    outcome = report["outcome"]
    count = outcome["images"]
    for text in (out[out.index("Fine-tune it") :], card):
        for agreed in (outcome, outcome["shifted"]):
            assert f"{agreed['same_top1'] * count:.0f} of {count} have the same top-1 class" in text
            assert f"{agreed['kl']:.2g}" in text
            assert f"{agreed['output_error']:.3f}" in text
    old = timm.create_model(MODEL).eval()
    old.load_state_dict(read_weights(trained / "weights.safetensors"))
    new = load_converted(tmp_path / "out").eval()
    plan = plan_conversion(find_convs(old, (3, 32, 32)), dilated_size=5)
    images = torch.cat(list(calibrate(old, plan, trained / "images").held_out))
    with torch.no_grad():
        one = old(images)
        other = new(images)
        moved = old(torch.cat([images[..., :1], images[..., :-1]], dim=-1))
    for agreed, new in ((outcome, other), (outcome["shifted"], moved)):
        assert agreed["output_error"] == pytest.approx(
            float((one - new).norm() / one.norm()), rel=1e-3
        )
        assert agreed["same_top1"] == float((one.argmax(1) == new.argmax(1)).double().mean())
        one = one.double()
        new = new.double()
        kl = (one.softmax(1) * (one.log_softmax(1) - new.log_softmax(1))).sum(1).mean()
        assert agreed["kl"] == pytest.approx(float(kl), rel=1e-3, abs=1e-7)
