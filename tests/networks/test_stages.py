"""Stages from timm's group_matcher, from output strides, and from module paths."""

import pytest
import timm
import torchvision
from torch import nn

from dcls_convert import find_convs, plan_conversion
from dcls_convert.networks.stages import output_stride

from ..planning.nets import convs_of

IMAGE = (3, 224, 224)
GET = torchvision.models.get_model
MATCHER = "timm's group_matcher"
STRUCTURE = "output stride and module path"
PATH = "module path"


def small_densenet(_):
    return torchvision.models.DenseNet(
        growth_rate=4, block_config=(1, 1, 1, 1), num_init_features=8
    )


@pytest.mark.parametrize(
    ("build", "name", "source", "stages"),
    [
        (
            timm.create_model,
            "test_convnext",
            MATCHER,
            ["stages.0", "stages.1", "stages.2", "stages.3"],
        ),
        # timm's groups of these models are single layers and blocks.
        (
            timm.create_model,
            "vgg11",
            STRUCTURE,
            [f"features/stride{2**index}" for index in range(1, 5)],
        ),
        pytest.param(
            timm.create_model,
            "caformer_s18",
            STRUCTURE,
            ["stages.0", "stages.1"],
            marks=pytest.mark.slow,
        ),
        # torchvision's models have no group_matcher.
        (small_densenet, "densenet", STRUCTURE, [f"features.denseblock{i}" for i in range(1, 5)]),
        (GET, "convnext_tiny", STRUCTURE, [f"features/stride{4 * 2**i}" for i in range(4)]),
        (
            GET,
            "mnasnet0_5",
            STRUCTURE,
            "layers.8 layers.9 layers/stride16 layers/stride2 layers/stride32".split(),
        ),
    ],
)
def test_converted_layers_are_in_these_stages(build, name, source, stages):
    convs = convs_of(name, IMAGE, build)
    plan = plan_conversion(convs)
    assert plan.stages_from == source
    assert sorted({layer.stage for layer in plan.layers}) == sorted(stages)
    if name == "vgg11":
        outside = [site.name for site in convs.sites if site.stage is None]
        assert outside == [
            "features.0",
            "pre_logits.fc1",
            "pre_logits.fc2",
        ]  # the stem, and the head


def test_without_a_trace_the_stage_is_the_path_up_to_its_first_number():
    stages = {
        "conv1": None,  # the number of a layer, not of a stage
        "down_0.conv_0": "down_0",
        "features.3.1.block.0": "features.3",
        "body.stages.2.blocks.7.dw": "body.stages.2",
    }
    model = nn.Module()
    for path in stages:
        module = model
        *parents, last = path.split(".")
        for name in parents:
            module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        module.add_module(last, nn.Conv2d(4, 4, 3))
    convs = find_convs(model, (4, 32, 32))
    assert (convs.macs, convs.stages_from) == (None, PATH)
    assert {site.name: site.stage for site in convs.sites} == stages


class WithMatcher(nn.Sequential):
    def group_matcher(self, coarse=False):
        raise NotImplementedError


def test_without_stages_from_the_matcher_the_module_path_decides():
    model = WithMatcher(nn.Sequential(nn.Conv2d(4, 4, 3)))
    assert [site.stage for site in find_convs(model).sites] == ["0"]


class Versioned(nn.Module):
    """A network in a module whose name has a number."""

    def __init__(self, name):
        super().__init__()
        stages = (
            nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1, groups=4))
            for _ in range(3)
        )
        self.add_module(name, nn.ModuleDict({"stages": nn.Sequential(*stages)}))
        self.name = name

    def forward(self, x):
        return self.get_submodule(self.name)["stages"](x)


@pytest.mark.parametrize("name", ["netv2", "7"])
def test_the_number_of_a_whole_network_is_not_a_stage(name):
    """As in transformers' ConvNeXt V2, whose layers are below `convnextv2`."""
    convs = find_convs(Versioned(name), (4, 32, 32))
    assert convs.stages_from == STRUCTURE
    stages = [f"{name}.stages.{index}" for index in range(3) for _ in range(2)]
    assert [site.stage for site in convs.sites] == stages


def test_the_output_stride_is_a_power_of_two_however_borders_are_treated():
    assert output_stride((299, 299), (38, 35)) == (8, 8)


def test_a_child_of_several_resolutions_is_no_stage():
    """As in a U-Net, whose levels lie in one another."""
    level = nn.Sequential(
        nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1)
    )
    model = nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), level)
    stages = {site.name: site.stage for site in find_convs(model, (4, 32, 32)).sites}
    assert stages["1.0"] == "stride2"
    assert stages["1.1"] == stages["1.2"] == "stride4"


def test_a_backbone_that_timm_calls_a_stem_is_none():
    """The ResNet in front of a ViT is converted; the stem of a ResNet is not."""
    hybrid = {site.name for site in convs_of("vit_small_r26_s32_224").sites if site.stem}
    assert hybrid <= {"patch_embed.backbone.stem.conv"}
    assert {site.name for site in convs_of("resnet18d").sites if site.stem} == {
        "conv1.0",
        "conv1.3",
        "conv1.6",
    }
