"""A converted model into a folder, which appears whole or not at all."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from .. import __version__
from ..errors import CheckpointError
from ..layers.dcls_conv import DclsConvNd
from ..networks.sites import find_convs
from ..networks.source import REGISTRIES, TIMM_ARCHITECTURE, ModelSource, build_model
from ..networks.weights import alias_names, check_weights, misfits
from ..output import check_output, new_folder
from ..pipeline.conversion import convert_
from ..planning.plan import ConversionPlan
from ..records import write_json
from ..reports.report import ConversionReport, measure_report
from ..surgery.place import timm_model_args
from .card import loading_code, model_card
from .fingerprint import take_fingerprint
from .folder import (
    CARD,
    CONFIG,
    FORMAT_METADATA,
    METADATA_KEY,
    REPORT,
    WEIGHTS,
    Stamp,
    config_hash,
    not_of_a_checkpoint,
    read_plan,
    tensors_hash,
)
from .load import place_

# Where timm's own config says that weights come from; ours stand beside it.
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
    """Write a converted model as a checkpoint folder that timm loads once `dcls_convert` is imported.

    Args:
        model: Converted by `apply_plan_(model, plan)`.
        plan: The plan that was carried out, or the checkpoint folder from which the model came. A model of timm may
            have another number of classes than the folder's.
        folder: Must not exist, unless `force` is set: then a checkpoint folder there is replaced.
        report: Measured on the model where it is not given.
        force: Replace an existing checkpoint folder. Anything else that is in the way is never touched.
        fingerprint: Run the model once, on a random image of the plan's input size, and note its output in the weights
            file, for `dcls-convert verify`. Without it, nothing of the model's code runs.
        pictures: Files to add, from `views.plot.picture_files`; the model card shows them.
        meta: An unconverted meta model of the plan's source, if there is one already; converted in place.

    Returns:
        The folder's path.

    Raises:
        CheckpointError: The model no longer fits its plan, a value is not finite, or the folder cannot be written;
            an old folder is then as it was.
    """
    folder = Path(folder)
    if not isinstance(plan, ConversionPlan):
        plan = _tuned(read_plan(plan), model)
    check_fits_plan(model, plan, meta)
    report = report or measure_report(model, plan)
    files = f"The plan and its rules stand in `{CONFIG}`; `{REPORT}` says what each layer costs."
    texts = {
        REPORT: replace(report, output=".").to_json(),  # the folder can be moved
        CARD: model_card(report, loading_code(plan.model), files, pictures=(pictures or {}).keys()),
    }
    with new_folder(folder, force=force, foreign=not_of_a_checkpoint) as partial:
        write_files(model, plan, partial, timm_config(model, plan), texts, fingerprint=fingerprint)
        for name, content in (pictures or {}).items():
            (partial / name).write_bytes(content)
    return folder


def convert_and_save_(
    model: nn.Module, folder: str | Path, *, force: bool = False, **options: Any
) -> ConversionReport:
    """`convert_`, then `save_converted`: a folder that could not be written is refused before any kernel is fitted.

    Args:
        model: Converted in place.
        folder: To write.
        force: Replace a checkpoint folder that is there.
        options: Those of `convert_`.

    Raises:
        DclsConvertError: As both.
    """
    folder = Path(folder)
    check_output(folder, force=force, foreign=not_of_a_checkpoint)
    report = convert_(model, **options)
    save_converted(model, report.plan, folder, report=report, force=force)
    return report


def check_fits_plan(model: nn.Module, plan: ConversionPlan, meta: nn.Module | None = None) -> None:
    """Refuse a model that could not be loaded again: layers, ties, names, shapes not the plan's, or no values."""
    state = model.state_dict()
    if empty := next((name for name, tensor in state.items() if tensor.is_meta), None):
        raise CheckpointError(
            f"the model cannot be saved: {empty} is on the meta device, without values"
        )
    problem = None if plan.folded else next(_layer_problems(model, plan), None)
    source = ModelSource(name=plan.model or "", args=plan.model_args)
    if problem is None and source.kind in REGISTRIES:
        meta = build_model(source, device="meta") if meta is None else meta
        place_(meta, plan)
        problem = next(misfits(meta, state), None)
    if problem is not None:
        raise CheckpointError(
            f"the model no longer fits its plan, so its folder could not be loaded: {problem}"
        )
    check_weights(model, state, "the model")


