"""A file may hold several state dicts: which one is taken is known, said, and can be stated."""

import argparse
import pathlib

import numpy
import pytest
import timm
import torch

from dcls_convert.errors import CheckpointError
from dcls_convert.weights.files import read_weights

from ..command_line import run

CHOSEN = {"conv.weight": torch.ones(2)}
OTHER = {"conv.weight": torch.zeros(2)}


def read(tmp_path, content, key=None, old=False):
    """Return what is read from a file with this content, and the notes."""
    path = tmp_path / "weights.pth"
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    notes = []
    return read_weights(path, key=key, note=notes.append), notes


def is_chosen(state):
    return state.keys() == CHOSEN.keys() and torch.equal(state["conv.weight"], torch.ones(2))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model": OTHER, "ema": CHOSEN}, "takes the averaged weights, ema, not model; a chec"),
        ({"model": OTHER, "ema": {"module": CHOSEN, "updates": 3}}, "ema / module, not model;"),
        ({"model": OTHER, "ema_state_dict": CHOSEN}, "ema_state_dict, not model;"),
        ({"params": OTHER, "params_ema": CHOSEN}, "params_ema, not params;"),
        ({"module": CHOSEN, "dp_world_size": 2}, "under module"),
        ({"student": OTHER, "teacher": CHOSEN}, "under teacher, not student;"),
        ({"model": CHOSEN, "teacher": OTHER}, "under model, not teacher;"),
        ({"weights": CHOSEN}, "under weights"),
        ({"model_state": CHOSEN, "optimizer": {"state": {0: OTHER}}}, "under model_state"),
        ({"backbone": CHOSEN, "step": torch.ones(1)}, "under backbone"),
        ({"model": CHOSEN, "discriminator": OTHER}, "under model, not discriminator;"),
        ({"model": CHOSEN, "ema": {"shadow": [torch.ones(2)]}}, "under model, not ema;"),
        ({"model": "resnet18", "state_dict": CHOSEN, "ema": None}, "under state_dict"),
    ],
)
def test_the_weights_under_usual_keys_are_taken_and_the_others_named(tmp_path, content, says):
    state, notes = read(tmp_path, content)
    assert is_chosen(state)
    assert len(notes) == 1
    assert says in notes[0]
    assert (", not " in notes[0]) == (", not " in says)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"model": CHOSEN, "ema": OTHER}, "model"),
        ({"model": OTHER, "ema": {"module": CHOSEN}}, "ema"),
        ({"model": OTHER, "ema": {"module": CHOSEN}}, "ema.module"),
        ({"generator": OTHER, "discriminator": CHOSEN}, "discriminator"),
        ({"a.b": {"c": CHOSEN}}, "a.b.c"),
        ({"q.conv.weight": CHOSEN["conv.weight"], "k.conv.weight": torch.zeros(2)}, "q"),
        (
            {
                "state_dict": {
                    "module.encoder_q.conv.weight": CHOSEN["conv.weight"],
                    "module.encoder_k.conv.weight": torch.zeros(2),
                    "module.queue": torch.zeros(3),
                }
            },
            "encoder_q",
        ),
        ({"state_dict": {"q.conv.weight": CHOSEN["conv.weight"]}}, "state_dict.q"),
    ],
)
def test_a_key_says_which_weights_are_taken(tmp_path, content, key):
    state, _ = read(tmp_path, content, key)
    assert is_chosen(state)
    assert is_chosen(read_weights(content, key=key))
    with pytest.raises(CheckpointError, match=r"nothing under the checkpoint key 'no'; it has \w"):
        read(tmp_path, content, "no")


def test_only_keys_with_weights_are_offered(tmp_path):
    optimizer = {"state": {0: {"momentum": torch.ones(2)}}, "param_groups": []}
    content = {"epoch": 3, "model": CHOSEN, "optimizer": optimizer, "other": {"model": OTHER}}
    with pytest.raises(CheckpointError, match=r"checkpoint key 'ema'; it has model, other$"):
        read(tmp_path, content, "ema")


def test_the_option_says_which_weights_are_converted_or_swept(tmp_path):
    own = timm.create_model("test_resnet").state_dict()
    torch.save({"model": own, "ema": {}, "other": own}, path := tmp_path / "weights.pth")
    chosen = ("test_resnet", "--checkpoint", path, "--checkpoint-key")
    _, err = run(*chosen, "other", "--dry-run")
    assert "takes the weights" not in err
    _, err = run("sweep", *chosen, "no", "--sizes", "5", code=2)
    assert "nothing under the checkpoint key 'no'; it has model" in err


def test_several_networks_without_a_usual_key_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="several state dicts: g, d; name one as checkpoint"):
        read(tmp_path, {"g": CHOSEN, "d": OTHER})


@pytest.mark.parametrize("old", [False, True])
def test_numpy_values_and_paths_beside_weights_are_not_read(tmp_path, old):
    values = [numpy.float64(0.5), numpy.int64(3), numpy.arange(3), numpy.float32(1)]
    values.append(numpy.random.RandomState(0).get_state())
    args = argparse.Namespace(output=pathlib.PosixPath("out"))
    content = {"state_dict": CHOSEN, "best": values, "args": args}
    state, _ = read(tmp_path, content, old=old)
    assert is_chosen(state)
    with pytest.raises(CheckpointError, match=r"entry 'conv\.weight' is a NumPy value or a path"):
        read(tmp_path, {"conv.weight": numpy.ones(2)}, old=old)


def test_a_key_may_name_a_mapping_under_which_the_usual_keys_are(tmp_path):
    content = {"checkpoint": {"model": CHOSEN}}
    with pytest.raises(CheckpointError, match=r"a checkpoint key can name one that is inside$"):
        read(tmp_path, content)
    state, _ = read(tmp_path, content, "checkpoint")
    assert is_chosen(state)


def test_numpy_objects_that_would_be_read_as_code_stay_refused(tmp_path):
    content = {"state_dict": CHOSEN, "random": numpy.random.RandomState(0)}
    with pytest.raises(CheckpointError, match=r"more than tensors \(numpy\.random\.\w+"):
        read(tmp_path, content)
