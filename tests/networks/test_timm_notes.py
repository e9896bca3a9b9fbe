"""What a name means as MODEL, and what timm notes on its models."""

import re

import pytest
import timm

from dcls_convert.errors import ModelError
from dcls_convert.networks.building import build_model, shapes_of
from dcls_convert.networks.source import ModelSource, resolve_model
from dcls_convert.networks.timm_notes import stated_source

from ..conftest import TINY


@pytest.mark.parametrize(
    "args",
    [{}, {"num_classes": 3, "in_chans": 1}, {"num_classes": 0}],
    ids=str,
)
@pytest.mark.parametrize("name", [TINY, "test_resnet", "test_vit"])
def test_timm_says_how_it_built_a_model(name, args):
    model = timm.create_model(name, **args, device="meta")
    source = stated_source(model)
    assert source.name == f"timm:{name}"
    rebuilt = build_model(source, device="meta")
    assert shapes_of(rebuilt) == shapes_of(model)
    assert repr(rebuilt) == repr(model)


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
