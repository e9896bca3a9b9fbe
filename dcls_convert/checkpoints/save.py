"""A converted model into a folder, which appears whole or not at all."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from .. import __version__
from ..atomic_output import check_output, new_folder
from ..errors import CheckpointError
from ..layers.dcls_conv import DclsConvNd
from ..networks.building import build_model
from ..networks.find_convs import find_convs
from ..networks.registries import REGISTRIES, TIMM_ARCHITECTURE
from ..networks.source import ModelSource
from ..networks.tensors_hash import tensors_hash
from ..networks.weights import alias_names, check_weights, misfits
from ..pipeline.in_memory import convert_
from ..pipeline.provenance import Provenance, provenance_of
from ..planning.plan import ConversionPlan
from ..records import write_json
from ..reports.measure import measure_report
from ..reports.report import ConversionReport
from ..surgery.place import timm_model_args
from .card import model_card
from .fingerprint import take_fingerprint
from .folder import (
    CARD,
    CONFIG,
    FORMAT_METADATA,
    REPORT,
    WEIGHTS,
    open_checkpoint,
    why_not_a_checkpoint,
)
from .load import place_stored_plan_
from .loading_code import loading_code
from .stamp import METADATA_KEY, PROVENANCE, Stamp, config_hash

# Entries of timm's config that say where weights come from. They are left out: the weights are in
# the same folder.
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
        model: Converted by `apply_plan_(model, plan)`.
        plan: The plan that was carried out, or the checkpoint folder from which the model came. A
            model of timm may have another number of classes than the folder's.
        folder: Must not exist, unless `force` is set: then a checkpoint folder there is replaced.
        report: Measured on the model if it is not given.
        force: Replace an existing checkpoint folder. Anything else that is in the way is never
            touched.
        fingerprint: Run the model once, on a random image of the plan's input size, and note its
            output in the weights file, for `dcls-convert verify`. Without it, nothing of the
            model's code runs.
        pictures: Files to add, from `views.plot.picture_files`; the model card shows them.
        meta: An unconverted meta model of the plan's source, if there is one already; converted in
            place.

    Returns:
        The folder's path.

    Raises:
        CheckpointError: The model no longer fits its plan, a value is not finite, or the folder
            cannot be written; an old folder is then as it was.
    """
    folder = Path(folder)
    provenance = provenance_of(model)
    if not isinstance(plan, ConversionPlan):
        checkpoint = open_checkpoint(plan)
        if provenance is None:  # the model was loaded by timm
            provenance = checkpoint.provenance
        plan = _with_current_head(checkpoint.plan, model)
    check_fits_plan(model, plan, meta)
    if report is None:
        report = measure_report(model, plan)
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
    with new_folder(folder, force=force, why_keep=why_not_a_checkpoint) as partial:
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
    """`convert_`, then `save_converted`.

    A folder that could not be written is refused before any kernel is fitted.

    Args:
        model: Converted in place.
        folder: To write.
        force: Replace a checkpoint folder that is there.
        options: Those of `convert_`.

    Raises:
        DclsConvertError: As for `convert_` and `save_converted`.
    """
    folder = Path(folder)
    check_output(folder, force=force, why_keep=why_not_a_checkpoint)
    report = convert_(model, **options)
    save_converted(model, report.plan, folder, report=report, force=force)
    return report


def check_fits_plan(model: nn.Module, plan: ConversionPlan, meta: nn.Module | None = None) -> None:
    """Refuse a model whose folder could not be loaded.

    Args:
        model: Converted or folded.
        plan: What was done to it.
        meta: An unconverted meta model of the plan's source, if there is one; converted in place.

    Raises:
        CheckpointError: Layers, ties, names or shapes are not the plan's, or a value is missing or
            not finite.
    """
    state = model.state_dict()
    for name, tensor in state.items():
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
    """What differs between a model and its plan, in words."""
    if not plan.folded:
        modules = dict(model.named_modules(remove_duplicate=False))
        yield from _layer_problems(modules, plan)
        yield from _tie_problems(modules, plan)
    source = ModelSource(name=plan.model or "", args=plan.model_args)
    if source.kind in REGISTRIES:
        if meta is None:
            meta = build_model(source, device="meta")
        place_stored_plan_(meta, plan)
        yield from misfits(meta, state)


