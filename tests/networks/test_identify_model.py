"""The source from which a model could be built again, and the input size that it may take."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from dcls_convert.networks.building import build_model
from dcls_convert.networks.identify_model import assumed_input_size, infer_source
from dcls_convert.networks.source import ModelSource

from ..conftest import TINY


def test_a_plan_names_registered_models_alone():
    """A model that no registry can build again is its user's to build."""
    unnoted = timm.create_model(TINY, num_classes=3)
    # As by a timm that keeps arguments elsewhere: they cannot be guessed.
    del unnoted._model_args
    other = torchvision.models.resnet18(norm_layer=torch.nn.SyncBatchNorm)
    for model in (
        torch.nn.ReLU(),
        timm.create_model(TINY, act_layer=torch.nn.ReLU),
        unnoted,
        other,
    ):
        assert infer_source(model) is None
    changed = timm.create_model(TINY)
    changed.reset_classifier(3)
    assert infer_source(changed) == ModelSource(name=f"timm:{TINY}", args={"num_classes": 3})
    changed.head.fc = torch.nn.Linear(64, 5)
    assert infer_source(changed) is None
    for name, build in (
        (f"timm:{TINY}", timm.create_model),
        ("torchvision:resnet18", torchvision.models.get_model),
    ):
        known = ModelSource(name=name, args={"num_classes": 3})
        assert infer_source(build(name.partition(":")[2], num_classes=3)) == known


@pytest.mark.parametrize(
    ("name", "size"),
    {
        "resnet50": (3, 224, 224),
        # Its weights are for 518 pixels, without them it is built for 224.
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
def test_a_model_of_the_users_own_takes_what_its_convolutions_take(convs, size):
    assert assumed_input_size(ModelSource(name="mymodel:build"), nn.Sequential(*convs)) == size
