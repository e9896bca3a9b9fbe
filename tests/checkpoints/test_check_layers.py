"""A layer is what its plan says: a network whose layers were changed after its conversion loads
with the same outputs, or is refused, and what the refusal says ends in a folder that does.
"""

import copy
import dataclasses
import functools
import re
import warnings

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn.utils import parametrize, prune

import dcls_convert
from dcls_convert import convert_, load_converted, save_converted
from dcls_convert.checkpoints.check_layers import FOLD_ALL, UNDO
from dcls_convert.checkpoints.folder import open_folder
from dcls_convert.errors import CheckpointError

from ..rules import rules_of
from .folders import outputs

CHANNELS = 8


class Block(nn.Module):
    def __init__(self, channels=CHANNELS, **settings):
        super().__init__()
        settings = {"padding": 1, "groups": channels, "bias": False, **settings}
        self.dw = nn.Conv2d(channels, channels, 3, **settings)
        self.bn = nn.BatchNorm2d(channels)
        self.pw = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return x + self.pw(torch.relu(self.bn(self.dw(x))))


def own(**settings):
    stages = []
    for _ in range(2):
        stages.append(nn.Sequential(*[Block(**settings) for _ in range(3)]))
        stages.append(nn.MaxPool2d(2))
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 2, 2), *stages)


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(3):
            self.blocks.append(nn.Conv2d(3, 3, (1, 3), padding=(0, 2), groups=3))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x)[..., : x.shape[-1]])
        return x


NETWORKS = {
    "timm depthwise": lambda: timm.create_model("test_convnext", num_classes=5),
    "timm dense": lambda: timm.create_model("test_resnet", num_classes=5),
    "torchvision": lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=5),
    "own": own,
    "own, circular": lambda: own(padding_mode="circular", bias=True),
    "own, causal": Causal,
}

SOURCES = {"torchvision": "torchvision:shufflenet_v2_x0_5"}


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NETWORKS[name]()
        for module in model.modules():  # so that outputs depend on all layers
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_mean, -0.2, 0.2)
            if hasattr(module, "gamma"):
                nn.init.ones_(module.gamma)
        return model.eval()


@functools.cache
def conversion(name):
    model = build(name)
    return model, convert_(model, dilated_size="+4", init="random", input_size=(3, 64, 64)).plan


def converted(name):
    model, plan = conversion(name)
    return copy.deepcopy(model), plan


def set_all(**attributes):
    def change(model, names):
        for name in names:
            for attribute, value in attributes.items():
                setattr(model.get_submodule(name), attribute, value)

    return change


def each(make):
    """Return a change that puts what `make` returns for a layer into the layer's place."""

    def change(model, names):
        for name in names:
            model.set_submodule(name, make(model.get_submodule(name)))

    return change


def one(make):
    """Return a change as `each`, of the first layer alone."""
    return lambda model, names: each(make)(model, names[:1])


def dilate(layer):
    layer.dilation = 2
    layer.padding = tuple(2 * cells for cells in layer.padding)
    return layer


def prune_half(layer):
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


def halved(layer):
    parametrize.register_parametrization(layer, "weight", Half())
    return layer


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def with_bias(layer):
    layer.bias = nn.Parameter(torch.linspace(-1, 1, layer.out_channels))
    return layer


def with_larger_window(layer):
    channels = (layer.in_channels, layer.out_channels)
    size = [side + 2 for side in layer.dilated_kernel_size]
    settings = {"padding": "same", "groups": layer.groups}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return type(layer)(*channels, kernel_count=3, dilated_kernel_size=size, **settings)


class Doubled(dcls_convert.DclsConv2d):
    def forward(self, input):
        return 2 * super().forward(input)


def of_own_class(layer):
    layer.__class__ = Doubled
    return layer


def doubled_by_a_forward(layer):
    forward = layer.forward
    layer.forward = lambda input: 2 * forward(input)
    return layer


def replaced(layer):
    return nn.Conv2d(layer.in_channels, layer.out_channels, 1, layer.stride)


def cut(layer):
    layer.weight = nn.Parameter(layer.weight[..., 1:-1, 1:-1].detach())
    return layer


def hooked(layer):
    layer.register_forward_hook(lambda _, inputs, output: 2 * output)
    return layer


def share(model, names):
    model.set_submodule(names[1], model.get_submodule(names[0]))


def append(model, names):
    model.add_module("extra", copy.deepcopy(model.get_submodule(names[0])))


