"""Names in weights files become the network's own, with and without wrappers and prefixes."""

import argparse

import pytest
import timm
import torch
from torch import nn

from dcls_convert.errors import CheckpointError
from dcls_convert.weights.files import read_weights
from dcls_convert.weights.state_names import rename_to_model

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
            ["under model / state_dict", "removes _orig_mod from", "removes the prefix 'module.'"],
        ),
        (
            lambda s: {
                "state_dict": prefixed("model.", s) | {"loss.weight": torch.ones(3)},
                "pytorch-lightning_version": "2.5",
            },
            ["under state_dict", "'model.' from its names; ignored, because they lack it: loss"],
        ),
        (lambda s: prefixed("backbone.net._orig_mod.", s), ["_orig_mod", "'backbone.net.'"]),
        (lambda s: prefixed("_forward_module.model.", s), ["_forward_module", "'model.'"]),
        (
            lambda s: {name.replace("blocks.", "blocks._orig_mod."): s[name] for name in s},
            ["removes _orig_mod from its names"],
        ),
        (
            lambda s: {
                f"m.{name.replace('.conv_dw', '._checkpoint_wrapped_module.conv_dw')}": s[name]
                for name in s
            },
            ["removes _checkpoint_wrapped_module from its names", "the prefix 'm.'"],
        ),
        (
            lambda s: (
                prefixed("backbone.", s) | {f"decoder.{i}.weight": torch.ones(1) for i in range(99)}
            ),
            ["'backbone.' from its names; ignored, because they lack it: decoder.0.weight"],
        ),
        (  # DataParallel around a part
            lambda s: {name.replace("stages.", "stages.module."): s[name] for name in s},
            ["renames stages"],
        ),
        (  # timm's features_only, with the rest
            lambda s: {name.replace("stages.", "stages_"): s[name] for name in s},
            ["renames stages"],
        ),
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
    file.pop("conv1.1.running_mean")  # then the file lacks more than a counter
    state = rename_to_model(timm.create_model("test_resnet"), file)
    assert complete.keys() - state.keys() == {
        "conv1.1.running_mean",
        "conv1.1.num_batches_tracked",
    }


@pytest.mark.parametrize("second", ["ema_model.", "module.encoder_k.", "net.teacher.backbone."])
def test_of_networks_under_several_prefixes_a_key_says_which(tmp_path, trained, second):
    own = trained.state_dict()
    state = prefixed(second, {name: tensor * 0 for name, tensor in own.items()})
    state = {"state_dict": state | prefixed("model.", own) | {"queue": torch.ones(2)}}
    state["state_dict"].pop("model.head.fc.weight")  # the classifiers may differ
    state["state_dict"].pop("model.head.fc.bias")
    torch.save(state, tmp_path / "weights.pth")
    read = read_weights(tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=rf"under model\., {second}; name one as checkpoint"):
        rename_to_model(trained, read)
    for key, factor in (("model", 1), (second, 0)):
        read = read_weights(tmp_path / "weights.pth", key=key)
        chosen = rename_to_model(trained, read)
        assert own.keys() - chosen.keys() == {
            name for name in own if factor and name.startswith("head.fc.")
        }
        assert torch.equal(chosen["stem.0.weight"], own["stem.0.weight"] * factor)


@pytest.mark.parametrize("prefix", ["", "module.", "model.net."])
def test_tensors_outside_the_network_are_ignored_and_inside_they_stay(trained, prefix):
    """The same whatever prefix the names have."""
    own = trained.state_dict()
    outside = {"aux_head.0.weight": torch.ones(1), "queue": torch.ones(2)}
    inside = {"stages.0.more": torch.ones(1)}
    notes = []
    renamed = rename_to_model(trained, prefixed(prefix, own | outside), note=notes.append)
    assert renamed.keys() == own.keys()
    assert "because the model has no such parts: aux_head.0.weight, queue" in notes[-1]
    renamed = rename_to_model(trained, prefixed(prefix, own) | outside, note=notes.append)
    assert renamed.keys() == own.keys()
    assert "aux_head.0.weight, queue" in notes[-1]
    renamed = rename_to_model(trained, prefixed(prefix, own | inside))
    assert renamed.keys() == own.keys() | inside.keys()
    incomplete = {name: own[name] for name in own if name != "stem.0.weight"}
    renamed = rename_to_model(trained, prefixed(prefix, incomplete | outside))
    assert renamed.keys() == incomplete.keys() | outside.keys()  # the error names them all
