"""Rebuild a converted model for timm's factory: base model, plan, weights, and feature extraction."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ModelError, listed, one_line
from ..networks.source import MOST_ARGUMENT, NOT_LISTED, ModelSource, build_model, check_source
from ..networks.stages import common_parent
from ..networks.weights import alias_names, misfits
from ..planning.plan import ConversionPlan
from ..surgery.place import TIMM_ARCHITECTURE, note_for_timm
from .folder import CONFIG, PLAN_PLACE, WEIGHTS, parse_config, read_checked_stamp, read_text
from .load import check_tensors, place_
from .stamp import Stamp

WRAPPER_PREFIXES = ("", "model.", "body.", "graph_module.")  # where timm's feature extractors keep the model
# Weights come from the folder alone; other places that its config names are ignored.
NO_OTHER_WEIGHTS = {"url": "", "state_dict": None, "hf_hub_filename": None, "custom_load": False}


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
    """Build the model that `config.json` describes, from the arguments that timm's factory passes.

    Layers that have no weights in the folder, such as a new head, draw them from torch's global generator, as timm's
    own models do.

    Args:
        pretrained: Load the weights that stand beside the config.
        plan: `ConversionPlan.to_dict()`. Its model must be one of timm or torchvision: no code of the user's own runs.
        pretrained_cfg: From the config; timm has added where the weights are.
        pretrained_model_args: The config's `model_args`, unchanged.
        features_only: Give feature maps, as timm does for the base model.
        kwargs: For the base model, such as num_classes, in_chans, drop_path_rate, out_indices.

    Raises:
        ModelError: It is called by name, without a checkpoint; or the base model is not allowed or cannot be built.
        CheckpointError: The weights do not belong to the plan, or were changed after they were written.

    A folder of `save_converted` is checked against the metadata of its weights; hashing the weights takes about as long
    as reading them. A folder of timm's own savers has no metadata; only names and shapes are checked.
    """
    if plan is None:
        raise ModelError(
            f'"{TIMM_ARCHITECTURE}" is not a model by itself; load a checkpoint: timm.create_model("local-dir:FOLDER")'
        )
    conversion = ConversionPlan.from_dict(plan, f"{CONFIG}: {PLAN_PLACE}")
    base = conversion.model or ""
    stored = {name: value for name, value in (pretrained_model_args or kwargs).items() if name != "plan"}
    _check_stored(base, stored)
    config = _resolved_config(pretrained_cfg, pretrained_cfg_overlay)
    if pretrained and config.get("source") == "local-dir":
        _stamp(config, cache_dir)  # refuse before anything is built
    if base.startswith("timm:"):
        kwargs.setdefault("num_classes", config["num_classes"])
    elif features_only:
        raise ModelError(f"features_only is for models that timm builds, not for {base}")
    source = ModelSource(name=base, args={**kwargs, "features_only": True} if features_only else kwargs)
    model = build_model(
        source, seed=None, trust_code=True
    )  # the folder's source is checked above; the caller's arguments may be any objects
    placed = _plan_for_features(conversion, _feature_names(model, conversion)) if features_only else conversion
    _put_layers_(model, placed, with_values=not pretrained)
    known = getattr(model, "pretrained_cfg", None) or {}
    config |= {name: known[name] for name in ("classifier", "first_conv") if name in known}
    note_for_timm(model, {**config, "architecture": TIMM_ARCHITECTURE})
    if pretrained:
        _load_(model, config, kwargs.get("in_chans"), features_only, cache_dir)
    return model


def _check_stored(base: str, stored: dict[str, Any]) -> None:
    """Refuse what a config may not ask for, before anything is built."""
    check_source(ModelSource(name=base, args=stored))
    for name in NOT_LISTED:  # `load_converted` compares them with the weights before they cost memory; timm does not
        if isinstance(stored.get(name), int) and stored[name] > MOST_ARGUMENT:
            raise ModelError(f"{CONFIG}: {name}={stored[name]}: through timm, {MOST_ARGUMENT:,} is the most")


def _put_layers_(model: nn.Module, plan: ConversionPlan, *, with_values: bool) -> None:
    """With values, the layers get random ones, as timm's own layers do without weights."""
    if not with_values:
        place_(model, plan)
        return
    from ..surgery.start import apply_plan_

    apply_plan_(model, plan, init="random", generator=torch.default_generator)


