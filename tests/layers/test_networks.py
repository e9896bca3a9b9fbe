"""Networks with DCLS layers work with memory formats, torch.fx, compilers and DataParallel."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from dcls_convert.layers.dcls_conv import DclsConv2d, DclsConv3d, DclsConvNd

from .common import close, randn


def layers(model):
    return [module for module in model.modules() if isinstance(module, DclsConvNd)]


def last_two_tied(*modules):
    """Return the modules in sequence; the last two share the positions of the one before last."""
    model = nn.Sequential(*modules)
    model[-1].tie_(model[-2])
    for index, parameter in enumerate(model.parameters()):
        parameter.data = randn(*parameter.shape, seed=index, dtype=torch.float32)
    return model


def stage(*sizes):
    """Return layers with windows of these sizes; the last two share their positions."""
    make = functools.partial(DclsConv2d, 2, 2, kernel_count=3, padding="same")
    return last_two_tied(
        *(make(dilated_kernel_size=size, interpolation="triangle") for size in sizes[:-2]),
        *(make(dilated_kernel_size=size) for size in sizes[-2:]),
    )


FORMATS = {
    "one dense axis in 2-D": (
        DclsConv2d,
        {"dilated_kernel_size": (3, 7), "dense_axes": (0,)},
        torch.channels_last,
    ),
    "no dense axis in 3-D": (
        DclsConv3d,
        {"dilated_kernel_size": (3, 5, 4)},
        torch.channels_last_3d,
    ),
}


@pytest.mark.parametrize("case", FORMATS)
def test_positions_and_elements_pass_through_memory_formats(case):
    layer_class, options, memory_format = FORMATS[case]
    make = functools.partial(layer_class, 4, 4, kernel_count=3, **options)
    model = last_two_tied(layer_class.conv_class(3, 4, 3), make(), make())
    images = randn(1, 3, *[16] * layer_class.dims, dtype=torch.float32)
    expected = model(images)
    before = copy.deepcopy(model.state_dict())
    for network in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        network.to(memory_format=memory_format)
        output = network(images.to(memory_format=memory_format))
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
        state = network.state_dict()
        assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
        for layer in layers(network):
            assert layer.weight.is_contiguous()
            assert layer.positions.is_contiguous()
        assert network[0].weight.is_contiguous(memory_format=memory_format)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # inductor's
@pytest.mark.parametrize(
    ("backend", "sizes"), [("aot_eager", [(5, 7), 5, 5]), ("inductor", [5, 5])]
)
def test_compiled_layers_keep_their_positions_inside_as_uncompiled_ones_do(backend, sizes):
    torch.compiler.reset()
    start = stage(*sizes)
    images = randn(1, 2, 9, 9, dtype=torch.float32)
    results = []
    with torch.no_grad():
        for name, parameter in start.named_parameters():
            parameter.mul_(9 if name.endswith("positions") else 0.5)  # far outside
    for compiled in (False, True):
        model = copy.deepcopy(start)
        step = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        positions_after_forward = []
        for _ in range(3):
            optimizer.zero_grad()
            step(images).square().mean().backward()
            for layer in layers(model):
                positions_after_forward.append(layer.positions.detach().clone())
            optimizer.step()
        results.append(positions_after_forward)
    assert all(positions.abs().max() <= 3 for positions in results[0])
    close(results[1], results[0], 1e-5)
