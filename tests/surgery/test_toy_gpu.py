"""A conversion mixes no tensors of the CPU with those of a model on a GPU, and gives what it gives on the CPU."""

import pytest
import torch

from dcls_convert import convert_, fold_to_dense_
from dcls_convert.checkpoints.fingerprint import deviation, take_fingerprint
from dcls_convert.fitting import least_squares, warm_start

from ..fitting.test_calibrate import SMALL, network, photos
from .toy_gpu import OnToyGpu, put_on_toy_gpu_, toy_gpu

# torch compiles decompositions of its own where operations are looked at.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.skipif(not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="a newer torch can have such a GPU"),
]


def hurry(monkeypatch):
    """Operations on the toy take long."""
    for module, number in (
        (warm_start, "STARTS"),
        (least_squares, "MOST_LOOKS"),
        (least_squares, "STEPS_BETWEEN_LOOKS"),
    ):
        monkeypatch.setattr(module, number, 2)


@pytest.mark.parametrize("options", [{"init": "random"}, {"calibration": [photos()]}], ids=["random", "calibration"])
def test_a_model_on_a_gpu_stays_there_and_becomes_what_it_becomes_on_the_cpu(options, monkeypatch):
    hurry(monkeypatch)
    ours, theirs = network(bias=True), network(bias=True)
    put_on_toy_gpu_(theirs)
    with toy_gpu():
        for model in (ours, theirs):
            convert_(model, dilated_size=9, budget=60, input_size=SMALL, **options)
        for name, tensor in theirs.state_dict().items():
            assert isinstance(tensor, OnToyGpu), name
            torch.testing.assert_close(tensor.value, ours.state_dict()[name], rtol=0, atol=1e-5)
        before = take_fingerprint(theirs, SMALL)
        assert deviation(before, take_fingerprint(ours, SMALL)) < 1e-5
        assert fold_to_dense_(theirs) == 3
        assert deviation(take_fingerprint(theirs, SMALL), before) < 1e-5


def test_seeds_mean_the_same_where_new_tensors_are_on_the_gpu_by_default(monkeypatch):
    """`torch.set_default_device`: a generator of the CPU then needs the CPU to be named."""
    hurry(monkeypatch)
    ours, theirs = network(), network()
    convert_(ours, dilated_size=9, budget=60, input_size=SMALL, init="fit")
    put_on_toy_gpu_(theirs)
    with toy_gpu(), torch.device("cuda"):
        convert_(theirs, dilated_size=9, budget=60, input_size=SMALL, init="fit")
        assert all(torch.equal(theirs.state_dict()[name].value, value) for name, value in ours.state_dict().items())
