"""A folder as a model of timm: heads, channels, features."""

import json

import pytest
import timm
import torch
from torch import nn

from dcls_convert import load_converted, save_converted

from ..conftest import TINY
from .folders import convert, outputs, same_states, save


def test_timm_loads_with_another_head_and_other_input_channels(folder):
    model = load_converted(folder)
    name = f"local-dir:{folder}"
    new_head = timm.create_model(
        name, pretrained=True, num_classes=10, drop_path_rate=0.1, act_layer=nn.ReLU
    )
    assert outputs(new_head).shape == (1, 10)
    state = model.state_dict()
    changed = {
        key for key, value in new_head.state_dict().items() if not torch.equal(state[key], value)
    }
    assert changed == {"head.fc.weight", "head.fc.bias"}
    grey = timm.create_model(name, pretrained=True, in_chans=1)
    assert outputs(grey, channels=1).shape == (1, 1000)
    torch.testing.assert_close(grey.stem[0].weight, model.stem[0].weight.sum(1, keepdim=True))
    headless = timm.create_model(name, pretrained=True, num_classes=0)
    image = torch.ones(1, 3, 64, 64)
    assert torch.equal(headless.forward_features(image), model.forward_features(image))


def test_a_tuned_model_with_other_arguments_is_saved_with_the_plan_of_its_folder(folder, tmp_path):
    arguments = {"num_classes": 10, "in_chans": 1, "drop_path_rate": 0.1}
    tuned = timm.create_model(f"local-dir:{folder}", pretrained=True, **arguments).eval()
    new = save_converted(tuned, folder, tmp_path / "tuned")
    for loaded in (load_converted(new), timm.create_model(f"local-dir:{new}", pretrained=True)):
        assert same_states(loaded, tuned)
        # It acts in training alone, so outputs do not show it.
        assert loaded.stages[-1].blocks[-1].drop_path.drop_prob == pytest.approx(0.1)
    report, old = (json.loads((path / "report.json").read_text()) for path in (new, folder))
    assert report["params"]["after"] == sum(p.numel() for p in tuned.parameters())
    assert report["input_size"] == [1, *old["input_size"][1:]]
    for cost in ("params", "macs"):
        assert report[cost]["delta"] == old[cost]["delta"]


@pytest.mark.parametrize("name", [TINY, "test_efficientnet"])
def test_features_only_gives_the_features_of_the_whole_model(tmp_path, name):
    model, plan = convert(f"timm:{name}")
    folder = f"local-dir:{save(tmp_path / 'out', model, plan, check=False)}"
    features = timm.create_model(folder, pretrained=True, features_only=True)
    dense = timm.create_model(name, features_only=True)
    maps = outputs(features)
    assert [one.shape for one in maps] == [one.shape for one in outputs(dense)]
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(maps[-1], model.forward_intermediates(x, intermediates_only=True)[-1])