def _layer_problems(model: nn.Module, plan: ConversionPlan) -> Iterator[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for layer in plan.layers:
        module = modules.get(layer.name)
        shape = layer.position_shape[1:]
        if not isinstance(module, DclsConvNd):
            kind = "missing" if module is None else f"a {type(module).__name__}"
            yield f"{layer.name} is {kind}, not a layer with learnable positions"
        elif tuple(module.weight.shape) != shape:
            yield f"{layer.name}.weight has shape {tuple(module.weight.shape)}, the plan {shape}"
    for group in plan.tie_groups:
        for key, name in group.parameters.items():
            shared = getattr(modules[group.owner], name, None)
            for layer_name in group.layers:
                if getattr(modules[layer_name], key) is not shared:
                    yield f"{layer_name} has {key} of its own; the plan shares them in {group.name}"


def _tuned(plan: ConversionPlan, model: nn.Module) -> ConversionPlan:
    """The plan of a model that may have another head by now, of `timm.create_model(..., num_classes=10)`."""
    classes = getattr(model, "num_classes", None)
    if ModelSource(name=plan.model or "").kind != "timm" or classes is None:
        return plan
    args = {**plan.model_args, "num_classes": classes}
    size = plan.input_size
    first = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv")
    if isinstance(first, str) and size is not None:
        chans = getattr(model.get_submodule(first), "in_channels", size[0])
        if chans != size[0]:  # of `timm.create_model(..., in_chans=1)`
            args = args | {"in_chans": chans}
            size = (chans, *size[1:])
    convs = find_convs(
        build_model(ModelSource(name=plan.model or "", args=args), device="meta"), size
    )
    return replace(plan, model_args=args, input_size=size, params=convs.params, macs=convs.macs)


def timm_config(model: nn.Module, plan: ConversionPlan) -> dict[str, Any]:
    """timm's config.json: `model_args` for our entry in its registry, and the preprocessing in `pretrained_cfg`."""
    stated = getattr(model, "pretrained_cfg", None) or {}
    config = {
        key: value for key, value in stated.items() if key not in SOURCE_KEYS and value is not None
    }
    counts = {name: getattr(model, name, None) for name in ("num_classes", "num_features")}
    counts = {name: count for name, count in counts.items() if isinstance(count, int)}
    if "num_classes" in counts:
        config["num_classes"] = counts["num_classes"]
    if plan.input_size is not None:
        config["input_size"] = list(plan.input_size)
    return {
        "architecture": TIMM_ARCHITECTURE,
        **counts,
        "model_args": timm_model_args(plan),
        "pretrained_cfg": config,
    }


def save_trained(model: nn.Module, plan: ConversionPlan | str | Path | None, folder: Path) -> None:
    """A model as a folder, in place of an older one: converted, or without a plan in timm's format if it is timm's.

    Of other models, the weights alone.
    """
    from timm.models import save_for_hf

    if plan is not None:
        save_converted(model, plan, folder, force=True)
        return
    with new_folder(folder, force=True, foreign=lambda _: None) as partial:
        if getattr(model, "pretrained_cfg", None):
            save_for_hf(model, str(partial), safe_serialization=True)
        else:
            save_model(model, str(partial / WEIGHTS), metadata=dict(FORMAT_METADATA))


def write_files(
    model: nn.Module,
    plan: ConversionPlan,
    folder: Path,
    config: Mapping[str, Any],
    texts: Mapping[str, str],
    *,
    fingerprint: bool = True,
) -> None:
    """Fill an empty folder: the config, the other texts by name, and the weights, which hold the config's hash."""
    outputs = take_fingerprint(model, plan.input_size) if fingerprint else None
    aliases = alias_names(model)
    storages = set[int]()
    tensors: dict[str, Tensor] = {}  # every one once, on the CPU, each in memory of its own
    for name, tensor in model.state_dict().items():
        if name not in aliases:
            ready = tensor.detach().cpu().contiguous()
            storage = ready.untyped_storage().data_ptr()
            # A copy where another tensor has the same memory.
            tensors[name] = ready.clone() if storage in storages and ready.numel() else ready
            storages.add(storage)
    config_text = write_json({**config, METADATA_KEY: {"tensors": tensors_hash(tensors.items())}})
    for name, text in {CONFIG: config_text, **texts}.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    stamp = Stamp(
        version=__version__, config=config_hash(json.loads(config_text)), fingerprint=outputs
    )
    metadata = {METADATA_KEY: stamp.to_json(), **FORMAT_METADATA}
    save_file(tensors, folder / WEIGHTS, metadata=metadata)
    _sort_metadata_(folder / WEIGHTS)
    # The usual permissions, which safetensors does not give.
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)


def _sort_metadata_(path: Path) -> None:
    """Sort the metadata of a safetensors file: the library's order changes from run to run.

    The header is JSON behind its length, a little-endian integer of eight bytes.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length  # the same entries, without what fills the header up
        file.seek(8)
        file.write(text.ljust(length))
