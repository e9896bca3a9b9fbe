"""Write a checkpoint folder: config, weights, report and card. It appears whole or not at all."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from .. import __version__
from ..errors import CheckpointError
from ..networks.position_parameters import clamp_positions_
from ..networks.registries import TIMM_ARCHITECTURE
from ..networks.wrappers import plain_name
from ..output import new_folder
from ..placing.place import timm_model_args
from ..planning.plan import ConversionPlan
from ..records import write_json
from ..reports.report import ConversionReport
from ..weights.loading import aliases_in, describe_non_finite
from ..weights.tensors_hash import tensors_hash
from .card import model_card
from .fingerprint import Fingerprint
from .folder import CARD, CONFIG, FORMAT_METADATA, PICTURE, REPORT, WEIGHTS, reason_not_a_checkpoint
from .loading_code import loading_code
from .stamp import METADATA_KEY, PROVENANCE, Stamp, config_hash

# Entries of timm's config that say where to find the weights. They are omitted, since the weights
# are in the same folder.
SOURCE_KEYS = {
    "url",
    "file",
    "state_dict",
    "hf_hub_id",
    "hf_hub_filename",
    "source",
    "architecture",
    "custom_load",
}


def clamped_state_(model: nn.Module) -> dict[str, Tensor]:
    """Clamp the model's positions; return its state dict, with the very tensors of the model.

    Wrappers inside the model, such as a compiled stage, leave no trace in the names.

    Raises:
        CheckpointError: An entry is not a tensor, has no values, or has some that are not finite.
    """
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        state[plain_name(name)] = tensor
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


def write_checkpoint(
    model: nn.Module,
    plan: ConversionPlan,
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    report: ConversionReport,
    fingerprint: Fingerprint | None,
    provenance: Mapping[str, Any] | None,
    force: bool,
    picture: bytes | None,
) -> None:
    """Write a checkpoint folder of this package.

    Args:
        model: The model, whose preprocessing is written.
        plan: The plan by which the model can be rebuilt.
        folder: Folder to write.
        state: From `clamped_state_`.
        report: The model's report.
        fingerprint: A summary of the model's outputs, if it was run.
        provenance: How the model was converted, if that is known.
        force: Replace an existing checkpoint folder.
        picture: A PNG to add; the model card shows it.
    """
    files = f"`{CONFIG}` holds the plan and the rules; `{REPORT}` says what each layer costs."
    card = model_card(
        report,
        loading_code(plan.model),
        files,
        folder=folder.resolve().name,
        with_picture=picture is not None,
        provenance=provenance,
    )
    texts = {
        REPORT: replace(report, output=".").to_json(),  # the folder can be moved
        CARD: card,
    }
    with new_folder(folder, force=force, reason_to_keep=reason_not_a_checkpoint) as partial:
        write_checkpoint_files(
            partial,
            timm_config(model, plan),
            texts,
            state,
            fingerprint=fingerprint,
            provenance=provenance,
        )
        if picture is not None:
            (partial / PICTURE).write_bytes(picture)


def timm_config(model: nn.Module, plan: ConversionPlan) -> dict[str, Any]:
    """Return the contents of a config.json that timm can read.

    It has `model_args` for this package's entry in timm's registry, and the preprocessing in
    `pretrained_cfg`.
    """
    cfg = {}
    for key, value in (getattr(model, "pretrained_cfg", None) or {}).items():
        if key not in SOURCE_KEYS and value is not None:
            cfg[key] = value
    counts = {}
    for name in ("num_classes", "num_features"):
        count = plan.model_args.get(name, getattr(model, name, None))
        if isinstance(count, int):
            counts[name] = count
    if "num_classes" in counts:
        cfg["num_classes"] = counts["num_classes"]
    if plan.input_size is not None:
        cfg["input_size"] = list(plan.input_size)
    return {
        "architecture": TIMM_ARCHITECTURE,
        **counts,
        "model_args": timm_model_args(plan),
        "pretrained_cfg": cfg,
    }


def write_checkpoint_files(
    folder: Path,
    config: Mapping[str, Any],
    texts: Mapping[str, str],
    state: Mapping[str, Tensor],
    *,
    fingerprint: Fingerprint | None,
    provenance: Mapping[str, Any] | None,
) -> None:
    """Write config, other texts and weights into an empty folder.

    Args:
        folder: An empty folder.
        config: Contents of config.json, without this package's own entries.
        texts: Other text files: name to content.
        state: From `clamped_state_`.
        fingerprint: A summary of the model's outputs, if it was run.
        provenance: How the model was converted, if that is known.
    """
    tensors = _tensors_to_save(state)
    own_entries: dict[str, Any] = {"tensors": tensors_hash(tensors.items())}
    if provenance is not None:
        own_entries[PROVENANCE] = provenance
    config = {**config, METADATA_KEY: own_entries}
    config_text = write_json(config)
    for name, text in {CONFIG: config_text, **texts}.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    # Hash the config as it will be read back: JSON turns all keys into strings.
    stamp = Stamp(
        version=__version__,
        config=config_hash(json.loads(config_text)),
        fingerprint=fingerprint,
    )
    weights = folder / WEIGHTS
    save_file(tensors, weights, metadata={METADATA_KEY: stamp.to_json(), **FORMAT_METADATA})
    # safetensors does not use the default permissions, so copy them from the config.
    weights.chmod((folder / CONFIG).stat().st_mode)


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
