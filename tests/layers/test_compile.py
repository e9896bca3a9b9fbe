"""torch.compile on a CPU needs no more graphs for DCLS layers, and gives the eager results."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d

from .common import close

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


# Only inductor works out which sizes its code requires; it takes half a minute per dtype.
WAYS = [
    ("aot_eager", torch.float32, 1e-5),
    ("aot_eager", torch.bfloat16, 0.02),
    ("inductor", torch.float32, 1e-5),
]


@pytest.mark.parametrize(("backend", "dtype", "tolerance"), WAYS)
def test_depthwise_layers_are_one_graph_in_validation_and_then_training(backend, dtype, tolerance):
    torch.manual_seed(0)
    options = {"kernel_count": 5, "dilated_kernel_size": (17, 15), "padding": (8, 7), "groups": 4}
    layers = nn.Sequential(*(DclsConv2d(4, 4, **options, dtype=dtype) for _ in range(2)))
    layers[1].tie_(layers[0])
    layers[0].positions.data.mul_(20)  # far outside: the first step in training clamps them
    compiled = torch.compile(copy.deepcopy(layers), fullgraph=True, backend=backend)
    for side in (20, 24):  # the second time, the size is dynamic
        images = torch.randn(2, 4, side, side + 2, dtype=dtype)
        with torch.no_grad():
            close(compiled.eval()(images), layers.eval()(images), tolerance)
        gradients = []
        for module in (layers, compiled):
            module.train().zero_grad()
            module(images).float().square().sum().backward()
            grads = [parameter.grad for parameter in module.parameters()]
            gradients.append([grad / grad.norm() for grad in grads])
        close(*gradients, tolerance)
        assert layers[0].positions.abs().amax((1, 2, 3)).tolist() == [8, 7]
        assert torch.equal(compiled.get_parameter("0.positions"), layers[0].positions)


def count_graphs(model: nn.Module, mode: str) -> int:
    """Return how many graphs are compiled for batches of two sizes."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model.train(mode == "train"), backend=counter)
    with torch.set_grad_enabled(mode == "train"):
        for batch, side in [(2, 64), (3, 96)]:
            compiled(torch.randn(batch, 3, side, side))
    return counter.frame_count


@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet"])
def test_networks_have_as_many_graphs_as_unconverted_ones(name):
    original = timm.create_model(name)
    converted = copy.deepcopy(original)
    dcls_convert.convert_(converted, init="random", input_size=(3, 64, 64))
    for mode in ("eval", "train"):
        assert count_graphs(converted, mode) == count_graphs(original, mode)
