"""timm's private conventions: the notes that timm leaves on a model, and feature extractors.

timm's models have a config, `pretrained_cfg` (origin of the weights, preprocessing), and
`_model_args`, the arguments of their function. timm's savers write both into config.json. The
argument `feature_cls` of timm's functions is a class that is called with the whole network.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..geometry import plain_numbers
from ..layers.position_parameters import exclude_from_weight_decay_
from .building import build_model
from .source import TIMM_ARCHITECTURE, ModelSource, check_source, import_library

# Entries of timm's config about the weights: where they come from, and their licence.
ORIGIN_KEYS = ("tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes")
# Entries that say where to find the weights. Our folders omit them: their weights are inside.
SOURCE_KEYS = set(
    "url file state_dict hf_hub_id hf_hub_filename source architecture custom_load".split()
)


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the model's `pretrained_cfg`; None if it has none."""
    config = getattr(model, "pretrained_cfg", None)
    return config if isinstance(config, dict) else None


def stated_source(model: nn.Module) -> ModelSource | None:
    """Return the source of a timm model, from timm's notes, with the model's present classes.

    Return None for any other model, and if `check_source` refuses the source.
    """
    config = config_of(model)
    if config is None or not hasattr(model, "_model_args"):
        return None
    source = ModelSource(name=f"timm:{config.get('architecture')}", args=stated_args(model))
    try:
        check_source(source)
    except ModelError:
        return None
    return source


def stated_args(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that build a timm model as it is now, with its present classes.

    The argument "plan" of a converted model is left out.
    """
    # timm's own function leaves out dropout rates, because timm's weights files do not state them.
    args = {**getattr(model, "_model_args", {})}
    args |= import_library("timm.models").get_model_args(model)
    return {name: plain_numbers(value) for name, value in args.items() if name != "plan"}


def stated_input_size(model: nn.Module) -> tuple[int, ...] | None:
    """Return (channels, *spatial) from timm's config of the model, or None if it has none."""
    config = config_of(model)
    if config is None or not config.get("input_size"):
        return None
    channels, *sides = config["input_size"]
    # These arguments change the model's size, but its config still states the usual size.
    arguments = getattr(model, "_model_args", {})
    channels = arguments.get("in_chans") or channels
    image_size = arguments.get("img_size")
    if isinstance(image_size, int):
        sides = [image_size, image_size]
    elif isinstance(image_size, Sequence):
        sides = list(image_size)
    return (channels, *sides)


def mark_converted_(
    model: nn.Module, args: Mapping[str, Any] | None, input_size: Sequence[int] | None
) -> None:
    """Note how to rebuild a converted model, so that the config by timm's savers rebuilds it.

    Args:
        model: The model. A model without a config stays as it is.
        args: Arguments of our entry in timm's registry; None if only the user's code builds it.
        input_size: (channels, *spatial) of the plan, if it has one.
    """
    config = config_of(model)
    if config is None:
        return
    if input_size is not None:
        config = {**config, "input_size": input_size}
    if args is not None:
        config = {**config, "architecture": TIMM_ARCHITECTURE}
        vars(model)["_model_args"] = args
    set_pretrained_cfg_(model, config)


def change_marked_plan_(model: nn.Module, changes: Mapping[str, Any]) -> None:
    """Change entries of the plan that `mark_converted_` noted, if there is one."""
    args = vars(model).get("_model_args")
    if isinstance(args, dict) and isinstance(args.get("plan"), dict):
        vars(model)["_model_args"] = {**args, "plan": {**args["plan"], **changes}}


def set_pretrained_cfg_(model: nn.Module, config: dict[str, Any]) -> None:
    """Set the preprocessing config of a model, under both names that timm reads."""
    vars(model).update(pretrained_cfg=config, default_cfg=config)


def forget_origin_(model: nn.Module) -> None:
    """Remove the origin of the weights from the model's config: they are no longer timm's."""
    replace_stated_cfg_(model, {})


def replace_stated_cfg_(model: nn.Module, stated: Mapping[str, Any]) -> None:
    """Replace entries of the model's config, if it has one, and drop all entries on its origin.

    Args:
        model: The model. Until this call, its config describes timm's own weights.
        stated: The new entries, under timm's names. Entries of SOURCE_KEYS are ignored.
    """
    config = config_of(model)
    if config is not None:
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
    config = config_of(model)
    if config is not None:
        stated: dict[str, Any] = {}
        for name, given in (("mean", mean), ("std", std)):
            values = torch.as_tensor(given, dtype=torch.float64).expand(channels)
            stated[name] = tuple(values.tolist())
        set_pretrained_cfg_(model, config | stated)


def build_features(source: ModelSource, finish_: Callable[[nn.Module], None]) -> nn.Module:
    """Build timm's feature extractor of a network that `finish_` changes before timm wraps it."""
    from timm.models import FeatureDictNet, FeatureGraphNet, FeatureHookNet
    from timm.models._features import FeatureGetterNet

    kind = type(build_model(source, device="meta", trust_code=True))
    if not issubclass(kind, FeatureDictNet | FeatureGraphNet | FeatureHookNet | FeatureGetterNet):
        model = build_model(source, seed=None, trust_code=True)  # returns features by itself
        finish_(model)
        return model

    def finish_and_wrap(_: type, network: nn.Module, **settings: Any) -> nn.Module:
        finish_(network)
        wrapped: nn.Module = kind(network, **settings)
        return wrapped

    # timm calls its argument `feature_cls` with the whole network.
    finishing = type(kind.__name__, (kind,), {"__new__": finish_and_wrap})
    args = {**source.args, "feature_cls": finishing}
    model = build_model(replace(source, args=args), seed=None, trust_code=True)
    exclude_from_weight_decay_(model)
    vars(model)["_model_args"] = source.args
    return model


def is_extractor(model: nn.Module) -> bool:
    """True for timm's feature extractors; a whole network of timm has a list as `feature_info`."""
    return hasattr(getattr(model, "feature_info", None), "out_indices")