def _layer_problems(modules: Mapping[str, nn.Module], plan: ConversionPlan) -> Iterator[str]:
    """Layers of the plan that are missing, are not DCLS layers, or have another shape."""
    for layer in plan.layers:
        module = modules.get(layer.name)
        shape = layer.position_shape[1:]
        if module is None:
            yield f"{layer.name} is missing"
        elif not isinstance(module, DclsConvNd):
            kind = type(module).__name__
            yield f"{layer.name} is a {kind}, not a layer with learnable positions"
        elif tuple(module.weight.shape) != shape:
            yield f"{layer.name}.weight has shape {tuple(module.weight.shape)}, the plan {shape}"


def _tie_problems(modules: Mapping[str, nn.Module], plan: ConversionPlan) -> Iterator[str]:
    """Layers that should share a parameter, and have one of their own."""
    for group in plan.tie_groups:
        for key, name in group.parameters.items():
            shared = getattr(modules[group.owner], name, None)
            for layer_name in group.layers:
                if getattr(modules[layer_name], key) is not shared:
                    yield f"{layer_name} has its own {key}; the plan shares them in {group.name}"


def _with_current_head(plan: ConversionPlan, model: nn.Module) -> ConversionPlan:
    """The plan for the classes and input channels that a model of timm has now.

    `timm.create_model("local-dir:FOLDER", num_classes=10, in_chans=1)` changes them.
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
    """Channels that the first convolution of a model of timm takes, if timm names one."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    name = cfg.get("first_conv")
    if not isinstance(name, str):
        return default
    channels: int = getattr(model.get_submodule(name), "in_channels", default)
    return channels


def timm_config(model: nn.Module, plan: ConversionPlan) -> dict[str, Any]:
    """timm's config.json.

    It holds `model_args` for this package's entry in timm's registry, and the preprocessing in
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


def save_trained(model: nn.Module, plan: ConversionPlan | str | Path | None, folder: Path) -> None:
    """Write a trained model as a folder.

    A converted model is saved with its plan, and replaces a checkpoint folder only. Without a plan,
    the new folder replaces whatever is there, once it is complete: a model of timm is saved in
    timm's format, and any other as weights alone.
    """
    from timm.models import save_for_hf

    if plan is not None:
        save_converted(model, plan, folder, force=True)
        return
    # Whatever is in the folder is replaced.
    with new_folder(folder, force=True, why_keep=lambda _: None) as partial:
        if getattr(model, "pretrained_cfg", None):
            save_for_hf(model, str(partial), safe_serialization=True)
        else:
            save_model(model, str(partial / WEIGHTS), metadata=dict(FORMAT_METADATA))


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
    """Fill an empty folder with config, other texts, and weights.

    Args:
        model: Its tensors are written.
        plan: States the size of the images for the fingerprint.
        folder: Empty.
        config: Contents of config.json, without this package's own entries.
        texts: Other files, name to content.
        fingerprint: Whether to run the model and note its outputs with the weights.
        provenance: How the model was converted, if that is known.
    """
    taken = None
    if fingerprint:
        taken = take_fingerprint(model, plan.input_size)
    tensors = _tensors_to_save(model)
    own_entries: dict[str, Any] = {"tensors": tensors_hash(tensors.items())}
    if provenance is not None:
        own_entries[PROVENANCE] = provenance.to_dict()
    config = {**config, METADATA_KEY: own_entries}
    config_text = write_json(config)
    for name, text in {CONFIG: config_text, **texts}.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    # The hash is of the config as it is read again: JSON makes texts of all keys.
    stamp = Stamp(
        version=__version__, config=config_hash(json.loads(config_text)), fingerprint=taken
    )
    weights = folder / WEIGHTS
    save_file(tensors, weights, metadata={METADATA_KEY: stamp.to_json(), **FORMAT_METADATA})
    _sort_metadata_(weights)
    # The usual permissions, which safetensors does not give.
    weights.chmod((folder / CONFIG).stat().st_mode)


def _tensors_to_save(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor once, on the CPU, in memory of its own, as safetensors wants them."""
    aliases = alias_names(model)
    storages = set[int]()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in aliases:
            continue
        ready = tensor.detach().cpu().contiguous()
        storage = ready.untyped_storage().data_ptr()
        if storage in storages and ready.numel():
            ready = ready.clone()
        tensors[name] = ready
        storages.add(storage)
    return tensors


def _sort_metadata_(path: Path) -> None:
    """Sort the metadata of a safetensors file: the library's order changes from run to run.

    The header is JSON behind its length, a little-endian integer of eight bytes.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length  # the same entries, without padding
        file.seek(8)
        file.write(text.ljust(length))
