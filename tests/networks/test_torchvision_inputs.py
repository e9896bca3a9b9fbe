"""The input sizes that are assumed for models that state none."""

import pytest

from dcls_convert.networks.building import build_model
from dcls_convert.networks.source import ModelSource
from dcls_convert.networks.torchvision_inputs import assumed_inputs
from dcls_convert.running.input_spec import image_inputs


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
