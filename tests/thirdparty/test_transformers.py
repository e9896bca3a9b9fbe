"""transformers' own saving and loading of a converted model."""

import json

import pytest
import torch

from dcls_convert import ConversionPlan, apply_plan_, convert_, tuning
from dcls_convert.layers.dcls_conv import DclsConvNd

pytestmark = pytest.mark.thirdparty
transformers = pytest.importorskip("transformers", reason="not installed", exc_type=ImportError)
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


class DclsConvNextForImageClassification(transformers.ConvNextForImageClassification):
    # transformers takes the loss from the end of the class's name.
    def __init__(self, config):
        super().__init__(config)
        apply_plan_(self, ConversionPlan.from_dict(config.dcls_plan), init="random")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(hidden_sizes=[8, 12, 16, 24], depths=[1, 2, 2, 1], num_labels=5)
    model = transformers.ConvNextForImageClassification(config).eval()
    model.config.dcls_plan = convert_(model, dilated_size=11, input_size=(3, 64, 64)).plan.to_dict()
    return model


def logits(model):
    with torch.no_grad():
        return model(IMAGES).logits


def test_a_model_comes_back_equal_trained_or_not(model, tmp_path):
    model.save_pretrained(tmp_path / "converted")
    loaded, notes = DclsConvNextForImageClassification.from_pretrained(tmp_path / "converted", output_loading_info=True)
    assert not any(notes.values())
    assert torch.equal(logits(loaded), logits(model))
    groups = json.loads((tmp_path / "converted/config.json").read_text())["dcls_plan"]["tie_groups"]
    for group in groups:
        one, other = (loaded.get_submodule(name) for name in group["layers"])
        assert one.positions is other.positions

    optimizer = torch.optim.AdamW(tuning.param_groups(loaded, lr=1e-2))
    loaded.train()(IMAGES, labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    loaded.eval().save_pretrained(tmp_path / "tuned")
    again = DclsConvNextForImageClassification.from_pretrained(tmp_path / "tuned")
    assert torch.equal(logits(again), logits(loaded))
    assert not torch.equal(logits(again), logits(model))
    pairs = zip(layers(again), layers(model), strict=True)
    moved = [(one.positions - other.positions).abs().max() for one, other in pairs]
    assert min(moved) > 0


def layers(model):
    return [module for module in model.modules() if isinstance(module, DclsConvNd)]
