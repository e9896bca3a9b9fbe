"""Of what a file holds, one state dict is chosen."""

import numpy
import pytest
import torch

from dcls_convert.errors import CheckpointError
from dcls_convert.weights.files import read_weights

CHOSEN = {"conv.weight": torch.ones(2)}
OTHER = {"conv.weight": torch.zeros(2)}
Q_AND_K = {"q.conv.weight": torch.ones(2), "k.conv.weight": torch.zeros(2)}


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"model": OTHER, "ema": {"module": CHOSEN}}, "ema.module"),
        ({"nested": {"deep": {"trunk": CHOSEN}, "epoch": 3}}, "nested.deep.trunk"),
        ({"state_dict": Q_AND_K}, "q."),
        ({"state_dict": Q_AND_K}, "state_dict.q"),
    ],
)
def test_a_key_says_which_weights_are_taken(content, key):
    state = read_weights(content, key=key)
    assert state.keys() == CHOSEN.keys()
    assert torch.equal(state["conv.weight"], torch.ones(2))
    with pytest.raises(CheckpointError, match=r"nothing under the checkpoint key 'no'; it has \w"):
        read_weights(content, key="no")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"g": CHOSEN, "d": OTHER}, r"holds g, d, not a state dict .*; a checkpoint key can name"),
        ({"conv.weight": numpy.ones(2)}, r"holds conv\.weight, not a state dict"),
        (
            Q_AND_K | {"conv.weight": torch.ones(1), "normalisation": Q_AND_K},
            "entry 'normalisation' is of type dict, not a tensor; weights",
        ),
        (
            {"state_dict": CHOSEN, "random": numpy.random.RandomState(0)},
            r"other than tensors \(numpy\.random\.\w+",
        ),
    ],
)
def test_what_is_no_single_state_dict_is_named(tmp_path, content, says):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=says):
        read_weights(tmp_path / "weights.pth")