def _load_(
    model: nn.Module,
    config: dict[str, Any],
    in_chans: int | None,
    features_only: bool,
    cache_dir: str | Path | None,
) -> None:
    """Load the weights by timm's own function, which adapts head and first convolution."""
    from timm.models import load_pretrained

    def fit(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        check_tensors(state, _stamp(config, cache_dir), Path(WEIGHTS))
        if features_only:
            return _features_state(state, model, config, in_chans)
        state = state | {alias: state[name] for alias, name in alias_names(model).items() if name in state}
        _check_complete(state, model, config)
        return state

    channels = config["input_size"][0]
    load_pretrained(
        model,
        pretrained_cfg=config,
        num_classes=0 if features_only else getattr(model, "num_classes", config["num_classes"]),
        in_chans=channels if features_only or in_chans is None else in_chans,
        filter_fn=fit,
        cache_dir=cache_dir,
    )


def _resolved_config(given: Any, overlay: dict[str, Any] | None) -> dict[str, Any]:
    from timm.models import resolve_pretrained_cfg

    try:
        config = resolve_pretrained_cfg(TIMM_ARCHITECTURE, given, overlay).to_dict()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{CONFIG}: pretrained_cfg: {one_line(error)[:200]}") from error
    return {**config, **NO_OTHER_WEIGHTS}


def _stamp(config: Mapping[str, Any], cache_dir: str | Path | None) -> Stamp | None:
    """The stamp in the weights that timm loads, or None; refuses weights that do not belong to the config."""
    weights, beside = (_file_of(config, name, cache_dir) for name in (WEIGHTS, CONFIG))
    if weights is None or beside is None:
        return None
    return read_checked_stamp(weights, parse_config(read_text(beside), str(beside)))


def _file_of(config: Mapping[str, Any], name: str, cache_dir: str | Path | None) -> Path | None:
    """A file of the folder or repository from which timm loads; None if it is missing or not downloaded yet."""
    source, repository = config.get("source"), config.get("hf_hub_id")
    if source == "local-dir" and config.get("file"):
        path = Path(config["file"]) / name
        return path if path.exists() or path.is_symlink() else None
    if source == "hf-hub" and repository:
        import huggingface_hub

        id_, _, revision = str(repository).partition("@")
        found = huggingface_hub.try_to_load_from_cache(id_, name, cache_dir=cache_dir, revision=revision or None)
        return Path(found) if isinstance(found, str) else None
    return None


def _check_complete(state: Mapping[str, Tensor], model: nn.Module, config: Mapping[str, Any]) -> None:
    """Refuse weights that lack a tensor: with another number of classes, timm itself does not check."""
    classifiers = config.get("classifier") or ()
    heads = tuple(f"{name}." for name in ([classifiers] if isinstance(classifiers, str) else classifiers))
    if missing := [name for name in model.state_dict() if name not in state and not name.startswith(heads)]:
        raise CheckpointError(f"{WEIGHTS}: lacks {listed(missing, 1)} of the model that {CONFIG} describes")
    first = config.get("first_conv") or ()
    adapted = heads + tuple(f"{name}." for name in ([first] if isinstance(first, str) else first))
    same = {name: tensor for name, tensor in state.items() if not name.startswith(adapted)}
    if problem := next(misfits(model, same, lacking=model.state_dict()), None):
        raise CheckpointError(f"{WEIGHTS}: {problem}")


def _flat(name: str) -> str:
    """timm's feature lists turn "stages.0" into "stages_0"."""
    return name.replace(".", "_")


def _unwrapped(names: Iterable[str], known: Container[str]) -> dict[str, str]:
    """Names in a feature extractor -> flat names in the whole model, less the prefix that makes most names match."""
    found = (
        {name: flat for name in names if (flat := _flat(name.removeprefix(prefix))) in known}
        for prefix in WRAPPER_PREFIXES
    )
    return max(found, key=len)


def _feature_names(model: nn.Module, plan: ConversionPlan) -> dict[str, str]:
    """The plan's layer names -> names in the feature extractor, which has no layers behind its last feature."""
    names = {_flat(name): name for layer in plan.layers for name in layer.names}
    found = _unwrapped([name for name, _ in model.named_modules(remove_duplicate=False)], names)
    if not found:
        raise ModelError(f"none of the {len(plan.layers)} converted layers is found in timm's {type(model).__name__}")
    return {names[flat]: name for name, flat in found.items()}


def _plan_for_features(plan: ConversionPlan, names: Mapping[str, str]) -> ConversionPlan:
    kept = [(layer, tuple(names[name] for name in layer.names if name in names)) for layer in plan.layers]
    layers = tuple(replace(layer, names=found) for layer, found in kept if found)
    members = [(group, tuple(m.name for m in layers if m.tie_group == group.name)) for group in plan.tie_groups]
    groups = tuple(replace(group, owner=common_parent(inside), layers=inside) for group, inside in members if inside)
    return replace(plan, layers=layers, tie_groups=groups)


def _features_state(
    state: Mapping[str, Tensor], model: nn.Module, config: Mapping[str, Any], in_chans: int | None
) -> dict[str, Tensor]:
    """The checkpoint's tensors under the feature extractor's names."""
    from timm.models import adapt_input_conv

    state = dict(state)
    first = config.get("first_conv")
    for name in [first] if isinstance(first, str) else first or ():
        if in_chans is not None and in_chans != config["input_size"][0]:
            state[f"{name}.weight"] = adapt_input_conv(in_chans, state[f"{name}.weight"])
    flat = {_flat(name): tensor for name, tensor in state.items()}
    own = model.state_dict()
    found = {name: flat[key] for name, key in _unwrapped(own, flat).items()}
    found |= {alias: found[name] for alias, name in alias_names(model).items() if name in found}
    if missing := [name for name in own if name not in found]:
        raise CheckpointError(f"{WEIGHTS}: lacks {listed(missing, 1)} of timm's feature extractor")
    return found
