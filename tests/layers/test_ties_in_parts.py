"""No position is lost when a network is taken apart below the owner of its ties."""

import copy

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.func import functional_call
from torchvision.models import mobilenet_v2
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.backbone_utils import _mobilenet_extractor
from torchvision.models.feature_extraction import create_feature_extractor

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d

LAST = "18"  # torchvision's name of the last child of MobileNetV2's features, which own the ties


def middle_slice(network):
    """Return a part that begins after the first layer of its tie groups."""
    return network.features[5:12]


PARTS = {
    "children": lambda network: nn.Sequential(*network.features),
    "slice": middle_slice,
    "layer getter": lambda network: IntermediateLayerGetter(network.features, {LAST: "out"}),
    "fx extractor": lambda network: create_feature_extractor(network, [f"features.{LAST}"]),
    "pyramid": lambda network: _mobilenet_extractor(network, True, 6),
}
INPUTS = {"slice": (2, 32, 8, 8)}
IMAGES = (2, 3, 64, 64)


def network_of(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = mobilenet_v2(width_mult=1.0)
    dcls_convert.convert_(network, dilated_size=5, init="random", seed=seed, input_size=(3, 64, 64))
    return network


@pytest.fixture(scope="module")
def networks():
    return network_of(0), network_of(1)


@pytest.fixture(params=PARTS)
def case(request, networks):
    """Return a part of one network, the same part of another network, and an input."""
    part, other = (PARTS[request.param](copy.deepcopy(network)).eval() for network in networks)
    generator = torch.Generator().manual_seed(0)
    return part, other, torch.randn(INPUTS.get(request.param, IMAGES), generator=generator)


def layers(part):
    return [module for module in part.modules() if isinstance(module, DclsConv2d)]


def outputs(part, images):
    result = part(images)
    return list(result.values()) if isinstance(result, dict) else [result]


def test_positions_stay_parameters(case):
    part, _, images = case
    names = [name for name, _ in part.named_parameters()]
    assert len(names) == len(set(names))
    ids = [id(parameter) for parameter in part.parameters()]
    assert {id(layer.positions) for layer in layers(part)} <= set(ids)
    assert len(ids) == len(set(ids))
    optimizer = torch.optim.SGD(part.parameters(), lr=1.0)
    before = [layer.positions.detach().clone() for layer in layers(part)]
    sum(output.square().mean() for output in outputs(part.train(), images)).backward()
    optimizer.step()
    for layer, old in zip(layers(part), before, strict=True):
        assert not torch.equal(layer.positions, old)


def test_positions_stay_in_the_state_dict(case):
    part, other, images = case
    state = copy.deepcopy(part.state_dict())
    other.load_state_dict(state)
    with torch.no_grad():
        assert all(map(torch.equal, outputs(part, images), outputs(other, images)))
    incomplete = {name: tensor for name, tensor in state.items() if "positions" not in name}
    assert len(incomplete) < len(state)
    with pytest.raises(RuntimeError, match="positions"):
        other.load_state_dict(incomplete)


def test_positions_follow_conversions(case):
    part, _, images = case
    with torch.no_grad():
        expected = outputs(part, images)
        part.double()
        assert {layer.positions.dtype for layer in layers(part)} == {torch.float64}
        for output, old_output in zip(outputs(part, images.double()), expected, strict=True):
            torch.testing.assert_close(output.float(), old_output, rtol=1e-3, atol=1e-4)


def test_copies_averages_and_functional_calls_keep_positions(case):
    part, other, images = case
    assert list(copy.deepcopy(part).state_dict()) == list(part.state_dict())
    average = ModelEmaV3(part, decay=0.0)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.mul_(0.5)
    average.update(part)
    with torch.no_grad():
        expected = outputs(part, images)
        assert all(map(torch.equal, outputs(average.module, images), expected))
        parameters = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        before = outputs(other, images)
        result = functional_call(other, parameters, (images,))
        result = list(result.values()) if isinstance(result, dict) else [result]
        assert all(map(torch.equal, result, expected))
        assert all(map(torch.equal, outputs(other, images), before))  # its own parameters again


def test_a_whole_network_names_its_tied_positions_once(networks):
    network = networks[0]
    names = [name for name in network.state_dict() if "positions" in name]
    assert names
    assert any(name.startswith("features.dcls_positions") for name in names)
    assert len(names) < len(layers(network))
    assert [name for name, _ in network.named_parameters() if "positions" in name] == names
    state = network.state_dict()
    for name in names:
        incomplete = {key: tensor for key, tensor in state.items() if key != name}
        missing, unexpected = copy.deepcopy(network).load_state_dict(incomplete, strict=False)
        assert (missing, unexpected) == ([name], [])
