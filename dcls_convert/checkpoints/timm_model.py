"""Rebuild a converted model for timm's factory: base model, plan, weights, and feature extraction."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError, ModelError, shown
from ..networks.source import ModelSource, build_model
from ..networks.weights import alias_names
from ..planning.plan import ConversionPlan, LayerPlan, TieGroup, plan_from_json
from ..planning.tie_groups import common_parent
from ..surgery.place import TIMM_ARCHITECTURE, note_for_timm, place_layers_, timm_model_args
from .stamp import WEIGHTS, Stamp, read_stamp, tensors_hash

PLAN_IN_CONFIG = "config.json: model_args.plan"
WRAPPER_PREFIXES = ("", "model.", "body.", "graph_module.")  # where timm's feature extractors keep the model


def create_dcls(
    *,
    pretrained: bool = False,
    base: str | None = None,
    plan: Mapping[str, Any] | None = None,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    pretrained_model_args: Mapping[str, Any] | None = None,
    features_only: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """The model that `config.json` describes; arguments as timm's factory passes them.

    Args:
        pretrained: Load the weights that stand beside the config.
        base: The model that was converted, "timm:convnext_tiny".
        plan: `ConversionPlan.to_dict()`.
        pretrained_cfg: From the config, with the place of the weights.
        features_only: Give feature maps, as timm does for the base model.
        kwargs: For the base model, such as num_classes, in_chans, drop_path_rate, out_indices.

    Raises:
        ModelError: Called by name instead of for a checkpoint.
        CheckpointError: Weights that do not belong to the plan, or are not those that were written.

    What `save_converted` wrote is checked against the metadata of its weights; hashing them takes about as long as
    reading them. Folders that timm's own savers wrote have none, and are held to names and shapes alone.
    """
    from timm.models import load_pretrained, resolve_pretrained_cfg

    if base is None or plan is None:
        raise ModelError('"dcls" is not a model by itself; load a checkpoint: timm.create_model("local-dir:FOLDER")')
    conversion = plan_from_json(json.dumps(plan), PLAN_IN_CONFIG)
    if base != conversion.model:
        raise CheckpointError(f"config.json: model_args.base is {base!r}, its plan is for {conversion.model!r}")
    config = resolve_pretrained_cfg(TIMM_ARCHITECTURE, pretrained_cfg, pretrained_cfg_overlay).to_dict()  # type: ignore[no-untyped-call]
    if pretrained and config.get("source") == "local-dir":
        _checked_stamp(config, conversion, pretrained_model_args, cache_dir)  # before anything is built
    if base.startswith("timm:"):
        kwargs.setdefault("num_classes", config["num_classes"])
    elif features_only:
        raise ModelError(f"features_only is for models that timm builds, not for {base}")
    # A head of no classes has no random state worth a seed; everything else is seeded for repeatable new heads.
    source = ModelSource(name=base, args={**kwargs, "features_only": True} if features_only else kwargs)
    model = build_model(source)
    conversion_of_file = conversion
    if features_only:
        names = _feature_names(model, conversion)
        conversion = _plan_for_features(conversion, names)
    place_layers_(model, conversion)
    note_for_timm(model, {**config, "architecture": TIMM_ARCHITECTURE})
    if pretrained:

        def fit(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
            stamp = _checked_stamp(config, conversion_of_file, pretrained_model_args, cache_dir)
            if stamp is not None:
                stamp.check_tensors(tensors_hash(state.items()), Path(WEIGHTS))
            if features_only:
                return _features_state(state, model, config, kwargs.get("in_chans"))
            state = state | {alias: state[name] for alias, name in alias_names(model).items() if name in state}
            _check_complete(state, model, config)
            return state

        load_pretrained(
            model,
            pretrained_cfg=config,
            num_classes=0 if features_only else getattr(model, "num_classes", config["num_classes"]),
            in_chans=config["input_size"][0] if features_only else kwargs.get("in_chans", config["input_size"][0]),
            filter_fn=fit,
            cache_dir=cache_dir,
        )
    return model


def _checked_stamp(
    config: Mapping[str, Any], plan: ConversionPlan, stored_args: Mapping[str, Any] | None, cache_dir: str | Path | None
) -> Stamp | None:
    """The stamp of the weights that timm loads for this config, if it has one; its plan and arguments must be these."""
    path = _file_of(config, WEIGHTS, cache_dir)
    stamp = None if path is None else read_stamp(path)
    if path is None or stamp is None:
        return None
    stamp.check_plan(plan, path, f"the plan in {PLAN_IN_CONFIG}")
    beside = _file_of(config, "config.json", cache_dir)
    if beside is not None:
        stamp.check_config(beside, path)
    wanted = json.loads(json.dumps(timm_model_args(plan)))
    for name in sorted(wanted.keys() | (stored_args or wanted).keys()):
        found = (stored_args or wanted).get(name)
        if found != wanted.get(name):
            raise CheckpointError(f"config.json: model_args.{name} is {shown(found)}, not what the plan says")
    return stamp


def _file_of(config: Mapping[str, Any], name: str, cache_dir: str | Path | None) -> Path | None:
    """A file of the folder or the repository from which timm loads; None where it is not there, or not yet."""
    source, repository = config.get("source"), config.get("hf_hub_id")
    if source == "local-dir" and config.get("file"):
        path = Path(config["file"]) / name
        return path if path.exists() or path.is_symlink() else None
    if source == "hf-hub" and repository and not config.get("hf_hub_filename"):
        import huggingface_hub

        id_, _, revision = str(repository).partition("@")
        found = huggingface_hub.try_to_load_from_cache(id_, name, cache_dir=cache_dir, revision=revision or None)
        return Path(found) if isinstance(found, str) else None
    return None


def _check_complete(state: Mapping[str, Tensor], model: nn.Module, config: Mapping[str, Any]) -> None:
    """Refuse weights that lack a tensor: with another number of classes, timm itself takes whatever there is."""
    classifiers = config.get("classifier") or ()
    heads = tuple(f"{name}." for name in ([classifiers] if isinstance(classifiers, str) else classifiers))
    missing = [name for name in model.state_dict() if name not in state and not name.startswith(heads)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{WEIGHTS}: lacks {missing[0]}{more} of the model that config.json describes")


def _flat(name: str) -> str:
    """timm's feature lists turn "stages.0" into "stages_0"."""
    return name.replace(".", "_")


