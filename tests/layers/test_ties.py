"""The first layer of a tie group has the positions; torch and others need to know nothing of it."""

import copy
import io
import itertools

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel
from torchvision.models import mobilenet_v2
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.feature_extraction import create_feature_extractor

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d

from ..conftest import TINY
from .common import randn

EXPECTED_GROUPS = [[0], [1, 2], [3, 4, 5, 6], [7, 8]]  # depths 1, 2, 4, 2
OPTIONS = {"dilated_size": 9, "interpolation": "gaussian"}  # positions and sigmas are tied
FIRST_LAYERS = [f"stages.{stage}.blocks.0.conv_dw" for stage in range(4)]
IMAGE = randn(2, 3, 32, 32, dtype=torch.float32)


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(TINY, ls_init_value=1.0).eval()
    dcls_convert.convert_(model, **OPTIONS, init="random", seed=seed)
    return model


@pytest.fixture(scope="module")
def converted():
    return network()


@pytest.fixture(scope="module")
def converted_on_meta():
    with torch.device("meta"):
        model = timm.create_model(TINY, ls_init_value=1.0)
    dcls_convert.convert_(model, **OPTIONS)
    return model


def layers(model: nn.Module) -> list[DclsConv2d]:
    return [module for module in model.modules() if isinstance(module, DclsConv2d)]


def groups(model: nn.Module) -> list[list[int]]:
    """Group the indices of layers that use the same positions and the same sigma."""
    members: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(layers(model)):
        members.setdefault((id(layer.positions), id(layer.sigma)), []).append(index)
    return list(members.values())


@torch.no_grad()
def outputs(model, image=IMAGE):
    return model.eval()(image)


def assert_is_copy(model: nn.Module, original: nn.Module) -> None:
    """Check that the model has ties and tensors of its own, and the original's outputs."""
    assert groups(model) == EXPECTED_GROUPS
    state = model.state_dict(keep_vars=True)
    assert list(state) == list(original.state_dict())
    assert len({id(tensor) for tensor in state.values()}) == len(state)  # every tensor has one name
    assert not {id(p) for p in model.parameters()} & {id(p) for p in original.parameters()}
    assert {id(layer.positions) for layer in layers(model)} <= {id(p) for p in model.parameters()}
    assert torch.equal(outputs(model), outputs(original))


def saved_and_loaded(model, *, weights_only):
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def assigned(model, on_meta):
    on_meta.load_state_dict(saved_and_loaded(model.state_dict(), weights_only=True), assign=True)
    return on_meta


COPIES = {
    "another dtype and back": lambda model, _: copy.deepcopy(model).double().float(),
    "deepcopy of its container": lambda model, _: copy.deepcopy(nn.Sequential(nn.ReLU(), model))[1],
    "torch.save": lambda model, _: saved_and_loaded(model, weights_only=False),
    "meta and assign": assigned,
    "EMA": lambda model, _: ModelEmaV3(model).module,
    "SWA": lambda model, _: AveragedModel(model).module,
}


@pytest.mark.parametrize("way", COPIES)
def test_ties_survive_copying(converted, converted_on_meta, way):
    copied = COPIES[way](converted, copy.deepcopy(converted_on_meta))
    assert_is_copy(copied, converted)
    before = [layer.kernel() for layer in layers(copied)]
    first = copied.get_submodule(FIRST_LAYERS[2])
    # The parameter is replaced, not changed in place: layers look it up at each use.
    first.positions = nn.Parameter(first.positions.detach() + 0.4)
    changed = [
        not torch.equal(old, layer.kernel())
        for old, layer in zip(before, layers(copied), strict=True)
    ]
    assert [index for index, is_changed in enumerate(changed) if is_changed] == EXPECTED_GROUPS[2]


CHANGES = {
    "another dtype": {"dtype": torch.float64},
    "another memory format": {"memory_format": torch.channels_last},
    "both": {"dtype": torch.float16, "memory_format": torch.channels_last},
}


@pytest.mark.parametrize("change", CHANGES)
def test_ties_values_and_gradients_survive_conversions(converted, change):
    model = copy.deepcopy(converted)
    model(IMAGE).square().sum().backward()
    options = CHANGES[change]
    ids = [id(parameter) for parameter in model.parameters()]
    before = [
        (parameter.detach().clone(), parameter.grad.clone()) for parameter in model.parameters()
    ]
    assert model.to(**options) is model
    assert groups(model) == EXPECTED_GROUPS
    # Optimizers hold references to the parameters.
    assert [id(parameter) for parameter in model.parameters()] == ids
    for (name, parameter), (value, gradient) in zip(model.named_parameters(), before, strict=True):
        dtype = options.get("dtype", torch.float32)
        if name.endswith(("positions", "sigma")) and dtype != torch.float64:
            dtype = torch.float32  # not in half precision
        assert torch.equal(parameter, value.to(dtype))
        assert torch.equal(parameter.grad, gradient.to(dtype))


