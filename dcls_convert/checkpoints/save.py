"""Save a converted model as a folder, which appears complete or not at all."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from .. import __version__
from ..conversion.in_memory import convert_
from ..conversion.place import timm_model_args
from ..conversion.provenance import Provenance, provenance_of
from ..errors import CheckpointError, check_argument
from ..layers.dcls_conv import DclsConvNd
from ..networks.building import build_model
from ..networks.find_convs import find_convs
from ..networks.registries import REGISTRIES, TIMM_ARCHITECTURE
from ..networks.source import ModelSource
from ..networks.tensors_hash import tensors_hash
from ..networks.weights import alias_names, check_weights, describe_misfits
from ..output import check_output, new_folder
from ..planning.plan import ConversionPlan
from ..records import write_json
from ..reports.predict import predict_report
from ..reports.report import ConversionReport
from .card import model_card
from .fingerprint import take_fingerprint
from .folder import (
    CARD,
    CONFIG,
    FORMAT_METADATA,
    REPORT,
    WEIGHTS,
    open_checkpoint,
    reason_not_a_checkpoint,
)
from .load import place_stored_plan_
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


def save_converted(
    model: nn.Module,
    plan: ConversionPlan | str | Path,
    folder: str | Path,
    *,
    report: ConversionReport | None = None,
    force: bool = False,
    fingerprint: bool = True,
    pictures: Mapping[str, bytes] | None = None,
    meta: nn.Module | None = None,
) -> Path:
    """Write a converted model as a checkpoint folder.

    timm loads it once `dcls_convert` is imported.

    Args:
        model: The model, converted by `apply_plan_(model, plan)`.
        plan: The plan that was carried out, or the checkpoint folder from which the model was
            loaded. A timm model may then have another number of classes than the folder's.
        folder: Folder to write. It must not exist, unless `force` is set.
        report: The model's report, with its errors; by default, the plan's report.
        force: Replace an existing checkpoint folder. Anything else in the way is never touched.
        fingerprint: Run the model once on a random image of the plan's input size, and store a
            summary of its output in the weights file for `dcls-convert verify`. If False, none of
            the model's code runs.
        pictures: Files to add, from `views.plot.picture_files`; the model card shows them.
        meta: An unconverted meta model of the plan's source, if the caller has one; converted in
            place.

    Returns:
        The folder's path.

    Raises:
        CheckpointError: The model no longer fits its plan, a value is not finite, or the folder
            cannot be written. An existing folder is then unchanged.
    """
    check_argument("model", model, nn.Module)
    if not isinstance(plan, str | Path):
        check_argument("plan", plan, ConversionPlan)
    folder = Path(folder)
    provenance = provenance_of(model)
    if not isinstance(plan, ConversionPlan):
        checkpoint = open_checkpoint(plan)
        if provenance is None:  # the model was loaded by timm
            provenance = checkpoint.provenance
        plan = _with_current_head(checkpoint.plan, model)
    check_fits_plan(model, plan, meta)
    if report is None:
        report = predict_report(plan)
    if pictures is None:
        pictures = {}
    files = f"`{CONFIG}` holds the plan and the rules; `{REPORT}` says what each layer costs."
    texts = {
        REPORT: replace(report, output=".").to_json(),  # the folder can be moved
        CARD: model_card(
            report,
            loading_code(plan.model),
            files,
            pictures=pictures.keys(),
            provenance=provenance,
        ),
    }
    with new_folder(folder, force=force, reason_to_keep=reason_not_a_checkpoint) as partial:
        write_checkpoint_files(
            model,
            plan,
            partial,
            timm_config(model, plan),
            texts,
            fingerprint=fingerprint,
            provenance=provenance,
        )
        for name, content in pictures.items():
            (partial / name).write_bytes(content)
    return folder


def convert_and_save_(
    model: nn.Module, folder: str | Path, *, force: bool = False, **options: Any
) -> ConversionReport:
    """Convert a model in place with `convert_`, then write it with `save_converted`.

    A folder that cannot be written is refused before any kernel is fitted.

    Args:
        model: The model, converted in place.
        folder: Folder to write.
        force: Replace an existing checkpoint folder.
        options: Keyword arguments of `convert_`.

    Raises:
        DclsConvertError: As for `convert_` and `save_converted`.
    """
    check_argument("model", model, nn.Module)
    folder = Path(folder)
    check_output(folder, force=force, reason_to_keep=reason_not_a_checkpoint)
    report = convert_(model, **options)
    save_converted(model, report.plan, folder, report=report, force=force)
    return report


def check_fits_plan(model: nn.Module, plan: ConversionPlan, meta: nn.Module | None = None) -> None:
    """Refuse a model that could not be loaded again from its folder.

    Args:
        model: The converted or folded model.
        plan: The plan that was carried out on it.
        meta: An unconverted meta model of the plan's source, if there is one; converted in place.

    Raises:
        CheckpointError: Layers, ties, names or shapes are not the plan's, or a value is missing or
            not finite.
    """
    state = model.state_dict()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"the model cannot be saved: its state dict has {name}, which is not a tensor"
            )
        if tensor.is_meta:
            raise CheckpointError(
                f"the model cannot be saved: {name} is on the meta device, without values"
            )
    problem = next(_problems(model, state, plan, meta), None)
    if problem is not None:
        raise CheckpointError(
            f"the model no longer fits its plan, so its folder could not be loaded: {problem}"
        )
    check_weights(model, state, "the model")


def _problems(
    model: nn.Module,
    state: Mapping[str, Tensor],
    plan: ConversionPlan,
    meta: nn.Module | None,
) -> Iterator[str]:
    """Yield a message for each difference between a model and its plan."""
    if not plan.folded:
        modules = dict(model.named_modules(remove_duplicate=False))
        yield from _layer_problems(modules, plan)
        yield from _tie_problems(modules, plan)
    source = ModelSource(name=plan.model or "", args=plan.model_args)
    if source.kind in REGISTRIES:
        if meta is None:
            meta = build_model(source, device="meta")
        place_stored_plan_(meta, plan)
        yield from describe_misfits(meta, state)


def _layer_problems(modules: Mapping[str, nn.Module], plan: ConversionPlan) -> Iterator[str]:
    """Yield a message for each planned layer that is missing or has another class or shape."""
    for layer in plan.layers:
        module = modules.get(layer.name)
        shape = layer.position_shape[1:]
        if module is None:
            yield f"{layer.name} is missing"
        elif not isinstance(module, DclsConvNd):
            kind = type(module).__name__
            yield f"{layer.name} is a {kind}, not a layer with learnable positions"
        elif tuple(module.weight.shape) != shape:
            weight_shape = tuple(module.weight.shape)
            yield f"{layer.name}.weight has shape {weight_shape}, the plan has {shape}"


def _tie_problems(modules: Mapping[str, nn.Module], plan: ConversionPlan) -> Iterator[str]:
    """Yield a message for each layer with a parameter of its own that it should share."""
    for group in plan.tie_groups:
        for key, name in group.parameters.items():
            shared = getattr(modules[group.owner], name, None)
            for layer_name in group.layers:
                if getattr(modules[layer_name], key) is not shared:
                    yield f"{layer_name} has its own {key}; the plan shares them in {group.name}"


def _with_current_head(plan: ConversionPlan, model: nn.Module) -> ConversionPlan:
    """Adapt the plan to the classes and input channels that a timm model has now.

    They change with `timm.create_model("local-dir:FOLDER", num_classes=10, in_chans=1)`.
    """
    classes = getattr(model, "num_classes", None)
    if ModelSource(name=plan.model or "").kind != "timm" or classes is None:
        return plan
    args = {**plan.model_args, "num_classes": classes}
    input_size = plan.input_size
    if input_size is not None:
        channels = _input_channels(model, default=input_size[0])
        if channels != input_size[0]:
            args["in_chans"] = channels
            input_size = (channels, *input_size[1:])
    meta = build_model(ModelSource(name=plan.model or "", args=args), device="meta")
    convs = find_convs(meta, input_size)
    return replace(
        plan, model_args=args, input_size=input_size, params=convs.params, macs=convs.macs
    )


def _input_channels(model: nn.Module, default: int) -> int:
    """Return the input channels of a timm model's first convolution, if timm names one."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    name = cfg.get("first_conv")
    if not isinstance(name, str):
        return default
    channels: int = getattr(model.get_submodule(name), "in_channels", default)
    return channels


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
        count = getattr(model, name, None)
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
    model: nn.Module,
    plan: ConversionPlan,
    folder: Path,
    config: Mapping[str, Any],
    texts: Mapping[str, str],
    *,
    fingerprint: bool = True,
    provenance: Provenance | None = None,
) -> None:
    """Write config, other texts and weights into an empty folder.

    Args:
        model: The model whose tensors are written.
        plan: The model's plan, which states the size of the image for the fingerprint.
        folder: An empty folder.
        config: Contents of config.json, without this package's own entries.
        texts: Other text files: name to content.
        fingerprint: Whether to run the model and store a summary of its outputs with the weights.
        provenance: How the model was converted, if that is known.
    """
    output_fingerprint = None
    if fingerprint:
        output_fingerprint = take_fingerprint(model, plan.input_size)
    tensors = _tensors_to_save(model)
    own_entries: dict[str, Any] = {"tensors": tensors_hash(tensors.items())}
    if provenance is not None:
        own_entries[PROVENANCE] = provenance.to_dict()
    config = {**config, METADATA_KEY: own_entries}
    config_text = write_json(config)
    for name, text in {CONFIG: config_text, **texts}.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    # Hash the config as it will be read back: JSON turns all keys into strings.
    stamp = Stamp(
        version=__version__,
        config=config_hash(json.loads(config_text)),
        fingerprint=output_fingerprint,
    )
    weights = folder / WEIGHTS
    save_file(tensors, weights, metadata={METADATA_KEY: stamp.to_json(), **FORMAT_METADATA})
    # safetensors does not use the default permissions, so copy them from the config.
    weights.chmod((folder / CONFIG).stat().st_mode)


def _tensors_to_save(model: nn.Module) -> dict[str, Tensor]:
    """Return each tensor once, on the CPU and in storage of its own, as safetensors requires."""
    aliases = alias_names(model)
    seen_storages = set[int]()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in aliases:
            continue
        cpu_tensor = tensor.detach().cpu().contiguous()
        storage = cpu_tensor.untyped_storage().data_ptr()
        if storage in seen_storages and cpu_tensor.numel():
            cpu_tensor = cpu_tensor.clone()
        tensors[name] = cpu_tensor
        seen_storages.add(storage)
    return tensors