def _feature_names(model: nn.Module, plan: ConversionPlan) -> dict[str, str]:
    """Names of the plan's layers -> their names in the feature extractor; those behind the last feature are gone."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    best: dict[str, str] = {}
    for prefix in WRAPPER_PREFIXES:
        inside = {_flat(name.removeprefix(prefix)): name for name in modules if name.startswith(prefix)}
        found = {n: inside[_flat(n)] for layer in plan.layers for n in layer.names if _flat(n) in inside}
        best = max(best, found, key=len)
    if not best:
        raise ModelError(f"none of the {len(plan.layers)} converted layers is found in timm's {type(model).__name__}")
    return best


def _plan_for_features(plan: ConversionPlan, names: Mapping[str, str]) -> ConversionPlan:
    layers: list[LayerPlan] = []
    for layer in plan.layers:
        kept = tuple(names[name] for name in layer.names if name in names)
        if kept:
            layers.append(replace(layer, names=kept))
    groups: list[TieGroup] = []
    for group in plan.tie_groups:
        members = tuple(layer.name for layer in layers if layer.tie_group == group.name)
        if members:
            groups.append(replace(group, owner=common_parent(members), layers=members))
    return replace(plan, layers=tuple(layers), tie_groups=tuple(groups))


def _features_state(
    state: Mapping[str, Tensor], model: nn.Module, config: Mapping[str, Any], in_chans: int | None
) -> dict[str, Tensor]:
    """The checkpoint's tensors under the names that they have in the feature extractor."""
    from timm.models import adapt_input_conv

    state = dict(state)
    first = config.get("first_conv")
    for name in [first] if isinstance(first, str) else first or ():
        if in_chans is not None and in_chans != config["input_size"][0]:
            state[f"{name}.weight"] = adapt_input_conv(in_chans, state[f"{name}.weight"])
    flat = {_flat(name): tensor for name, tensor in state.items()}
    best: dict[str, Tensor] = {}
    own = model.state_dict()
    for prefix in WRAPPER_PREFIXES:
        found = {name: flat[key] for name in own if (key := _flat(name.removeprefix(prefix))) in flat}
        best = max(best, found, key=len)
    best |= {alias: best[name] for alias, name in alias_names(model).items() if name in best}
    missing = [name for name in own if name not in best]
    if missing:
        raise CheckpointError(f"the weights lack {missing[0]} and {len(missing) - 1} more of timm's feature extractor")
    return best
