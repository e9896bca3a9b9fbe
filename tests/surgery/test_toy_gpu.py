"""A conversion mixes no tensors of the CPU with those of a model on a GPU, and gives what it gives on the CPU."""

import pytest
import torch

from dcls_convert import convert_, fold_to_dense_
from dcls_convert.checkpoints.fingerprint import deviation, take_fingerprint

from ..fitting.test_calibrate import SMALL, network, photos
from .toy_gpu import OnToyGpu, toy_gpu

# torch compiles decompositions of its own where operations are looked at.
pytestmark = [
    pytest.mark.usefixtures("quick_fit"),  # operations on the toy take long
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.skipif(not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="a newer torch can have such a GPU"),
]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"init": "random"}, id="random"),
        pytest.param({"calibration": [photos(2)]}, id="calibration", marks=pytest.mark.slow),
    ],
)
def test_a_model_on_a_gpu_stays_there_and_becomes_what_it_becomes_on_the_cpu(options):
    """Where new tensors are on the GPU by default, too: a generator of the CPU then needs the CPU to be named.

    In float64, since an order of sums that differs moves solutions in float32 by more than their rounding.
    """
    options = {"dilated_size": 9, "budget": 60, "input_size": SMALL, **options}
    ours, theirs = network(bias=True).double(), network(bias=True).double()
    convert_(ours, **options)
    with toy_gpu():
        theirs.to("cuda")
        with torch.device("cuda"):
            convert_(theirs, **options)
        for name, tensor in theirs.state_dict().items():
            assert isinstance(tensor, OnToyGpu), name
            torch.testing.assert_close(tensor.value, ours.state_dict()[name], rtol=0, atol=1e-5)
        before = take_fingerprint(theirs, SMALL)
        assert deviation(before, take_fingerprint(ours, SMALL)) < 1e-5
        assert fold_to_dense_(theirs) == 3
        assert deviation(take_fingerprint(theirs, SMALL), before) < 1e-5