def tie_to_another(model, names):
    first = model.get_submodule(names[0])
    for name in names[1:]:
        layer = model.get_submodule(name)
        if not layer.is_tied and layer.positions.shape == first.positions.shape:
            layer.tie_(first)


def share_weights(model, names):
    first, second = map(model.get_submodule, names[:2])
    if first.weight.shape == second.weight.shape:
        second.weight = first.weight


def with_forward_of_its_class(layer):
    """Do what accelerate does when it removes its hooks."""
    layer.forward = layer.forward
    return layer


def train(layer):
    with torch.no_grad():
        layer.weight.mul_(0.9)
        if not layer.is_tied:
            layer.positions.add_(layer.weight.mean())  # another step for each layer
        layer.bias = layer.bias if layer.bias is None else nn.Parameter(layer.bias + 1)
    return layer.requires_grad_(False)


CHANGES = {
    "dilation": each(dilate),
    "a bias": each(with_bias),
    "masks": each(prune_half),
    "a parametrisation": each(halved),
    "copies": each(copy.deepcopy),
    "other ties": tie_to_another,
    "shared weights": share_weights,
    "a forward of its class": each(with_forward_of_its_class),
    "one folded": one(lambda layer: layer.fuse()),
    "all folded": each(lambda layer: layer.fuse()),
    "a larger window": one(with_larger_window),
    "one replaced": one(replaced),
    "one wrapped": one(lambda layer: nn.Sequential(layer, nn.Tanh())),
    "one shared": share,
    "one more": append,
    "a forward": each(doubled_by_a_forward),
    "a class of one's own": each(of_own_class),
    "a hook": each(hooked),
    "a training": each(train),
    "integers": set_all(stride=1),
}


def outputs_or_none(model):
    try:
        return outputs(model)
    except RuntimeError:  # it does not run any more
        return None


def follow(message, model, plan):
    """Do what a message says; return the model and the plan to save."""
    name, cure = re.search(r"fit its plan: (.*?): .*To save it, (.*)$", message).groups()
    window = next((layer.dilated_size for layer in plan.layers if layer.name == name), None)
    if cure.startswith(FOLD_ALL) and model.get_submodule(name).weight.shape[2:] == window:
        dcls_convert.fold_to_dense_(model)
        return model, dataclasses.replace(plan, folded=True)
    if found := re.search(r"plan\.(without|untied)\(.*?\)", cure):
        return model, eval(found[0])
    if cure == "give copy.deepcopy(model)":
        return copy.deepcopy(model), plan
    raise AssertionError(message)


def save_as_told(network, model, plan, folder):
    """Save, and follow what refusals say.

    Returns the model that was saved, or None if the change is to be made elsewhere; and what was
    told.
    """
    told = []
    while len(told) < 20:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                save_converted(model, plan, folder, source=SOURCES.get(network))
            told += [str(warning.message) for warning in caught]
            return model, told
        except CheckpointError as refusal:
            told.append(str(refusal))
            if UNDO in told[-1]:
                return None, told
            model, plan = follow(told[-1], model, plan)
    raise AssertionError(told)


def make_the_change_again(network, change, expected, folder):
    """Do what UNDO says: make a change in what is loaded."""
    model, plan = converted(network)
    save_converted(model, plan, folder / "before", source=SOURCES.get(network), check=False)
    loaded = load_converted(folder / "before", model=build(network))
    CHANGES[change](loaded, [layer.name for layer in plan.layers])
    torch.testing.assert_close(outputs_or_none(loaded), expected)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "network",
    ["own", *[pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS if name != "own"]],
)
def test_changed_layers_load_with_equal_outputs_or_are_refused_with_a_cure_that_works(
    network, change, tmp_path
):
    model, plan = converted(network)
    names = [layer.name for layer in plan.layers]
    CHANGES[change](model, names)
    expected = outputs_or_none(model)
    saved, told = save_as_told(network, model, plan, tmp_path / "changed")
    if saved is None:
        make_the_change_again(network, change, expected, tmp_path)
        return
    torch.testing.assert_close(outputs(saved), expected, rtol=1e-4, atol=1e-5)
    unconverted = build(network)
    is_folded = open_folder(tmp_path / "changed").plan.folded
    if not is_folded and any("with the same" in sentence for sentence in told):
        CHANGES[change](unconverted, names)
    loaded = load_converted(tmp_path / "changed", model=unconverted)
    torch.testing.assert_close(outputs(loaded), outputs(saved))


