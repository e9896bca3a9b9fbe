"""What a report says of the outputs before and after the conversion."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from dcls_convert import convert_
from dcls_convert.conversion.before_and_after import stated_classes

from ..conftest import TINY
from .networks import NOISE, small_model


def without_classifier(model):
    model.fc = nn.Identity()
    return model


@pytest.mark.parametrize(
    ("build", "num_classes"),
    [
        (lambda: timm.create_model(TINY, num_classes=4), 4),
        (lambda: timm.create_model(TINY, num_classes=0), 0),
        (lambda: timm.create_model(TINY, features_only=True), 0),
        (lambda: torchvision.models.resnet18(num_classes=4), 4),
        (lambda: without_classifier(torchvision.models.resnet18()), 0),
        (lambda: torchvision.models.squeezenet1_1(num_classes=4), 4),
        (small_model, None),
    ],
)
def test_a_library_says_how_many_classes_its_network_ranks_and_a_user_does_not(build, num_classes):
    with torch.device("meta"):
        assert stated_classes(build()) == num_classes


@pytest.mark.parametrize(
    ("build", "defined"),
    [
        (lambda: timm.create_model(TINY, num_classes=4), {"same_top1", "kl", "output_error"}),
        (lambda: timm.create_model(TINY, num_classes=0), {"output_error"}),
        (small_model, {"same_largest", "output_error"}),
    ],
)
def test_a_report_states_only_what_is_defined_for_the_outputs(build, defined):
    images = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    options = {"dilated_size": 9, "kernel_count": 2, "input_size": (3, 32, 32)}
    report = convert_(build(), **options, calibration=images[3:], held_out=images[:3])
    outcome = report.to_dict()["outcome"]
    for agreement in (outcome, outcome["shifted"]):
        numbers = {key for key, value in agreement.items() if value is not None}
        assert numbers - {"kernel_error", "images", "layer_error", "shifted"} == defined
    # The layer scales of a new network hide its layers from the outputs.
    errors = [layer.output_error for layer in report.layers]
    assert outcome["layer_error"] == pytest.approx(sum(errors) / len(errors))
    assert outcome["layer_error"] > 0.1


def test_a_report_states_nothing_on_outputs_if_no_image_is_held_out():
    report = convert_(small_model(), dilated_size=5, calibration=NOISE, held_out=())
    outcome = report.to_dict()["outcome"]
    numbers = {key: value for key, value in outcome.items() if value is not None}
    assert numbers.keys() == {"kernel_error", "images", "layer_error"}
    assert numbers["images"] == 0
