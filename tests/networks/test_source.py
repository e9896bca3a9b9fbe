"""What a name means as MODEL."""

import re

import pytest

from dcls_convert.errors import ModelError
from dcls_convert.networks.building import build_model
from dcls_convert.networks.source import ModelSource, resolve_model


def test_pretrained_inceptions_normalise_their_inputs():
    source = resolve_model("torchvision:inception_v3", pretrained=True)
    assert build_model(source, device="meta").transform_input
    assert resolve_model("torchvision:inception_v3") == ModelSource(name="torchvision:inception_v3")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./mine", "is a path; a folder in timm's format is local-dir:./mine"),
        ("model.safetensors", "is a weights file; name its model, and add --checkpoint model"),
        ("./my/module.py:build", "name the module, not its file: my.module:build"),
    ],
)
def test_a_path_as_model_is_refused_with_what_takes_it(name, says):
    with pytest.raises(ModelError, match=re.escape(says)):
        resolve_model(name)
