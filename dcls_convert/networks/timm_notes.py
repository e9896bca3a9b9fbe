"""What timm notes on a model: how it was built, where its weights are from, the normalisation."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..geometry import plain_numbers
from .source import ModelSource, check_source, import_library

# Entries of timm's config about the weights: where they come from, and their licence.
ORIGIN_KEYS = ("tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes")
# Entries that say where to find the weights. Our folders omit them: their weights are inside.
SOURCE_KEYS = set(
    "url file state_dict hf_hub_id hf_hub_filename source architecture custom_load".split()
)


def stated_source(model: nn.Module) -> ModelSource | None:
    """Return how a model of timm was built, as timm notes it, with the classes that it has now.

    Return None for any other model, and if `check_source` refuses the source.
    """
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, dict) or not hasattr(model, "_model_args"):
        return None
    source = ModelSource(name=f"timm:{config.get('architecture')}", args=stated_args(model))
    try:
        check_source(source)
    except ModelError:
        return None
    return source


def stated_args(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that build a model of timm as it is now, with its present classes.

    The plan of a converted model is left out.
    """
    # timm's own function leaves out rates of dropout, which timm's weights files do not state.
    args = {**getattr(model, "_model_args", {})}
    args |= import_library("timm.models").get_model_args(model)
    return {name: plain_numbers(value) for name, value in args.items() if name != "plan"}


def set_pretrained_cfg_(model: nn.Module, config: dict[str, Any]) -> None:
    """Set the preprocessing config of a model, under both names that timm reads."""
    vars(model).update(pretrained_cfg=config, default_cfg=config)


def replace_stated_cfg_(model: nn.Module, stated: Mapping[str, Any]) -> None:
    """Replace entries of the model's config, if it has one, and all that it says of its origin.

    Args:
        model: The config of a timm model describes timm's own weights until this call.
        stated: The new entries, under timm's names; those of SOURCE_KEYS are ignored.
    """
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict):
        kept = {name: value for name, value in config.items() if name not in ORIGIN_KEYS}
        new = {name: value for name, value in stated.items() if name not in SOURCE_KEYS}
        set_pretrained_cfg_(model, kept | new)


def set_normalisation_(
    model: nn.Module,
    mean: float | Sequence[float],
    std: float | Sequence[float],
    channels: int,
) -> None:
    """Set the mean and std for normalising images in the model's config, if it has one.

    Args:
        model: The model.
        mean, std: One value per channel, or one for all.
        channels: Number of image channels.
    """
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict):
        stated: dict[str, Any] = {}
        for name, given in (("mean", mean), ("std", std)):
            values = torch.as_tensor(given, dtype=torch.float64).expand(channels)
            stated[name] = tuple(values.tolist())
        set_pretrained_cfg_(model, config | stated)
