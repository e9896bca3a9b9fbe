"""Infer the source from which a model can be built again, and the input size that it takes."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from dcls_convert.networks.building import build_model
from dcls_convert.networks.identify_model import assumed_input_size, infer_source
from dcls_convert.networks.source import ModelSource

from ..conftest import TINY


def test_only_a_model_that_a_registry_can_build_again_has_a_source():
    """All other models must be built by their user."""
    without_args = timm.create_model(TINY, num_classes=3)
    # As if timm kept the arguments elsewhere: they cannot be guessed.
    del without_args._model_args
    with_other_norms = torchvision.models.resnet18(norm_layer=torch.nn.SyncBatchNorm)
    for model in (
        torch.nn.ReLU(),
        timm.create_model(TINY, act_layer=torch.nn.ReLU),
        without_args,
        with_other_norms,
    ):
        assert infer_source(model) is None
    with_new_head = timm.create_model(TINY)
    with_new_head.reset_classifier(3)
    assert infer_source(with_new_head) == ModelSource(name=f"timm:{TINY}", args={"num_classes": 3})
    with_new_head.head.fc = torch.nn.Linear(64, 5)
    assert infer_source(with_new_head) is None
    for name, build in (
        (f"timm:{TINY}", timm.create_model),
        ("torchvision:resnet18", torchvision.models.get_model),
    ):
        source = ModelSource(name=name, args={"num_classes": 3})
        assert infer_source(build(name.partition(":")[2], num_classes=3)) == source


@pytest.mark.parametrize(
    ("name", "size"),
    {
        "resnet50": (3, 224, 224),
        # Its weights are for 518 pixels; without them, it is built for 224.
        "vit_h_14": (3, 224, 224),
        "deeplabv3_mobilenet_v3_large": (3, 520, 520),
        "raft_small": (3, 224, 224),  # nothing is stated
    }.items(),
)
def test_assumed_input_sizes(name, size):
    source = ModelSource(name=f"torchvision:{name}")
    assert assumed_input_size(source, build_model(source, device="meta")) == size


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
    assert assumed_input_size(ModelSource(name="mymodel:build"), nn.Sequential(*convs)) == size
