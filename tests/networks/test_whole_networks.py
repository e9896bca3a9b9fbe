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
    """A residual block; with `expand`, its first layer is wider, as in MobileNet."""

    def __init__(self, width=8, *, expand=False):
        super().__init__()
        inner = 4 * width if expand else width
        self.expand = nn.Conv2d(width, inner, 1) if expand else nn.Identity()
        self.spatial = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.project = nn.Conv2d(inner, width, 1)

    def forward(self, x):
        return x + self.project(self.spatial(self.expand(x)))


class InPlaceBlock(Block):
    def forward(self, x):
        return x.add_(super().forward(x))


class ScaledBlock(Block):
    def forward(self, x, scale):
        return x + super().forward(x * scale)


class PictureBlock(Block):
    """Its first convolution sees a picture, which is not all that it takes."""

    def __init__(self):
        super().__init__()
        self.widen = nn.Conv2d(3, 8, 1)

    def forward(self, x, picture):
        return x + super().forward(self.widen(picture) * x)


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


def sequence(in_channels=3):
    convs = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1), nn.ReLU(), *convs)


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


class EnsembleOfParts(Ensemble):
    """Its members are not called, but their parts are."""

    def output(self, member, x):
        return member.head(member.blocks(member.stem(x / 2)))


class PreparedEnsemble(Ensemble):
    """What its members see is not an input itself."""

    def forward(self, x):
        return super().forward(x / 2)


class Streams(Ensemble):
    """Each member has an input of its own."""

    def forward(self, *inputs):
        return sum(map(self.output, self.members, inputs))


class Generator(nn.Module):
    """It begins with a linear layer, and its pictures are larger than its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 8 * 16 * 16)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, noise):
        return self.head(self.blocks(self.linear(noise).reshape(-1, 8, 16, 16)))


ENSEMBLES = {
    "ensemble": lambda: Ensemble(Network(), Network(), Network()),
    "ensemble of sequences": lambda: Ensemble(sequence(), sequence()),
    "ensemble without containers": lambda: Ensemble(FlatNetwork(), FlatNetwork()),
    "ensemble of parts": lambda: EnsembleOfParts(Network(), Network()),
    "generator and discriminator": lambda: nn.Sequential(Network(), Network()),
}


def paths_in(model):
    """Return the paths of the members, or of the children of a sequence."""
    prefix = "members." if isinstance(model, Ensemble) else ""
    return [f"{prefix}{index}" for index in range(len(getattr(model, "members", model)))]


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


# A network, the number of parts in the paths of the networks inside, and what it takes. Five
# channels are an input, but no picture.
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
    "from noise": (
        lambda: nn.Sequential(Generator(), Network()),
        1,
        {"example_inputs": torch.rand(1, 5)},
    ),
    "untraced": (lambda: Ensemble(Network(), Network()), 2, {}),
    "untraced folds": (folds, 3, {}),
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

    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x, other):
        for block in self.blocks:
            x = block(x, other)
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


ORDINARY = {
    "blocks on the input": (lambda: nn.Sequential(Block(3), Block(3)), IMAGE),
    "blocks of the input's width": (lambda: nn.Sequential(Block(), Block()), (8, 16, 16)),
    "residual groups": (
        lambda: nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(3))),
        (8, 16, 16),
    ),
    "in-place blocks": (lambda: nn.Sequential(InPlaceBlock(), InPlaceBlock()), (8, 16, 16)),
    "narrow expanding blocks": (
        lambda: nn.Sequential(*(Block(4, expand=True) for _ in range(3))),
        (4, 16, 16),
    ),
    "narrow stages": (
        lambda: nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(width, 2 * width, 1), Block(2 * width), Block(2 * width))
                for width in (1, 2, 4)
            )
        ),
        (1, 16, 16),
    ),
    "branches of a stem": (Branches, IMAGE),
    "blocks that take a scale": (lambda: Conditioned(ScaledBlock), (8, 1, 1)),
    "blocks that take a picture": (lambda: Conditioned(PictureBlock), IMAGE),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_blocks_of_one_network_are_no_networks(name):
    build, input_size = ORDINARY[name]
    model = build()
    inputs = {"input_size": input_size}
    if isinstance(model, Conditioned):
        inputs = {"example_inputs": (torch.rand(1, 8, 16, 16), torch.rand(1, *input_size))}
    convs = find_convs(model, **inputs)
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


@pytest.mark.parametrize("name", ["ensemble", "generator and discriminator"])
def test_training_one_network_leaves_the_others_as_they_are(name):
    model = ENSEMBLES[name]()
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
