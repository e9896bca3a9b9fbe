"""Weights as people have them: which state dict of a file is taken, and under which names.

What is chosen, renamed or left out is known and said.
"""

import argparse
import pathlib
import re

import numpy
import pytest
import timm
import torch
from torch import nn

from dcls_convert.errors import CheckpointError
from dcls_convert.weights.files import read_weights
from dcls_convert.weights.state_names import rename_to_model

ARGS = argparse.Namespace(lr=0.1, output=pathlib.PosixPath("out"))
SCORES = [numpy.float64(0.5), numpy.arange(3), numpy.random.RandomState(0).get_state()]
OPTIMIZER = {"state": {0: {"momentum": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}


def prefixed(prefix, state):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def zeros(state):
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


# What a file holds, made from the state dict that is to be taken, and what each note says.
FILES = {
    "plain": (lambda s: s, []),
    "usual key": (
        lambda s: {"model": s, "optimizer": OPTIMIZER, "epoch": 3, "args": ARGS, "best": SCORES},
        ["takes the weights under model$"],
    ),
    "averaged": (
        lambda s: {"model": zeros(s), "ema": {"module": s, "updates": 3}},
        ["under ema / module, not model; a checkpoint key chooses$"],
    ),
    "DDP": (
        lambda s: {"state_dict": prefixed("module.", s), "args": ARGS},
        ["under state_dict$", "removes the prefix 'module.' from its names$"],
    ),
    "DDP and compiled": (
        lambda s: {"model": {"state_dict": prefixed("module._orig_mod.", s)}},
        ["under model / state_dict$", "the prefix 'module.'"],
    ),
    "Lightning": (
        lambda s: {
            "state_dict": prefixed("model.", s) | {"loss.weight": torch.ones(3)},
            "pytorch-lightning_version": "2.5",
        },
        ["under state_dict$", "'model.' from its names; ignored, because they lack it: loss"],
    ),
    "backbone of a larger network": (
        lambda s: (
            prefixed("backbone.net.", s) | {f"decoder.{i}.weight": torch.ones(1) for i in range(99)}
        ),
        ["'backbone.net.' from its names; ignored, because they lack it: decoder.0.weight"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_weights_as_people_have_them_are_read_and_what_was_done_is_said(tmp_path, trained, name):
    wrap, says = FILES[name]
    for old in (False, True):  # both formats of torch.save
        notes = []
        torch.save(
            wrap(trained.state_dict()),
            path := tmp_path / "weights.pth",
            _use_new_zipfile_serialization=not old,
        )
        state = rename_to_model(trained, read_weights(path, note=notes.append), note=notes.append)
        assert state.keys() == trained.state_dict().keys()
        assert all(torch.equal(state[key], own) for key, own in trained.state_dict().items())
        assert len(notes) == len(says)
        assert all(re.search(words, note) for words, note in zip(says, notes, strict=True))


@pytest.mark.parametrize("second", ["ema_model.", "module.encoder_k."])
def test_of_networks_under_several_prefixes_a_key_says_which(trained, second):
    own = trained.state_dict()
    state = prefixed(second, zeros(own)) | prefixed("model.", own) | {"queue": torch.ones(2)}
    state.pop("model.head.fc.weight")  # the classifiers may differ
    state.pop("model.head.fc.bias")
    with pytest.raises(CheckpointError, match=rf"under model\., {second}; name one as checkpoint"):
        rename_to_model(trained, state)
    for key, factor in (("model", 1), (second, 0)):
        chosen = rename_to_model(trained, read_weights({"state_dict": state}, key=key))
        lacks = {name for name in own if factor and name.startswith("head.fc.")}
        assert own.keys() - chosen.keys() == lacks
        assert torch.equal(chosen["stem.0.weight"], own["stem.0.weight"] * factor)


def test_names_that_are_the_networks_own_stay():
    """A prefix, also if only some of its names fit; `module` inside; tensors that do not fit."""
    model = nn.Sequential()
    model.features = nn.Sequential()
    model.features.module = nn.Linear(2, 2)
    state = {"features.module.weight": torch.ones(2, 2)}
    assert rename_to_model(model, state) == state
    wrapped = prefixed("module.", model.state_dict())
    assert rename_to_model(model, wrapped).keys() == model.state_dict().keys()
    for name in ("features.module.more", "features.se.weight"):
        more = model.state_dict() | {name: torch.ones(1)}
        assert rename_to_model(model, more).keys() == more.keys()


def test_batchnorm_counters_that_a_file_lacks_are_0():
    model = timm.create_model("test_resnet")
    complete = model.state_dict()
    counters = {name for name in complete if name.endswith("num_batches_tracked")}
    file = {name: tensor for name, tensor in complete.items() if name not in counters}
    state = rename_to_model(model, file)
    assert state.keys() == complete.keys()
    assert all(not state[name] for name in counters)
