"""Edit timm's config of a model (`pretrained_cfg`): the weights' origin and the normalisation."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

# Entries of timm's config about the weights: where they come from, and their licence.
ORIGIN_KEYS = (
    "tag",
    "license",
    "description",
    "origin_url",
    "paper_name",
    "paper_ids",
    "notes",
)


def set_pretrained_cfg_(model: nn.Module, config: dict[str, Any]) -> None:
    """Set the preprocessing config of a model, under both names that timm reads."""
    vars(model).update(pretrained_cfg=config, default_cfg=config)


def set_origin_(model: nn.Module, stated: Mapping[str, Any]) -> None:
    """Replace what the model's config says about the origin of its weights.

    Args:
        model: The config of a timm model describes timm's own weights until this call.
        stated: The new entries, under timm's names; keys outside ORIGIN_KEYS are ignored.
    """
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, dict):
        return
    config = dict(config)
    for name in ORIGIN_KEYS:
        config.pop(name, None)
        if name in stated:
            config[name] = stated[name]
    set_pretrained_cfg_(model, config)


def set_normalisation_(
    model: nn.Module, mean: Sequence[float], std: Sequence[float], channels: int
) -> None:
    """Set the mean and std for normalising images in the model's config.

    Args:
        model: Not changed if it has no config.
        mean, std: One value per channel, or one for all.
        channels: Number of image channels.
    """
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, dict):
        return
    stated = {}
    for name, values in (("mean", mean), ("std", std)):
        if len(values) == 1:
            values = tuple(values) * channels
        stated[name] = tuple(values)
    set_pretrained_cfg_(model, config | stated)
