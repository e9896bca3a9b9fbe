"""What timm notes on its models."""

import pytest
import timm

from dcls_convert.networks.building import build_model, shapes_of
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
