"""What is done to whole networks works on converted ones: memory formats, torch.fx, torch.compile, DataParallel."""

import copy
import functools
import pickle

import pytest
import timm
import torch
import torchvision
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d, DclsConvNd
from dcls_convert.planning.rules import parse_rules

from .common import close, randn


def layers(model):
    return [module for module in model.modules() if isinstance(module, DclsConvNd)]


# Memory formats.

FORMATS = {
    "one dense axis in 2-D": (
        functools.partial(timm.create_model, "inception_next_atto", num_classes=3),
        "{match: {kernel_size: [1, 9]}, dilated_kernel_size: [1, 13], dense_axes: [0]}",
        (3, 32, 32),
        torch.channels_last,
    ),
    "none dense in 3-D": (
        functools.partial(torchvision.models.video.mc3_18, num_classes=3),
        "{match: {kernel_size: [3, 3, 3]}, dilated_kernel_size: [3, 5, 5]}",
        (3, 4, 16, 16),
        torch.channels_last_3d,
    ),
}


@pytest.mark.parametrize("case", FORMATS)
def test_positions_and_elements_pass_through_memory_formats(case):
    build, rule, input_size, memory_format = FORMATS[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().eval()
        rules = parse_rules(f"format: 1\nrules: [{rule}]\n")
        dcls_convert.convert_(model, rules=rules, input_size=input_size, init="random")
    images = randn(1, *input_size, dtype=torch.float32)
    expected, before = model(images), copy.deepcopy(model.state_dict())
    assert any(layer.is_tied for layer in layers(model))
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        one.to(memory_format=memory_format)
        torch.testing.assert_close(one(images.to(memory_format=memory_format)), expected, rtol=1e-3, atol=1e-4)
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, before[name])
        for layer in layers(one):
            assert layer.weight.is_contiguous()
            assert layer.positions.is_contiguous()
        dense = next(module for module in one.modules() if type(module) in (nn.Conv2d, nn.Conv3d))
        assert dense.weight.is_contiguous(memory_format=memory_format)


def test_folding_leaves_nothing_of_ours_on_the_owners(tiny):
    own = {name: set(vars(module)) for name, module in tiny.named_modules()}
    dcls_convert.convert_(tiny, dilated_size=9, init="random")
    dcls_convert.fold_to_dense_(tiny)
    assert {name: set(vars(module)) for name, module in tiny.named_modules()} == own


# torch.fx.


def test_torchvision_extracts_features_of_a_converted_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torchvision.models.resnet18(num_classes=3)
        dcls_convert.convert_(model, dilated_size=7, input_size=(3, 64, 64), init="random")
    model.eval()
    images, names = randn(2, 3, 64, 64, dtype=torch.float32), ["layer1", "layer2", "layer3"]
    maps = model.maxpool(model.relu(model.bn1(model.conv1(images))))
    expected = {name: (maps := model.get_submodule(name)(maps)) for name in names}
    extractor = create_feature_extractor(model, names)
    used = [model.get_submodule(name) for name, module in extractor.named_modules() if isinstance(module, DclsConvNd)]
    tensors = {id(layer.positions) for layer in used}
    for one in (extractor, copy.deepcopy(extractor)):
        torch.testing.assert_close(one.eval()(images), expected, rtol=0, atol=0)
        # Everything that moves is registered, tied positions once.
        registered = {id(parameter) for parameter in one.parameters()}
        positions = [layer.positions for layer in layers(one)]
        assert {id(tensor) for tensor in positions} <= registered
        assert len({id(tensor) for tensor in positions}) == len(tensors)


# torch.compile.


class Pair(nn.Module):
    """Two layers with positions of their own and two that share them; a window of unequal sides."""

    def __init__(self):
        super().__init__()
        make = functools.partial(DclsConv2d, 2, 2, kernel_count=3)
        self.one = make(dilated_kernel_size=5, padding=2, interpolation="gaussian")
        self.two = make(dilated_kernel_size=(5, 7), padding=(2, 3), interpolation="triangle")
        self.three, self.four = (make(dilated_kernel_size=5, padding=2) for _ in range(2))
        self.shared = nn.Parameter(self.three.positions.detach().clone())
        for layer in (self.three, self.four):
            layer.tie_(self, {"positions": "shared"})

    def forward(self, x):
        return self.four(self.three(self.two(self.one(x))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # inductor's
@pytest.mark.parametrize(
    ("backend", "dtype", "atol"), [("aot_eager", torch.float64, 1e-12), ("inductor", torch.float32, 1e-5)]
)
def test_compiled_layers_keep_their_positions_inside_as_others_do(backend, dtype, atol):
    torch.compiler.reset()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = Pair().to(dtype)
    with torch.no_grad():
        for name, parameter in start.named_parameters():
            if name.endswith(("positions", "shared")):
                parameter.mul_(9)  # far outside
    images, results = randn(1, 2, 9, 9, dtype=dtype), []
    for compiled in (False, True):
        model = copy.deepcopy(start)
        step = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.01), []
        for _ in range(3):
            optimizer.zero_grad()
            step(images).square().mean().backward()
            seen += [layer.positions.detach().clone() for layer in layers(model)]
            optimizer.step()
        results.append(seen)
    assert all(positions.abs().max() <= 3 for positions in results[0])
    close(results[1], results[0], atol)


# DataParallel.


def test_a_replica_of_a_tied_layer_computes_on_its_own_device():
    """As nn.DataParallel makes replicas for each device; the second device is meta here, which needs no hardware."""
    stage = Pair()
    replicas = {module: module._replicate_for_data_parallel() for module in stage.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, replicas[child])
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.to("meta"))
    replica = replicas[stage]
    assert replica.three.positions.is_meta
    assert replica.train()(torch.empty(1, 2, 9, 9, device="meta")).is_meta
    assert stage.three.positions is stage.shared
