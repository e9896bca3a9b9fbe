"""Load a converted model from its folder: build the network, place the layers, load the weights.

No random numbers are drawn.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..conversion.provenance import attach_provenance_
from ..errors import CheckpointError, PlanError, check_argument
from ..networks.timm_notes import replace_stated_cfg_
from ..networks.wrappers import inside_wrappers
from ..placing.place import place_layers_without_values_
from ..planning.plan import ConversionPlan
from ..running.model_state import unchanged_on_failure
from ..weights.loading import build_and_load, load_weights_
from .folder import OpenedFolder, open_folder
from .stored_weights import read_state


def load_converted(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    trust_code: bool = False,
    device: str | torch.device | None = None,
) -> nn.Module:
    """Rebuild a converted model from its folder, with its weights.

    The loaded model is in training mode, like timm's models: call `eval()` before using it. If you
    give `model`, its mode does not change.

    A folder is data: unless `model` or `trust_code` is given, it must name a model of timm or
    torchvision, and none of the user's own code is run.

    Args:
        folder: Written by `save_converted`, or by timm's `save_for_hf` after fine-tuning.
        model: The unconverted model, needed if the user's own code builds it; converted in place.
            May be wrapped (`torch.compile`, DataParallel, averaged copies).
        trust_code: Import and run whatever the folder names as its model's factory; an alternative
            to `model`.
        device: Device for the loaded model. None leaves a given model where it is; a new one is on
            the CPU.

    Raises:
        CheckpointError: A file is missing or damaged, or belongs to another folder.
        ModelError: The folder's model is neither timm's nor torchvision's, or cannot be built.
    """
    if model is not None:
        check_argument("model", model, nn.Module)
    opened = open_folder(folder)
    _ = opened.plan  # raises if there is none
    loaded = load_state(opened, read_state(opened), model=model, trust_code=trust_code)
    return loaded if device is None else loaded.to(device)


def load_state(
    opened: OpenedFolder,
    state: Mapping[str, Tensor],
    *,
    model: nn.Module | None,
    trust_code: bool,
) -> nn.Module:
    """Load tensors of a folder into its model; `model` and `trust_code` as in `load_converted`.

    Without a plan, timm builds the model by itself.
    """

    def place_(unconverted: nn.Module) -> None:
        if opened.stored_plan is not None:
            place_stored_plan_(unconverted, opened.stored_plan)

    where = str(opened.weights_path)
    if model is None:
        source = opened.source(trust_code=trust_code)
        network = build_and_load(source, state, where, prepare_=place_)
    else:
        network = inside_wrappers(model, replaces_parameters=True)
        with unchanged_on_failure(network):
            place_(network)
            load_weights_(network, state, where)
    # Attach the folder's preprocessing, classes and origin, so that saving again keeps them.
    replace_stated_cfg_(network, opened.pretrained_cfg)
    attach_provenance_(network, opened.provenance)
    return network if model is None else model


def place_stored_plan_(model: nn.Module, plan: ConversionPlan) -> None:
    """Put the plan's layers into the unconverted model, without values.

    Raises:
        CheckpointError: The plan is for another model.
    """
    try:
        place_layers_without_values_(model, plan)
    except PlanError as error:
        message = f"the plan does not fit {plan.model or 'the model'}: {error}"
        if plan.model is None:
            message += "; give the unconverted network as it was before convert_"
        raise CheckpointError(message) from error
