"""torch.compile on a CPU needs no more graphs for DCLS layers, and gives the eager results."""

import copy
import functools

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d

from .common import close, randn

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
def test_a_depthwise_layer_is_one_graph_in_validation_and_then_training(backend, dtype, tolerance):
    torch.manual_seed(0)
    options = {"kernel_count": 5, "dilated_kernel_size": 17, "padding": 8, "groups": 4}
    layer = DclsConv2d(4, 4, **options, dtype=dtype)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=backend)
    for side in (20, 24):  # the second time, the size is dynamic
        images = torch.randn(2, 4, side, side + 2, dtype=dtype)
        with torch.no_grad():
            close(compiled.eval()(images), layer.eval()(images), tolerance)
        gradients = []
        for module in (layer, compiled):
            module.train().zero_grad()
            module(images).float().square().sum().backward()
            grads = [parameter.grad for parameter in module.parameters()]
            gradients.append([grad / grad.norm() for grad in grads])
        close(*gradients, tolerance)


@pytest.mark.parametrize(
    ("backend", "sizes"), [("aot_eager", [(5, 7), 5, 5]), ("inductor", [5, 5])]
)
def test_compiled_layers_keep_their_positions_inside_as_uncompiled_ones_do(backend, sizes):
    make = functools.partial(DclsConv2d, 2, 2, kernel_count=3, padding="same")
    start = nn.Sequential(*(make(dilated_kernel_size=size) for size in sizes))
    start[-1].tie_(start[-2])
    with torch.no_grad():
        for index, (name, parameter) in enumerate(start.named_parameters()):
            scale = 9 if name.endswith("positions") else 0.5  # far outside
            parameter.copy_(scale * randn(*parameter.shape, seed=index))
    images = randn(1, 2, 9, 9, dtype=torch.float32)
    results = []
    for compiled in (False, True):
        model = copy.deepcopy(start)
        step = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        positions_after_forward = []
        for _ in range(3):
            optimizer.zero_grad()
            step(images).square().mean().backward()
            for layer in model:
                positions_after_forward.append(layer.positions.detach().clone())
            optimizer.step()
        results.append(positions_after_forward)
    assert all(positions.abs().max() <= 3 for positions in results[0])
    close(results[1], results[0], 1e-5)


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
