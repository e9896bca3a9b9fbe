"""The network that a checkpoint was made from, where it can be had: the checkpoint holds converted weights alone."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..networks.source import ModelSource, build_model, with_names_of
from ..networks.weights import load_weights_, read_weights
from ..planning.plan import ConversionPlan

SEED = 0  # the default seed of a conversion


def original_model(source: ModelSource, weights: Path) -> nn.Module:
    """The unconverted network with the weights of a file, in eval mode. The caller trusts the source.

    Raises:
        CheckpointError: The file cannot be read or does not fit the network.
        ModelError: The network cannot be built.
    """
    model = build_model(source, trust_code=True)
    load_weights_(model, with_names_of(model, read_weights(weights)), f"original {weights}")
    return model.float().eval()


def original_if_random(source: ModelSource, plan: ConversionPlan, state: Mapping[str, Tensor]) -> nn.Module | None:
    """The unconverted network with its random weights of seed 0, if the checkpoint was converted from these.

    It was if all tensors that conversion leaves alone are equal; None where one differs, as after training.
    """
    model = build_model(source, seed=SEED, trust_code=True)
    own = model.state_dict()
    replaced = {f"{name}.weight" for layer in plan.layers for name in layer.names}
    kept = [name for name in own if name in state and name not in replaced]
    equal = all(own[name].shape == state[name].shape and torch.equal(own[name], state[name]) for name in kept)
    return model.float().eval() if kept and equal else None
