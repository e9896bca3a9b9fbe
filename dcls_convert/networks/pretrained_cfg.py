"""timm's config of a model (`pretrained_cfg`): what it says of the weights and of the images."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

# Entries of timm's config that are about its weights: whose they are, and who may use them.
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
    """Let the config of a model say of its weights' origin what is stated, and nothing else.

    Args:
        model: If it is timm's, its config describes timm's own weights until then.
        stated: Entries under timm's names; others than ORIGIN_KEYS are ignored.
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
    """Let the config of a model say with which mean and std its images are normalised.

    Args:
        model: Without a config, it stays as it is.
        mean, std: For each channel, or one for all.
        channels: Number of the images' channels.
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
