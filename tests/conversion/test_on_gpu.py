"""A model on a GPU is converted, calibrated, folded and saved there, as on the CPU."""

import copy

import pytest
import torch

from dcls_convert import convert_, fold_to_dense_, load_converted, save_converted
from dcls_convert.checkpoints.fingerprint import fingerprint_deviation, take_fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

IMAGE = (3, 64, 64)
OPTIONS = {"dilated_size": 9, "input_size": IMAGE, "budget": 60}


@pytest.fixture
def trained(tiny):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in tiny.named_parameters():
            if name.endswith("gamma"):  # a small layer scale would hide the blocks
                parameter.uniform_(0.5, 1, generator=generator)
    return tiny


def noise(seed):
    return torch.randn(8, *IMAGE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "options",
    [
        {"init": "random"},
        {"interpolation": "gaussian"},
        {"scope": "error", "calibration": [noise(0)]},
    ],
    ids=str,
)
def test_a_conversion_on_a_gpu_is_as_good_as_on_the_cpu(trained, options):
    images = noise(1)
    old = copy.deepcopy(trained)
    errors = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(trained).to(device)
        # New tensors are on the device by default.
        with torch.autocast(device, torch.bfloat16), torch.device(device):
            convert_(model, **OPTIONS, **options)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {device}
        with torch.no_grad():
            errors.append(float((model.cpu()(images) - old(images)).norm() / old(images).norm()))
    # Rounding can decide which of the fit's starts wins.
    assert errors[1] == pytest.approx(errors[0], rel=0.1)


def test_folding_and_saving_keep_the_outputs_whatever_the_precision_of_matmul(trained, tmp_path):
    model = trained.cuda()
    report = convert_(model, **OPTIONS)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            fingerprint = take_fingerprint(model, report.plan.inputs)
            save_converted(model, report.plan, tmp_path / "saved")
    finally:
        torch.set_float32_matmul_precision("highest")
    loaded = load_converted(tmp_path / "saved").eval()
    again = take_fingerprint(loaded, report.plan.inputs)
    assert fingerprint_deviation(fingerprint, again) < 1e-5
    images = noise(0).cuda().double()
    model.double()
    with torch.no_grad():
        before = model(images)
        fold_to_dense_(model)
        torch.testing.assert_close(model(images), before, rtol=0, atol=1e-9)
