"""Small networks, and one site, for tests of plans."""

import functools

import timm
import torch
from torch import nn

from dcls_convert.networks.find_convs import find_convs
from dcls_convert.networks.sites import ConvSite
from dcls_convert.planning.planner import plan_conversion

IMAGE = (4, 9, 14)
SITE = ConvSite(
    names=("stages.1.blocks.0.dw", "shared.dw"),
    type="Conv2d",
    kind="depthwise",
    stage="stages.1",
    stem=False,
    in_channels=8,
    out_channels=16,
    groups=8,
    kernel_size=(3, 5),
    stride=(2, 1),
    padding=(1, 2),
    dilation=(1, 3),
    padding_mode="zeros",
    bias=True,
    input_extent=(8, 7),
    output_positions=28,
)


def depthwise(size=3, channels=4, **options):
    return nn.Conv2d(
        channels, channels, size, **({"padding": "same", "groups": channels} | options)
    )


class Net(nn.Module):
    """A stem and two stages; `convs` is called for each stage, so that it has its own modules."""

    def __init__(self, convs=lambda: [depthwise(), depthwise(), depthwise(5)]):
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 1)
        self.layer1 = nn.Sequential(*convs())
        self.layer2 = nn.Sequential(*convs())

    def forward(self, x):
        return self.layer2(self.layer1(self.stem(x)))


class Shared(nn.Module):
    """A network that has one convolution in two places; if not `shared`, two of the same shape."""

    def __init__(self, shared=True):
        super().__init__()
        self.first = depthwise()
        self.stages = nn.ModuleList(
            [nn.Sequential(self.first if shared else depthwise()), nn.Sequential(depthwise())]
        )
        self.stages.append(self.stages[0])

    def forward(self, x):
        for stage in self.stages:
            x = stage(self.first(x))
        return x


def plan_of(module, input_size=IMAGE, /, dilated_size=7, **options):
    return plan_conversion(find_convs(module, input_size), dilated_size=dilated_size, **options)


def on_meta(build, *arguments, **options):
    with torch.device("meta"):
        return build(*arguments, **options)


@functools.cache
def convs_of(name, input_size=(3, 224, 224), build=timm.create_model):
    """The convolutions of a model from a registry, without weights."""
    return find_convs(on_meta(build, name), input_size)
