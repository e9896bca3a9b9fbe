"""Whole networks in one container share no positions; the blocks of one network still do."""

import pytest
import timm
import torch
from torch import nn

from dcls_convert import convert_, find_convs, tuning

from ..planning.nets import on_meta

IMAGE = (3, 16, 16)
STRUCTURE = "output stride and module path"


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width=8):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.project = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return x + self.project(self.spatial(x))


class ScaledBlock(Block):
    def forward(self, x, scale):
        return x + super().forward(x * scale)


class Network(nn.Module):
    """It normalizes its input, so that the first convolution does not see the input itself."""

    def __init__(self, in_channels=3):
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.stem = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        return self.head(self.blocks(self.stem(self.norm(x))))


class FlatNetwork(nn.Module):
    """A network without numbered modules."""

    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 8, 3, padding=1)
        self.c3 = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.c3(self.c2(self.c1(x)))


def sequence():
    convs = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *convs)


class Ensemble(nn.Module):
    """The sum of its members, which are networks or lists of networks."""

    def __init__(self, *members):
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x):
        return sum(self.outputs(self.members, x))

    def outputs(self, members, x):
        for member in members:
            if isinstance(member, nn.ModuleList):
                yield from self.outputs(member, x)
            else:
                yield self.output(member, x)

    def output(self, member, x):
        return member(x)


class PreparedEnsemble(Ensemble):
    """What its members see is not an input itself."""

    def forward(self, x):
        return super().forward(x / 2)


class Streams(Ensemble):
    """Each member has an input of its own."""

    def forward(self, *inputs):
        return sum(map(self.output, self.members, inputs))


ENSEMBLES = {
    "ensemble": lambda: Ensemble(Network(), Network(), Network()),
    "ensemble of sequences": lambda: Ensemble(sequence(), sequence()),
    "ensemble without containers": lambda: Ensemble(FlatNetwork(), FlatNetwork()),
}


def paths_in(model):
    """Return the paths of the members."""
    return [f"members.{index}" for index in range(len(model.members))]


@pytest.mark.parametrize("name", ENSEMBLES)
def test_whole_networks_have_the_stages_that_they_have_alone(name):
    model = ENSEMBLES[name]()
    expected = {}
    for path in paths_in(model):
        for site in find_convs(model.get_submodule(path), IMAGE).sites:
            stage = f"{path}.{site.stage}" if site.stage else None
            expected[f"{path}.{site.name}"] = stage
    convs = find_convs(model, IMAGE)
    assert {site.name: site.stage for site in convs.sites} == expected
    assert convs.stages_from == f"{STRUCTURE} in each of {', '.join(paths_in(model))}"


def folds():
    return Ensemble(*(nn.ModuleList([Network(), Network()]) for _ in range(2)))


# A network, the number of parts in the paths of the networks inside, and what it takes.
SEVERAL = {
    "folds": (folds, 3, {"input_size": IMAGE}),
    "streams": (
        lambda: Streams(Network(5), Network(5)),
        2,
        {"example_inputs": (torch.rand(1, 5, 16, 16), torch.rand(1, 5, 16, 16))},
    ),
    "prepared input": (
        lambda: PreparedEnsemble(Network(5), Network(5)),
        2,
        {"input_size": (5, 16, 16)},
    ),
    "untraced": (lambda: Ensemble(Network(), Network()), 2, {}),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_no_stage_has_layers_of_two_networks(name):
    build, depth, inputs = SEVERAL[name]
    networks_in = {}  # by stage
    for site in find_convs(build(), **inputs).sites:
        if site.stage is not None:
            network = ".".join(site.name.split(".")[:depth])
            networks_in.setdefault(site.stage, set()).add(network)
    assert networks_in
    assert all(len(networks) == 1 for networks in networks_in.values())


class Conditioned(nn.Module):
    """Every block takes an input of the network, beside the map."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(3))

    def forward(self, x, scale):
        for block in self.blocks:
            x = block(x, scale)
        return x


class Branches(nn.Module):
    """A stem of parallel layers, and blocks."""

    def __init__(self):
        super().__init__()
        convs = [nn.Conv2d(3, 4, 3, padding=1) for _ in range(2)]
        self.stem = nn.ModuleList(nn.Sequential(conv, nn.ReLU()) for conv in convs)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(torch.cat([branch(x) for branch in self.stem], 1))


IMAGE_AND_SCALE = (torch.rand(1, 8, 16, 16), torch.rand(1, 8, 1, 1))
ORDINARY = {
    "blocks on the input": (
        lambda: nn.Sequential(Block(3), Block(3)),
        {"input_size": IMAGE},
    ),
    "branches of a stem": (Branches, {"input_size": IMAGE}),
    "blocks that take a scale": (Conditioned, {"example_inputs": IMAGE_AND_SCALE}),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_blocks_of_one_network_are_no_networks(name):
    build, inputs = ORDINARY[name]
    convs = find_convs(build(), **inputs)
    assert convs.stages_from == STRUCTURE
    stages = [site.stage for site in convs.sites if site.kind == "depthwise"]
    assert len(set(stages)) < len(stages)


def test_a_model_of_timm_is_one_network_and_has_its_own_stages_in_an_ensemble():
    two_stems = on_meta(timm.create_model, "crossvit_9_dagger_240")
    assert find_convs(two_stems).stages_from == STRUCTURE
    members = [timm.create_model("test_convnext") for _ in range(2)]
    convs = find_convs(Ensemble(*members), (3, 32, 32))
    assert convs.stages_from == "timm's group_matcher in each of members.0, members.1"
    stages = {site.stage for site in convs.sites if site.kind == "depthwise"}
    assert stages == {f"members.{i}.stages.{j}" for i in range(2) for j in range(4)}


def test_training_one_network_leaves_the_others_as_they_are():
    model = ENSEMBLES["ensemble"]()
    paths = paths_in(model)
    report = convert_(model, dilated_size=7, init="random", input_size=IMAGE, progress=False)
    stages = ", ".join(f"{path}.blocks/stride1" for path in paths)
    assert f"positions in {stages}." in " ".join(str(report).split())
    first, *others = map(model.get_submodule, paths)
    image = torch.rand(1, *IMAGE)
    before = [other.eval()(image) for other in others]
    optimizer = torch.optim.SGD(tuning.param_groups(first, lr=1.0))
    first(image).square().mean().backward()
    optimizer.step()
    for other, outputs in zip(others, before, strict=True):
        torch.testing.assert_close(other(image), outputs, rtol=0, atol=0)
