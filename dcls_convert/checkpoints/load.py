"""A converted model from its folder: build the network, place the layers, take the weights. Draws no random number."""

from pathlib import Path

import torch
from torch import nn

from ..errors import CheckpointError, PlanError
from ..networks.running import unchanged_on_failure
from ..networks.source import ModelSource, check_source
from ..networks.weights import build_with_state, load_file, load_weights_
from ..planning.plan import ConversionPlan
from ..surgery.place import place_layers_
from .folder import FolderConfig, check_stamp, check_tensors, read_folder, read_stamp, the_plan


def load_converted(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    trust_code: bool = False,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Rebuild a converted model from its folder, with its weights, in eval mode.

    A folder is data: what it names as its model must be one of timm's or torchvision's, or nothing is built.

    Args:
        folder: Written by `save_converted`, or by timm's `save_for_hf` after fine-tuning.
        model: The unconverted model, for a folder whose model is of the user's own; converted in place.
        trust_code: Instead of `model`: import and run whatever the folder names as its model's factory.
        device: Where to put it.

    Raises:
        CheckpointError: Something is missing or damaged in the folder, or belongs to another one.
        ModelError: The folder's model is neither timm's nor torchvision's, or cannot be built.
    """
    config = read_folder(folder)
    plan = the_plan(config)
    where = str(config.weights)
    if model is None:
        source = buildable(config, trust_code=trust_code)
    check_stamp(read_stamp(config.weights), config)
    state = load_file(config.weights)
    check_tensors(state, config)
    if model is None:
        model, _ = build_with_state(
            source, state, where, prepare_=lambda model: place_(model, plan)
        )
    else:
        with unchanged_on_failure(model):
            place_(model, plan)
            load_weights_(model, state, where)
    return model.eval().to(device)


def buildable(config: FolderConfig, *, trust_code: bool) -> ModelSource:
    """The source; CheckpointError where the folder has none, ModelError where it would run code that is not trusted."""
    if config.source is None:
        where = config.folder
        raise CheckpointError(
            f"{where}: does not say how its model is built; pass the unconverted one as `model` (fold --model)"
        )
    if not trust_code:
        check_source(config.source)
    return config.source


def place_(model: nn.Module, plan: ConversionPlan) -> None:
    """Put the plan's layers, without values, into the unconverted model; CheckpointError: it is for another one."""
    try:
        place_layers_(model, plan)
    except PlanError as error:
        raise CheckpointError(
            f"the plan does not fit {plan.model or 'the model'}: {error}"
        ) from error