FOLDED = ("dilation", "masks", "cut kernels")
CHANGES_OF_FOLDED = {**CHANGES, "cut kernels": each(cut)}


@pytest.mark.parametrize("change", FOLDED)
def test_changed_folded_layers_are_refused_with_a_cure_that_works(change, tmp_path):
    model, plan = converted("own")
    dcls_convert.fold_to_dense_(model)
    plan = dataclasses.replace(plan, folded=True)
    undone = copy.deepcopy(model)
    names = [layer.name for layer in plan.layers]
    CHANGES_OF_FOLDED[change](model, names)
    expected = outputs_or_none(model)
    saved, told = save_as_told("own", model, plan, tmp_path / "changed")
    assert "the model does not fit its plan: 1.0.dw: " in told[0]
    folder = tmp_path / "changed"
    if saved is None:
        folder = save_converted(undone, plan, tmp_path / "undone")
    loaded = load_converted(folder, model=build("own"))
    if saved is None:
        CHANGES_OF_FOLDED[change](loaded, names)
    torch.testing.assert_close(outputs_or_none(loaded), expected)


@pytest.mark.parametrize("index", [0, 2])
def test_a_removed_block_is_left_out_as_the_messages_say(index, tmp_path):
    """The layers behind it have other names then, and those that read its positions keep them."""
    model, plan = converted("own")
    del model[1][index]
    expected = outputs(model)
    _, told = save_as_told("own", model, plan, tmp_path / "out")
    assert told
    unconverted = build("own")
    del unconverted[1][index]
    loaded = load_converted(tmp_path / "out", model=unconverted)
    torch.testing.assert_close(outputs(loaded), expected)


def test_positions_that_were_rounded_in_a_part_of_a_tie_group_are_said(tmp_path):
    model = build("own")
    options = {"interpolation": "triangle", "init": "random", "input_size": (3, 64, 64)}
    plan = convert_(model, dilated_size="+4", **options).plan
    dcls_convert.tuning.round_positions_(model[1][0])
    with pytest.raises(CheckpointError, match=r"is triangle, and 1\.0\.dw is bilinear\. .*round_p"):
        save_converted(model, plan, tmp_path / "out")
    dcls_convert.tuning.round_positions_(model)  # the cure
    save_converted(model, plan, tmp_path / "out")


# Changes that make another network, which can be converted.
ANY_PADDING = rules_of({"match": {"kind": "depthwise"}, "padding": "any"})
EARLY = ("dilation", "a bias", "one wrapped")


@pytest.mark.parametrize("change", EARLY)
def test_a_change_before_the_conversion_is_part_of_it(change, tmp_path):
    names = [layer.name for layer in conversion("own")[1].layers]
    changed = build("own")
    CHANGES[change](changed, names)
    model = copy.deepcopy(changed)
    plan = convert_(model, dilated_size="+4", init="random", rules=ANY_PADDING).plan
    folder = save_converted(model, plan, tmp_path / "changed", check=False)
    loaded = load_converted(folder, model=changed)
    torch.testing.assert_close(outputs_or_none(loaded), outputs_or_none(model))
    with pytest.raises(
        CheckpointError,
        match=r"the plan does not fit the model: .*; give the unconverted network as",
    ):
        load_converted(folder, model=build("own"))


def share_a_block(model):
    model[1][1] = model[1][0]


def share_a_weight(model):
    model[1][1].pw.weight = model[1][0].pw.weight


def standardise(model):
    old = model[1][0].dw
    settings = {"padding": 1, "groups": old.groups, "bias": False}
    model[1][0].dw = timm.layers.StdConv2d(old.in_channels, old.out_channels, 3, **settings)


OTHERS = {
    share_a_block: "the model has one module for several layers",
    share_a_weight: r"1\.0\.pw\.weight and 1\.1\.pw\.weight are one tensor in the model",
    standardise: r"transform is 'standardised', the plan has 'nothing'",
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_folder_does_not_load_into_a_network_that_shares_or_standardises(change, tmp_path):
    model = build("own")
    plan = convert_(model, dilated_size="+4", init="random", input_size=(3, 64, 64)).plan
    folder = save_converted(model, plan, tmp_path / "out", check=False)
    other = build("own")
    change(other)
    with pytest.raises(CheckpointError, match=OTHERS[change]):
        load_converted(folder, model=other)
