"""Infer the source from which a model can be built again, and the input size that it takes."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from dcls_convert.networks.building import build_model
from dcls_convert.networks.identify_model import assumed_inputs, infer_source
from dcls_convert.networks.input_tensors import image_inputs
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


def test_an_edited_model_has_no_source_even_if_all_shapes_are_the_same():
    with_other_activations = timm.create_model("test_resnet")
    for name, module in list(with_other_activations.named_modules()):
        if isinstance(module, nn.ReLU):
            with_other_activations.set_submodule(name, nn.SiLU())
    without_pooling = timm.create_model(TINY, num_classes=0)
    without_pooling.head.global_pool = nn.Identity()
    with_other_epsilon = timm.create_model("test_resnet")
    with_other_epsilon.bn1.eps = 0.1
    assert infer_source(with_other_epsilon) is None
    assert infer_source(with_other_activations) is None
    assert infer_source(without_pooling) is None


def test_norms_of_distributed_training_are_no_edit():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(timm.create_model("test_resnet"))
    assert infer_source(model) == ModelSource(name="timm:test_resnet")


def test_classes_and_settings_of_a_tag_are_arguments():
    name = "mobilenetv3_small_050"
    tagged = timm.create_model(name, num_classes=21, device="meta")
    tagged.pretrained_cfg = {**tagged.pretrained_cfg, "num_classes": 21}
    tagged._model_args = {}
    source = infer_source(tagged)
    assert (source.name, source.args["num_classes"]) == (f"timm:{name}", 21)
    inception = build_model(ModelSource(name="torchvision:inception_v3"), device="meta")
    inception.transform_input = True
    rebuilt = build_model(infer_source(inception), device="meta")
    assert rebuilt.transform_input


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