def test_positions_have_the_first_layers_names(converted):
    expected = {f"{name}.{kind}" for name in FIRST_LAYERS for kind in ("positions", "sigma")}
    for names in (converted.state_dict(), dict(converted.named_parameters())):
        assert {name for name in names if name.endswith(("positions", "sigma"))} == expected


def test_functional_calls_use_other_positions_for_all_layers_and_have_their_gradients(converted):
    model = copy.deepcopy(converted)
    parameters = dict(model.named_parameters())
    before = outputs(model)
    other = network(seed=1)
    called = functional_call(model, dict(other.named_parameters()), (IMAGE,))
    assert torch.equal(called, outputs(other))
    assert torch.equal(outputs(model), before)
    gradients = torch.func.grad(lambda values: functional_call(model, values, (IMAGE,)).sum())(
        parameters
    )
    model(IMAGE).sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_a_part_copied_without_the_first_layer_has_positions_of_its_own(converted):
    model = copy.deepcopy(converted)
    part = model.stages[2].blocks[1:]
    x = torch.randn(1, 48, 8, 8)
    copied = copy.deepcopy(part)
    assert [layer.is_tied for layer in layers(copied)] == [False, True, True]
    assert groups(copied) == [[0, 1, 2]]
    names = [name for name in copied.state_dict() if name.endswith("positions")]
    assert names == ["1.conv_dw.positions"]
    assert not any(name.endswith("positions") for name, _ in part.named_parameters())
    assert torch.equal(copied(x), part(x))
    model.get_submodule(FIRST_LAYERS[2]).positions.data.add_(1)
    assert not torch.equal(copied(x), part(x))
    alone = copy.deepcopy(part[1].conv_dw)
    assert {"positions", "sigma"} <= dict(alone.named_parameters()).keys()


def test_a_copy_that_comes_to_a_later_layer_first_has_the_same_names(converted):
    class Kept:
        def __init__(self, layer):
            self.layer = layer

        def keep(self, *_):
            pass

    model = copy.deepcopy(converted)
    for block in (2, 1):
        model.register_forward_hook(Kept(model.stages[2].blocks[block]).keep)
    copied = copy.deepcopy(model)
    assert_is_copy(copied, converted)
    first = copied.get_submodule(FIRST_LAYERS[2])
    assert {layer.owner for layer in layers(copied.stages[2])} == {first}


PARTS = {
    "layer getter": lambda model: IntermediateLayerGetter(model.features, {"18": "out"}),
    "fx extractor": lambda model: create_feature_extractor(model, ["features.18"]),
}


@pytest.fixture(scope="module")
def mobilenet():
    model = mobilenet_v2(width_mult=0.25)
    dcls_convert.convert_(model, dilated_size=5, init="random", input_size=(3, 32, 32))
    return model


@pytest.mark.parametrize("way", PARTS)
def test_parts_that_torchvision_makes_have_all_positions_once(mobilenet, way):
    part = PARTS[way](copy.deepcopy(mobilenet))
    used = {id(layer.positions) for layer in layers(part)}
    assert len(used) < len(layers(part))
    assert used <= {id(parameter) for parameter in part.parameters()}
    state = part.state_dict(keep_vars=True).values()
    assert len({id(tensor) for tensor in state}) == len(state)
    assert copy.deepcopy(part).state_dict().keys() == part.state_dict().keys()


def test_positions_are_read_on_the_layers_own_device_as_dataparallel_needs_it(converted):
    """Make replicas as nn.DataParallel does. Here the second device is meta, which needs no GPU."""
    model = copy.deepcopy(converted)
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, replicas[child])
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            setattr(replica, name, None if tensor is None else tensor.to("meta"))
    replica = replicas[model]
    assert replica.train()(torch.empty(1, 3, 32, 32, device="meta")).is_meta
    assert not model.stages[1].blocks[1].conv_dw.positions.is_meta


def test_a_tied_layer_is_exported():
    make = {"kernel_count": 3, "dilated_kernel_size": 5, "padding": 2}
    model = nn.Sequential(DclsConv2d(3, 3, **make), nn.GELU(), DclsConv2d(3, 3, **make))
    model[2].tie_(model[0])
    exported = torch.export.export(model.eval(), (IMAGE,)).module()
    torch.testing.assert_close(exported(IMAGE), outputs(model))
