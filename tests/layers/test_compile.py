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
NETWORKS = ["test_convnext", "mobilenetv3_small_050", "test_efficientnet"]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


def depthwise_layer(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return DclsConv2d(
        4, 4, kernel_count=5, dilated_kernel_size=17, padding=8, groups=4, dtype=dtype
    )


# Only inductor works out which sizes its code requires; it takes half a minute per dtype.
WAYS = [
    ("aot_eager", torch.float32, 1e-5),
    ("aot_eager", torch.bfloat16, 0.02),
    ("inductor", torch.float32, 1e-5),
]


@pytest.mark.parametrize(("backend", "dtype", "tolerance"), WAYS)
def test_a_depthwise_layer_is_one_graph_in_validation_and_then_training(backend, dtype, tolerance):
    layer = depthwise_layer(dtype)
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


def count_graphs(model: nn.Module, mode: str) -> int:
    """Return how many graphs are compiled for batches of two sizes."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model.train(mode == "train"), backend=counter)
    with torch.set_grad_enabled(mode == "train"):
        for batch, side in [(2, 64), (3, 96)]:
            compiled(torch.randn(batch, 3, side, side))
    return counter.frame_count


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_as_many_graphs_as_unconverted_ones(name):
    original = timm.create_model(name)
    converted = copy.deepcopy(original)
    dcls_convert.convert_(converted, init="random", input_size=(3, 64, 64))
    for mode in ("eval", "train"):
        assert count_graphs(converted, mode) == count_graphs(original, mode)
