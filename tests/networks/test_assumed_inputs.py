"""The input sizes that are assumed for models that state none."""

import pytest
from torch import nn

from dcls_convert.networks.assumed_inputs import assumed_inputs
from dcls_convert.networks.building import build_model
from dcls_convert.networks.input_tensors import image_inputs
from dcls_convert.networks.source import ModelSource


@pytest.mark.parametrize(
    ("name", "size"),
    {
        "resnet50": (3, 224, 224),
        # Its weights are for 518 pixels; without them, it is built for 224.
        "vit_h_14": (3, 224, 224),
        "deeplabv3_mobilenet_v3_large": (3, 520, 520),
    }.items(),
)
def test_assumed_input_sizes(name, size):
    source = ModelSource(name=f"torchvision:{name}")
    assert assumed_inputs(source, build_model(source, device="meta")) == image_inputs(size)


def test_optical_flow_is_from_one_image_to_the_next():
    source = ModelSource(name="torchvision:raft_small")
    inputs = assumed_inputs(source, build_model(source, device="meta"))
    assert inputs == image_inputs((3, 224, 224)) * 2


@pytest.mark.parametrize(
    ("convs", "size"),
    [
        ([nn.Conv2d(4, 8, 3), nn.Conv2d(3, 4, 3)], (3, 224, 224)),  # the stem is registered last
        ([nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)], (1, 224, 224)),
        ([nn.LazyConv2d(4, 3)], (3, 224, 224)),
        ([nn.Conv3d(1, 4, 3), nn.Conv2d(4, 4, 3)], None),
    ],
    ids=str,
)
def test_the_assumed_size_of_a_users_model_fits_its_convolutions(convs, size):
    inputs = None if size is None else image_inputs(size)
    assert assumed_inputs(ModelSource(name="mymodel:build"), nn.Sequential(*convs)) == inputs
