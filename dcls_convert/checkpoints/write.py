"""Write the files of a folder: weights, config and other texts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from .. import __version__
from ..conversion.provenance import provenance_of
from ..errors import CheckpointError
from ..layers.position_parameters import clamp_positions_
from ..networks.source import TIMM_ARCHITECTURE
from ..networks.timm_notes import SOURCE_KEYS, config_of
from ..networks.wrappers import by_plain_name
from ..placing.place import timm_model_args
from ..planning.plan import ConversionPlan
from ..records import write_json
from ..reports.report import ConversionReport
from ..text import short_list
from ..weights.loading import aliases_in, describe_non_finite, describe_unusual
from .card import loading_code, model_card
from .fingerprint import Fingerprint
from .folder import (
    CARD,
    CONFIG,
    METADATA_KEY,
    PICTURE,
    PROVENANCE,
    REPORT,
    WEIGHTS,
)
from .stored_weights import Stamp, tensors_hash

ORDINARY_TENSORS = (
    "a folder holds ordinary dense tensors: save the model before it is sharded, quantised or "
    "offloaded, and keep all else out of its state dict"
)


def clamped_state_(model: nn.Module) -> dict[str, Tensor]:
    """Clamp the model's positions; return its state dict, with the model's own tensors.

    The names omit wrappers inside the model, such as a compiled stage.

    Raises:
        CheckpointError: An entry is not a tensor, has no values, or has NaN or infinity; or a
            parameter is missing, because the model's class overrides `state_dict`.
    """
    state: dict[str, Any] = by_plain_name(model.state_dict(keep_vars=True).items())
    missing = by_plain_name(model.named_parameters()).keys() - state.keys()
    if missing:
        raise CheckpointError(
            f"the model cannot be saved: its state dict lacks {short_list(sorted(missing))}, "
            "so a folder could not be loaded"
        )
    for name, tensor in state.items():
        problem = describe_unusual(tensor)
        if problem is not None:
            problem = f"{name} is {problem}; {ORDINARY_TENSORS}"
        else:
            is_parameter = isinstance(tensor, nn.Parameter)  # buffers may be attention masks
            problem = describe_non_finite(name, tensor.detach(), mask=not is_parameter)
        if problem is not None:
            raise CheckpointError(f"the model cannot be saved: {problem}")
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
    # accelerate and transformers refuse files that do not name torch as their format.
    save_file(tensors, path, metadata={"format": "pt", METADATA_KEY: stamp.to_json()})
    # safetensors does not use the default permissions, so copy them from the config.
    path.chmod((folder / CONFIG).stat().st_mode)


def write_config(
    folder: Path, config: Mapping[str, Any], provenance: Mapping[str, Any] | None
) -> None:
    """Write config.json: timm's entries, and how the model was converted, if that is known."""
    config = {**config, METADATA_KEY: {PROVENANCE: provenance}}
    _write_text(folder / CONFIG, write_json(config))


def write_texts(
    folder: Path,
    name: str,
    model: nn.Module,
    report: ConversionReport,
    *,
    picture: bytes | None = None,
) -> None:
    """Write config.json, report.json, the model card, and the picture.

    Args:
        folder: The folder.
        name: The folder's final name.
        model: The converted model, with its provenance attached.
        report: The report of the plan by which the folder is loaded.
        picture: A PNG to add; the model card shows it.
    """
    provenance = provenance_of(model)
    plan = report.plan
    write_config(folder, timm_config(model, plan), provenance)
    report = replace(report, output=".")  # the folder can be moved
    card = model_card(
        report,
        loading_code(plan.model),
        f"`{CONFIG}` holds the plan and the rules; `{REPORT}` says what each layer costs.",
        folder=name,
        with_picture=picture is not None,
        provenance=provenance,
    )
    _write_text(folder / REPORT, report.to_json())
    _write_text(folder / CARD, card)
    if picture is not None:
        (folder / PICTURE).write_bytes(picture)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="")


def timm_config(model: nn.Module, plan: ConversionPlan) -> dict[str, Any]:
    """Return the contents of a config.json that timm can read.

    `model_args` are for this package's entry in timm's registry; `pretrained_cfg` has the
    preprocessing.
    """
    cfg = {}
    for key, value in (config_of(model) or {}).items():
        if key not in SOURCE_KEYS and value is not None:
            cfg[key] = value
    classes = plan.model_args.get("num_classes", getattr(model, "num_classes", None))
    if isinstance(classes, int):
        cfg["num_classes"] = classes
    if plan.input_size is not None:  # the plan's channels, the model's stated sides
        cfg["input_size"] = [plan.input_size[0], *cfg.get("input_size", plan.input_size)[1:]]
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
