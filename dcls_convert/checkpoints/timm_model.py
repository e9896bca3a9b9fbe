"""Rebuild a converted model for timm's factory: base model, plan, weights, and feature extraction."""

import contextlib
import os
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ModelError, listed
from ..networks.source import (
    MOST_ARGUMENT,
    TIMM_ARCHITECTURE,
    UNBOUNDED_ARGUMENTS,
    ModelSource,
    build_model,
    check_source,
)
from ..networks.stages import common_parent
from ..networks.weights import alias_names
from ..planning.plan import ConversionPlan
from ..surgery.place import note_for_timm
from ..surgery.start import apply_plan_
from .folder import (
    CONFIG,
    PLAN_PLACE,
    WEIGHTS,
    FolderConfig,
    check_stamp,
    check_tensors,
    read_folder,
    read_stamp,
)
from .load import place_

# Where timm's feature extractors keep the model.
WRAPPER_PREFIXES = (
    "",
    "model.",
    "body.",
    "graph_module.",
)
# Weights come from the folder alone; other places that its config names are ignored.
NO_OTHER_WEIGHTS = {"url": "", "state_dict": None, "hf_hub_filename": None, "custom_load": False}


def create_converted(
    *,
    pretrained: bool = False,
    plan: Mapping[str, Any] | None = None,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    pretrained_model_args: Mapping[str, Any] | None = None,  # the config's `model_args`, unchanged
    features_only: bool = False,
    **kwargs: Any,  # of the base model
) -> nn.Module:
    """Build the model that `config.json` describes; a new head draws from torch's generator, as timm's own do."""
    from timm.models import load_pretrained, resolve_pretrained_cfg

    if plan is None:
        raise ModelError(
            f'"{TIMM_ARCHITECTURE}" is not a model by itself; load a checkpoint: timm.create_model("local-dir:FOLDER")'
        )
    conversion = ConversionPlan.from_dict(plan, f"{CONFIG}: {PLAN_PLACE}")
    base = conversion.model or ""
    _check_arguments(base, pretrained_model_args or kwargs)
    resolved: Any = resolve_pretrained_cfg(
        TIMM_ARCHITECTURE, pretrained_cfg, pretrained_cfg_overlay
    )
    config = {**resolved.to_dict(), **NO_OTHER_WEIGHTS}
    beside = _config_beside_weights(config, cache_dir) if pretrained else None
    if base.startswith("timm:"):
        kwargs.setdefault("num_classes", config["num_classes"])
    elif features_only:
        raise ModelError(f"features_only is for models that timm builds, not for {base}")
    if features_only:
        kwargs["features_only"] = True
    # The folder's own arguments are checked above; the caller's may be any objects.
    model = build_model(ModelSource(name=base, args=kwargs), seed=None, trust_code=True)
    placed = _plan_for_features(model, conversion) if features_only else conversion
    if pretrained:
        place_(model, placed)
    else:  # random values, as timm's own layers have without weights
        apply_plan_(model, placed, init="random", generator=torch.default_generator)
    known = getattr(model, "pretrained_cfg", None) or {}
    config |= {name: known[name] for name in ("classifier", "first_conv") if name in known}
    note_for_timm(model, {**config, "architecture": TIMM_ARCHITECTURE})
    if not pretrained:
        return model
    in_chans = kwargs.get("in_chans")
    channels = config["input_size"][0]

    def fit(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        if beside is not None:
            check_tensors(state, beside)
        if features_only:
            state = _features_state(state, model, config, in_chans)
        return _complete_state(state, model, config)

    load_pretrained(  # timm's own, which adapts head and first convolution
        model,
        pretrained_cfg=config
        if beside is None
        else config | {"source": "local-dir", "file": str(beside.folder)},
        num_classes=0 if features_only else getattr(model, "num_classes", config["num_classes"]),
        in_chans=channels if features_only else in_chans or channels,
        filter_fn=fit,
        cache_dir=cache_dir,
    )
    return model


def _check_arguments(base: str, args: Mapping[str, Any]) -> None:
    """Refuse (ModelError) a folder's model and arguments that could run code or take memory without end."""
    if not base:
        raise ModelError(
            "timm cannot build this folder's model; dcls_convert.load_converted(FOLDER, model=YOURS) can"
        )
    stored = {name: value for name, value in args.items() if name != "plan"}
    check_source(ModelSource(name=base, args=stored))
    # `load_converted` compares these with the weights before they cost memory; timm does not.
    for name in UNBOUNDED_ARGUMENTS:
        if isinstance(stored.get(name), int) and stored[name] > MOST_ARGUMENT:
            raise ModelError(
                f"{CONFIG}: {name}={stored[name]}: through timm, {MOST_ARGUMENT:,} is the most"
            )


def _config_beside_weights(
    config: Mapping[str, Any], cache_dir: str | Path | None
) -> FolderConfig | None:
    """What the config beside the weights, downloaded now, says; None where they are no safetensors file."""
    path = Path(config.get("file") or "") / WEIGHTS
    if config.get("source") == "hf-hub":
        import huggingface_hub

        name, _, revision = str(config.get("hf_hub_id")).partition("@")
        with contextlib.suppress(huggingface_hub.errors.EntryNotFoundError):
            path = Path(
                huggingface_hub.hf_hub_download(
                    name, WEIGHTS, revision=revision or None, cache_dir=cache_dir
                )
            )
    elif config.get("source") != "local-dir":
        return None
    if not os.path.lexists(path):
        return None
    beside = read_folder(path.parent)
    check_stamp(read_stamp(path), beside)
    return beside


def _names(entry: str | Iterable[str] | None) -> list[str]:
    """The modules that a config names as its classifier or first convolution: none, one or several."""
    return [entry] if isinstance(entry, str) else list(entry or ())


def _complete_state(
    state: Mapping[str, Tensor], model: nn.Module, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """With aliases; refuse weights that lack a tensor: with another number of classes, timm itself does not check."""
    state = {
        **state,
        **{alias: state[name] for alias, name in alias_names(model).items() if name in state},
    }
    heads = tuple(f"{name}." for name in _names(config.get("classifier")))
    if missing := [
        name for name in model.state_dict() if name not in state and not name.startswith(heads)
    ]:
        raise CheckpointError(
            f"{WEIGHTS}: lacks {listed(missing, 1)} of the model that {CONFIG} describes"
        )
    return state


def _flat(name: str) -> str:
    """timm's feature lists turn "stages.0" into "stages_0"."""
    return name.replace(".", "_")


def _unwrapped(names: Collection[str], known: Container[str]) -> dict[str, str]:
    """Names in a feature extractor -> flat names in the whole model, less the prefix that makes most names match."""
    flat = (
        {name: _flat(name.removeprefix(prefix)) for name in names} for prefix in WRAPPER_PREFIXES
    )
    return max(
        ({name: key for name, key in pairs.items() if key in known} for pairs in flat), key=len
    )


def _plan_for_features(model: nn.Module, plan: ConversionPlan) -> ConversionPlan:
    """The plan under the names of a feature extractor, which has no layers behind its last feature."""
    flat = {_flat(name): name for layer in plan.layers for name in layer.names}
    modules = dict(model.named_modules(remove_duplicate=False))
    own = {flat[key]: name for name, key in _unwrapped(modules, flat).items()}
    if not own:
        raise ModelError(
            f"none of the {len(plan.layers)} converted layers is found in timm's {type(model).__name__}"
        )
    kept = [
        (layer, tuple(own[name] for name in layer.names if name in own)) for layer in plan.layers
    ]
    layers = tuple(replace(layer, names=names) for layer, names in kept if names)
    members = [
        (group, tuple(m.name for m in layers if m.tie_group == group.name))
        for group in plan.tie_groups
    ]
    groups = tuple(
        replace(group, owner=common_parent(inside), layers=inside)
        for group, inside in members
        if inside
    )
    return replace(plan, layers=layers, tie_groups=groups)


def _features_state(
    state: Mapping[str, Tensor], model: nn.Module, config: Mapping[str, Any], in_chans: int | None
) -> dict[str, Tensor]:
    """The checkpoint's tensors under the feature extractor's names."""
    from timm.models import adapt_input_conv

    state = dict(state)
    if in_chans not in (None, config["input_size"][0]):
        for name in _names(config.get("first_conv")):
            state[f"{name}.weight"] = adapt_input_conv(in_chans, state[f"{name}.weight"])
    flat = {_flat(name): tensor for name, tensor in state.items()}
    return {name: flat[key] for name, key in _unwrapped(model.state_dict(), flat).items()}
