"""Rebuild a converted model through timm's factory, as a whole model or a feature extractor."""

import contextlib
import os
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion.provenance import attach_provenance_
from ..errors import CheckpointError, ModelError
from ..networks.building import build_model
from ..networks.pretrained_cfg import set_pretrained_cfg_
from ..networks.registries import TIMM_ARCHITECTURE
from ..networks.source import ModelSource
from ..networks.trust import UNBOUNDED_ARGUMENTS, check_source
from ..planning.plan import ConversionPlan
from ..text import one_line, short_list
from ..weights.loading import aliases_in
from .folder import CONFIG, PLAN_KEY, WEIGHTS, Checkpoint, open_checkpoint
from .load import place_stored_plan_

# Prefixes that timm's feature extractors put before the module names of the model they wrap.
WRAPPER_PREFIXES = ("", "model.", "body.", "graph_module.")
# Weights are loaded from the folder only; other places that its config names are ignored.
NO_OTHER_WEIGHTS = {"url": "", "state_dict": None, "hf_hub_filename": None, "custom_load": False}
# Largest number of classes or channels: timm allocates them before it reads the weights.
MAX_IN_TIMM = 1_000_000


def create_converted(
    *,
    pretrained: bool = False,
    plan: Mapping[str, Any] | None = None,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    pretrained_model_args: Mapping[str, Any] | None = None,
    features_only: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Build the model that a checkpoint's config.json describes; timm calls this.

    A new head is initialised from torch's global generator, as timm's own heads are.

    Args:
        pretrained: Load the weights that are beside the config.
        plan: `model_args.plan` of the config.
        pretrained_cfg: `pretrained_cfg` of the config, and where the config was found.
        pretrained_cfg_overlay: The caller's changes to `pretrained_cfg`.
        cache_dir: Cache folder of the hub.
        pretrained_model_args: `model_args` of the config, without the caller's changes. timm's
            `create_model` passes them for `local-dir:` and `hf-hub:`; other callers need not.
        features_only: Build timm's feature extractor.
        kwargs: Arguments of the base model.

    Raises:
        CheckpointError: The weights do not belong to the config, or are damaged.
        ModelError: The config's model is neither timm's nor torchvision's, or cannot be built.
    """
    if plan is None:
        raise ModelError(
            f'"{TIMM_ARCHITECTURE}" is not a model by itself; '
            'load a checkpoint: timm.create_model("local-dir:FOLDER")'
        )
    stored = ConversionPlan.from_dict(plan, f"{CONFIG}: {PLAN_KEY}")
    _check_arguments(stored.model or "", pretrained_model_args or kwargs)
    cfg = _resolved_cfg(pretrained_cfg, pretrained_cfg_overlay)
    checkpoint = None
    if pretrained:
        checkpoint = _open_checkpoint_of_weights(cfg, cache_dir)
    model = _build(stored, kwargs, cfg, features_only=features_only)
    placed = stored
    if features_only:
        placed = plan_for_features(model, stored)
    if not placed.layers:
        pass  # the features come before the first converted layer
    elif pretrained:
        _place_(model, placed, kwargs)
    else:  # random values, as in timm's own models without weights
        from ..conversion.apply_plan import apply_plan_  # imports all of `fitting`

        apply_plan_(model, placed, init="random", generator=torch.default_generator)
    timm_cfg = getattr(model, "pretrained_cfg", None) or {}
    for name in ("classifier", "first_conv"):
        if name in timm_cfg:
            cfg[name] = timm_cfg[name]
    set_pretrained_cfg_(model, {**cfg, "architecture": TIMM_ARCHITECTURE})
    if pretrained:
        _load_by_timm_(
            model,
            cfg,
            checkpoint,
            in_chans=kwargs.get("in_chans"),
            features_only=features_only,
            cache_dir=cache_dir,
        )
    if checkpoint is not None:
        attach_provenance_(model, checkpoint.provenance)
    return model


def _place_(model: nn.Module, plan: ConversionPlan, kwargs: Mapping[str, Any]) -> None:
    """Place the plan's layers; explain if the caller's arguments have changed the convolutions."""
    try:
        place_stored_plan_(model, plan)
    except CheckpointError as error:
        changed = []
        for name, value in kwargs.items():
            if value != plan.model_args.get(name):
                changed.append(f"{name}={value!r}")
        if not changed:
            raise
        raise CheckpointError(
            f"{error}; if {' or '.join(changed)} causes this, convert the network with it: "
            f"--model-kwargs {' '.join(changed)}"
        ) from error


def _resolved_cfg(
    pretrained_cfg: Any, pretrained_cfg_overlay: dict[str, Any] | None
) -> dict[str, Any]:
    """Return timm's `pretrained_cfg` for the weights, without any place other than the folder."""
    from timm.models import resolve_pretrained_cfg

    resolved: Any = resolve_pretrained_cfg(
        TIMM_ARCHITECTURE, pretrained_cfg, pretrained_cfg_overlay
    )
    return {**resolved.to_dict(), **NO_OTHER_WEIGHTS}


def _build(
    plan: ConversionPlan,
    kwargs: Mapping[str, Any],
    cfg: Mapping[str, Any],
    *,
    features_only: bool,
) -> nn.Module:
    """Build the unconverted network, or timm's feature extractor of it."""
    name = plan.model or ""
    args = dict(kwargs)
    if name.startswith("timm:"):
        args.setdefault("num_classes", cfg["num_classes"])
    elif features_only:
        raise ModelError(f"features_only is for models that timm builds, not for {name}")
    if features_only:
        args["features_only"] = True
    # Safe: `_check_arguments` has checked the folder's arguments. The caller's may be any objects.
    return build_model(ModelSource(name=name, args=args), seed=None, trust_code=True)


def _load_by_timm_(
    model: nn.Module,
    cfg: dict[str, Any],
    checkpoint: Checkpoint | None,
    *,
    in_chans: int | None,
    features_only: bool,
    cache_dir: str | Path | None,
) -> None:
    """Let timm load the weights and adapt them to the model's head and first convolution.

    Args:
        model: The model with its DCLS layers placed.
        cfg: timm's `pretrained_cfg` for the weights.
        checkpoint: The folder of the weights; None if they are not a safetensors file.
        in_chans: Number of input channels that the caller requested; None for the stored number.
        features_only: Whether the model is a feature extractor.
        cache_dir: Cache folder of the hub.
    """
    from timm.models import load_pretrained

    stored_channels = cfg["input_size"][0]
    classes = getattr(model, "num_classes", cfg["num_classes"])
    channels = in_chans or stored_channels
    if features_only:  # there is no head, and `_features_state` adapts the first convolution
        classes = 0
        channels = stored_channels

    def adapt(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        if checkpoint is not None:  # timm has read the file; check what it read
            checkpoint.check_tensors(state)
        if features_only:
            state = _features_state(state, model, cfg, in_chans)
        return _complete_state(state, model, cfg)

    if checkpoint is not None:
        # Also if the weights came from a hub: the files that were checked are the ones to load.
        cfg = {**cfg, "source": "local-dir", "file": str(checkpoint.folder)}
    try:
        load_pretrained(
            model,
            pretrained_cfg=cfg,
            num_classes=classes,
            in_chans=channels,
            filter_fn=adapt,
            cache_dir=cache_dir,
        )
    except RuntimeError as error:  # from load_state_dict, on many lines
        raise CheckpointError(f"{WEIGHTS}: {one_line(error)[:300]}") from error


def _check_arguments(base: str, args: Mapping[str, Any]) -> None:
    """Refuse (ModelError) a folder's arguments that could run code or allocate unbounded memory."""
    if not base:
        raise ModelError(
            "timm cannot build this folder's model; "
            "dcls_convert.load_converted(FOLDER, model=YOURS) can"
        )
    stored = {name: value for name, value in args.items() if name != "plan"}
    check_source(ModelSource(name=base, args=stored))
    # `load_converted` compares these with the weights before allocating memory.
    for name in UNBOUNDED_ARGUMENTS:
        value = stored.get(name)
        if isinstance(value, int) and value > MAX_IN_TIMM:
            raise ModelError(f"{CONFIG}: {name}={value}: timm loads at most {MAX_IN_TIMM:,}")


def _open_checkpoint_of_weights(
    cfg: Mapping[str, Any], cache_dir: str | Path | None
) -> Checkpoint | None:
    """Open the checkpoint whose weights timm will load.

    Weights on a hub are downloaded first. Return None if they are not a safetensors file.
    """
    path = _weights_path(cfg, cache_dir)
    if path is None or not os.path.lexists(path):
        return None
    return open_checkpoint(path.parent)


def _weights_path(cfg: Mapping[str, Any], cache_dir: str | Path | None) -> Path | None:
    """Return the path of the safetensors file; None for other sources, or if the hub has none."""
    if cfg.get("source") == "local-dir":
        return Path(cfg.get("file") or "") / WEIGHTS
    if cfg.get("source") != "hf-hub":
        return None
    import huggingface_hub

    repository, _, revision = str(cfg.get("hf_hub_id")).partition("@")
    with contextlib.suppress(huggingface_hub.errors.EntryNotFoundError):
        file = huggingface_hub.hf_hub_download(
            repository, WEIGHTS, revision=revision or None, cache_dir=cache_dir
        )
        return Path(file)
    return None


def _module_names(entry: str | Iterable[str] | None) -> list[str]:
    """Return the modules that an entry of a `pretrained_cfg` names: none, one or several."""
    if isinstance(entry, str):
        return [entry]
    return list(entry or ())


def _complete_state(
    state: Mapping[str, Tensor], model: nn.Module, cfg: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors with those of aliased names added.

    Raise if a tensor is missing: with another number of classes, timm does not check this itself.
    """
    own = model.state_dict(keep_vars=True)
    complete = dict(state)
    for alias, name in aliases_in(own).items():
        if name in state:
            complete[alias] = state[name]
    heads = tuple(f"{name}." for name in _module_names(cfg.get("classifier")))
    missing = []
    for name in own:
        if name not in complete and not name.startswith(heads):
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{WEIGHTS}: lacks {short_list(missing, 1)} of the model that {CONFIG} describes"
        )
    return complete


def flat_name(name: str) -> str:
    """Replace dots as timm's feature lists do: "stages.0" becomes "stages_0"."""
    return name.replace(".", "_")


def _names_in_whole_model(names: Collection[str], known: Container[str]) -> dict[str, str]:
    """Map names in a feature extractor to flat names in the whole model.

    The extractor may have put a prefix before all names. Use the prefix whose removal gives the
    most known names.
    """
    best: dict[str, str] = {}
    for prefix in WRAPPER_PREFIXES:
        matches = {}
        for name in names:
            flat = flat_name(name.removeprefix(prefix))
            if flat in known:
                matches[name] = flat
        if len(matches) > len(best):
            best = matches
    return best


def plan_for_features(model: nn.Module, plan: ConversionPlan) -> ConversionPlan:
    """Translate the plan to the names of a feature extractor.

    Layers after the last feature are dropped: the extractor does not have them.
    """
    name_of_flat = {flat_name(name): name for layer in plan.layers for name in layer.names}
    modules = dict(model.named_modules(remove_duplicate=False))
    extractor_name = {}
    for name, flat in _names_in_whole_model(modules, name_of_flat).items():
        extractor_name[name_of_flat[flat]] = name
    layers = []
    for layer in plan.layers:
        names = tuple(extractor_name[name] for name in layer.names if name in extractor_name)
        if names:
            layers.append(replace(layer, names=names))
    return replace(plan, layers=tuple(layers))


def _features_state(
    state: Mapping[str, Tensor],
    model: nn.Module,
    cfg: Mapping[str, Any],
    in_chans: int | None,
) -> dict[str, Tensor]:
    """Return the checkpoint's tensors under the feature extractor's names.

    The first convolution is adapted to `in_chans`.
    """
    from timm.models import adapt_input_conv

    flat = {flat_name(name): tensor for name, tensor in state.items()}
    if in_chans not in (None, cfg["input_size"][0]):
        for name in _module_names(cfg.get("first_conv")):
            weight = flat_name(f"{name}.weight")
            flat[weight] = adapt_input_conv(in_chans, flat[weight])
    names = _names_in_whole_model(model.state_dict(), flat)
    return {name: flat[key] for name, key in names.items()}
