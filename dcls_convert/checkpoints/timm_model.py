"""Rebuild a converted model through timm's factory, as a whole model or a feature extractor."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion.provenance import attach_provenance_
from ..errors import CheckpointError, ModelError
from ..networks.building import build_model
from ..networks.source import TIMM_ARCHITECTURE, ModelSource, check_source
from ..networks.timm_notes import build_features, is_extractor, set_pretrained_cfg_
from ..planning.plan import ConversionPlan
from ..text import one_line, short_list
from ..weights.loading import aliases_in, classifier_prefixes, load_weights_
from .folder import CONFIG, PLAN_KEY, TORCH_WEIGHTS, WEIGHTS, open_folder
from .load import place_stored_plan_
from .stored_weights import read_state


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
    """Build the model that a folder's config.json describes; timm calls this.

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
    from timm.models import resolve_pretrained_cfg

    stored = _checked_plan(plan, pretrained_model_args or kwargs)
    resolved: Any = resolve_pretrained_cfg(
        TIMM_ARCHITECTURE, pretrained_cfg, pretrained_cfg_overlay
    )
    cfg = resolved.to_dict()
    source = _source(stored, kwargs, cfg, features_only=features_only)
    opened = None
    if pretrained:
        opened = open_folder(_weights_folder(cfg, cache_dir))
        weights = read_state(opened)
        # Take the number of classes from `model_args`, not from an edited entry elsewhere: if the
        # model has another number, timm draws a random classifier.
        classes = (pretrained_model_args or {}).get("num_classes", cfg["num_classes"])
        weights_cfg = {**cfg, "num_classes": classes}
        finish_ = partial(
            _load_, plan=stored, weights=weights, cfg=weights_cfg, in_chans=kwargs.get("in_chans")
        )
    else:
        finish_ = partial(_initialise_, plan=stored)
    if features_only and not stored.model_args.get("features_only"):
        model = build_features(source, finish_)
    else:
        # Safe: `_checked_plan` has checked the folder's arguments; the caller's are trusted.
        model = build_model(source, seed=None, trust_code=True)
        finish_(model)
    set_pretrained_cfg_(model, {**cfg, "architecture": TIMM_ARCHITECTURE})
    if opened is not None:
        attach_provenance_(model, opened.provenance)
    return model


def _checked_plan(plan: Mapping[str, Any] | None, args: Mapping[str, Any]) -> ConversionPlan:
    """Return the plan; refuse (ModelError) a model that timm cannot build, or not safely."""
    if plan is None:
        raise ModelError(
            f'"{TIMM_ARCHITECTURE}" is not a model by itself; '
            'load a folder: timm.create_model("local-dir:FOLDER")'
        )
    stored = ConversionPlan.from_dict(plan, f"{CONFIG}: {PLAN_KEY}")
    if stored.model is None:
        raise ModelError(
            "timm cannot build this folder's model; "
            "dcls_convert.load_converted(FOLDER, model=YOURS) can"
        )
    own_args = {name: value for name, value in args.items() if name != "plan"}
    check_source(ModelSource(name=stored.model, args=own_args))
    return stored


def _source(
    plan: ConversionPlan, kwargs: Mapping[str, Any], cfg: Mapping[str, Any], *, features_only: bool
) -> ModelSource:
    """Return the source of the base model, with the caller's arguments."""
    assert plan.model is not None
    args = dict(kwargs)
    if plan.model.startswith("timm:"):
        args.setdefault("num_classes", cfg["num_classes"])
    elif features_only:
        raise ModelError(f"features_only is for models that timm builds, not for {plan.model}")
    if features_only:
        args["features_only"] = True
    return ModelSource(name=plan.model, args=args)


def _plan_for(model: nn.Module, plan: ConversionPlan) -> ConversionPlan:
    """Return the plan; for an extractor, without layers after the last feature."""
    if not is_extractor(model):
        return plan
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    return replace(plan, layers=tuple(layer for layer in plan.layers if layer.name in names))


def _initialise_(model: nn.Module, *, plan: ConversionPlan) -> None:
    """Place the plan's layers with random values, as in timm's own models without weights."""
    from ..conversion.apply_plan import apply_plan_  # imports all of `starts`

    plan = _plan_for(model, plan)
    if plan.layers:
        apply_plan_(model, plan, init="random", generator=torch.default_generator)


def _load_(
    model: nn.Module,
    *,
    plan: ConversionPlan,
    weights: Mapping[str, Tensor],
    cfg: dict[str, Any],
    in_chans: int | None,
) -> None:
    """Place the plan's layers, and load a folder's weights.

    timm adapts the weights of its models to the head and the first convolution.

    Args:
        model: The base model.
        plan: The folder's plan.
        weights: The folder's tensors.
        cfg: timm's `pretrained_cfg` for the weights.
        in_chans: Number of input channels that the caller requested; None for the stored number.
    """
    from timm.models import load_pretrained

    place_stored_plan_(model, _plan_for(model, plan))
    if plan.source is None or plan.source.prefix != "timm":
        load_weights_(model, weights, WEIGHTS)
        return
    state = _complete_state(weights, model)
    try:
        load_pretrained(
            model,
            pretrained_cfg={**cfg, "source": "", "state_dict": state},
            num_classes=getattr(model, "num_classes", cfg["num_classes"]),
            in_chans=in_chans or cfg["input_size"][0],
        )
    except RuntimeError as error:  # from load_state_dict, on many lines
        raise CheckpointError(f"{WEIGHTS}: {one_line(error)[:300]}") from error


def _weights_folder(cfg: Mapping[str, Any], cache_dir: str | Path | None) -> Path:
    """Return the folder of a config; if the config is on a hub, its weights are downloaded."""
    if cfg.get("source") == "local-dir":
        return Path(cfg.get("file") or "")
    if cfg.get("source") == "hf-hub":
        import huggingface_hub

        repository, _, revision = str(cfg.get("hf_hub_id")).partition("@")
        for name in (WEIGHTS, TORCH_WEIGHTS):
            with contextlib.suppress(huggingface_hub.errors.EntryNotFoundError):
                file = huggingface_hub.hf_hub_download(
                    repository, name, revision=revision or None, cache_dir=cache_dir
                )
                return Path(file).parent
    raise CheckpointError(
        f"there are no weights beside {CONFIG}; pretrained=False draws random ones"
    )


def _complete_state(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return each tensor under all its names; for a feature extractor, only its own tensors.

    Raise (CheckpointError) if a tensor is missing: timm does not check this if the number of
    classes differs.
    """
    own = model.state_dict(keep_vars=True)
    complete = dict(state)
    for alias, name in aliases_in(own).items():
        if name in state:
            complete[alias] = state[name]
    heads = classifier_prefixes(model)
    missing = [name for name in own if name not in complete and not name.startswith(heads)]
    if missing:
        raise CheckpointError(
            f"{WEIGHTS}: lacks {short_list(missing, 1)} of the model that {CONFIG} describes"
        )
    if is_extractor(model):
        return {name: complete[name] for name in own if name in complete}
    return complete
