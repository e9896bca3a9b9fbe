"""Names in weights files become the network's own, with and without wrappers and prefixes."""

import argparse

import pytest
import timm
import torch
from torch import nn

from dcls_convert.networks.state_names import rename_to_model
from dcls_convert.networks.weights_files import read_weights

from ..conftest import TINY


def prefixed(prefix, state):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (lambda s: s, ()),
        (lambda s: {"model": s, "optimizer": {"lr": 1.0}}, ["takes the weights under model"]),
        (lambda s: {"model_state_dict": s, "epoch": 3}, ["the weights under model_state_dict"]),
        (lambda s: {"net": s}, ["takes the weights under net"]),
        (
            lambda s: {"model": {k: v * 0 for k, v in s.items()}, "model_ema": s},
            ["takes the averaged weights, model_ema, not model"],
        ),
        (
            lambda s: {"state_dict": prefixed("module.", s), "args": argparse.Namespace(lr=1)},
            ["under state_dict", "removes the prefix 'module.' from its names"],
        ),
        (
            lambda s: {"model": {"state_dict": prefixed("module._orig_mod.", s)}},
            ["under model / state_dict", "removes the prefix 'module._orig_mod.' from its names"],
        ),
        (
            lambda s: {
                "state_dict": prefixed("model.", s) | {"loss.weight": torch.ones(3)},
                "pytorch-lightning_version": "2.5",
            },
            ["under state_dict", "'model.' from its names; ignored, because they lack it: loss"],
        ),
        (lambda s: prefixed("backbone.net._orig_mod.", s), ["'backbone.net._orig_mod.'"]),
    ],
)
def test_wrappers_and_prefixes_are_understood_and_named(tmp_path, trained, wrap, says):
    torch.save(wrap(trained.state_dict()), tmp_path / "weights.pth")
    notes = []
    read = read_weights(tmp_path / "weights.pth", note=notes.append)
    state = rename_to_model(trained, read, note=notes.append)
    assert [note for note in notes if not any(word in note for word in says)] == []
    assert all(any(word in note for note in notes) for word in says)
    assert state.keys() == trained.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.state_dict().items())


def test_a_prefix_that_the_network_has_itself_stays():
    """Also if only some of its names fit."""
    model = torch.nn.Sequential()
    model.features = torch.nn.Linear(2, 2)
    state = {"features.weight": torch.ones(2, 2)}
    assert rename_to_model(model, state).keys() == state.keys()
    others = {"backbone.stem.weight": torch.ones(1), "backbone.head.weight": torch.ones(1)}
    assert rename_to_model(model, others).keys() == others.keys()


def test_names_stay_if_timms_translation_fits_no_better(monkeypatch):
    model = timm.create_model(TINY)
    unknown = {
        "a.dwconv.weight": torch.zeros(2, 2),
        "head.weight": torch.zeros(3),
    }  # timm's function raises a KeyError
    other = {"a.dwconv.weight": torch.zeros(1)}  # becomes a.conv_dw.weight
    for source, state in [
        (model, unknown),
        (model, other),
        (timm.create_model("resnet18"), other),
        (nn.ReLU(), other),
    ]:
        assert rename_to_model(source, state) == state
    own = model.state_dict()
    assert rename_to_model(model, own).keys() == own.keys()
    empty = {name: tensor.to("meta") for name, tensor in own.items()}
    monkeypatch.setattr("timm.models.convnext.checkpoint_filter_fn", lambda *_: empty)
    assert rename_to_model(model, other) == other  # meta tensors are no weights


def test_batchnorm_counters_that_a_file_lacks_are_0():
    complete = timm.create_model("test_resnet").state_dict()
    counters = {name for name in complete if name.endswith("num_batches_tracked")}
    file = {name: tensor for name, tensor in complete.items() if name not in counters}
    state = rename_to_model(timm.create_model("test_resnet"), file)
    assert state.keys() == complete.keys()
    assert all(not state[name] for name in counters)
    file.pop("fc.weight")
    assert not counters & rename_to_model(timm.create_model("test_resnet"), file).keys()
