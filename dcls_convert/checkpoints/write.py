"""Write the files of a checkpoint folder: weights, config and other texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from .. import __version__
from ..errors import CheckpointError
from ..networks.position_parameters import clamp_positions_
from ..networks.pretrained_cfg import SOURCE_KEYS
from ..networks.registries import TIMM_ARCHITECTURE
from ..networks.wrappers import plain_name
from ..placing.place import timm_model_args
from ..planning.plan import ConversionPlan
from ..records import write_json
from ..text import short_list
from ..weights.loading import aliases_in, describe_non_finite
from ..weights.tensors_hash import tensors_hash
from .fingerprint import Fingerprint
from .folder import CONFIG, FORMAT_METADATA, PROVENANCE, WEIGHTS
from .stamp import METADATA_KEY, Stamp


def clamped_state_(model: nn.Module) -> dict[str, Tensor]:
    """Clamp the model's positions; return its state dict, with the very tensors of the model.

    Wrappers inside the model, such as a compiled stage, leave no trace in the names.

    Raises:
        CheckpointError: An entry is not a tensor, has no values, or has some that are not finite;
            or a parameter is missing, since the model's class overrides `state_dict`.
    """
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        state[plain_name(name)] = tensor
    missing = {plain_name(name) for name, _ in model.named_parameters()} - state.keys()
    if missing:
        raise CheckpointError(
            f"the model cannot be saved: its state dict lacks {short_list(sorted(missing))}, "
            "so a folder could not be loaded"
        )
    for name, tensor in state.items():
        problem = None
        if not isinstance(tensor, Tensor):
            problem = f"its state dict has {name}, which is not a tensor"
        elif tensor.is_meta:
            problem = f"{name} is on the meta device, without values"
        if problem is not None:
            raise CheckpointError(f"the model cannot be saved: {problem}")
    for name, tensor in state.items():
        # Buffers may be attention masks.
        is_parameter = isinstance(tensor, nn.Parameter)
        problem = describe_non_finite(name, tensor.detach(), mask=not is_parameter)
        if problem is not None:
            raise CheckpointError(f"the model: {problem}")
    clamp_positions_(model)
    return state


def write_weights(folder: Path, state: Mapping[str, Tensor], fingerprint: Fingerprint) -> None:
    """Write the weights into a folder that has a config, with a stamp.

    Args:
        folder: The folder.
        state: From `clamped_state_`.
        fingerprint: A summary of the model's outputs.
    """
    tensors = _tensors_to_save(state)
    stamp = Stamp(
        version=__version__, tensors=tensors_hash(tensors.items()), fingerprint=fingerprint
    )
    path = folder / WEIGHTS
    save_file(tensors, path, metadata={METADATA_KEY: stamp.to_json(), **FORMAT_METADATA})
    # safetensors does not use the default permissions, so copy them from the config.
    path.chmod((folder / CONFIG).stat().st_mode)


def write_texts(
    folder: Path,
    config: Mapping[str, Any],
    texts: Mapping[str, str],
    provenance: Mapping[str, Any] | None,
) -> None:
    """Write config and other texts into a folder.

    Args:
        folder: The folder.
        config: Contents of config.json, without this package's own entry.
        texts: Other text files: name to content.
        provenance: How the model was converted, if that is known.
    """
    config = {**config, METADATA_KEY: {PROVENANCE: provenance}}
    for name, text in {CONFIG: write_json(config), **texts}.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")


def timm_config(model: nn.Module, plan: ConversionPlan) -> dict[str, Any]:
    """Return the contents of a config.json that timm can read.

    It has `model_args` for this package's entry in timm's registry, and the preprocessing in
    `pretrained_cfg`.
    """
    cfg = {}
    for key, value in (getattr(model, "pretrained_cfg", None) or {}).items():
        if key not in SOURCE_KEYS and value is not None:
            cfg[key] = value
    classes = plan.model_args.get("num_classes", getattr(model, "num_classes", None))
    if isinstance(classes, int):
        cfg["num_classes"] = classes
    if plan.input_size is not None:
        cfg["input_size"] = list(plan.input_size)
    return {
        "architecture": TIMM_ARCHITECTURE,
        "model_args": timm_model_args(plan),
        "pretrained_cfg": cfg,
    }


def _tensors_to_save(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor once, on the CPU and in storage of its own, as safetensors requires."""
    aliases = aliases_in(state)
    seen_storages = set[int]()
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in aliases:
            continue
        cpu_tensor = tensor.detach().cpu().contiguous()
        storage = cpu_tensor.untyped_storage().data_ptr()
        if storage in seen_storages and cpu_tensor.numel():
            cpu_tensor = cpu_tensor.clone()
        tensors[name] = cpu_tensor
        seen_storages.add(storage)
    return tensors
