"""Save a converted model as a folder that can be loaded again."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..conversion.in_memory import convert_
from ..conversion.provenance import provenance_of
from ..errors import CheckpointError, check_argument
from ..layers.dcls_conv import DclsConvNd
from ..networks.building import build_model
from ..networks.find_convs import find_convs
from ..networks.registries import REGISTRIES
from ..networks.source import ModelSource
from ..networks.weights import describe_misfits
from ..output import check_output
from ..planning.plan import ConversionPlan
from ..reports.predict import predict_report
from ..reports.report import ConversionReport
from .fingerprint import take_fingerprint
from .folder import open_checkpoint, reason_not_a_checkpoint
from .load import place_stored_plan_
from .write import state_to_save, write_checkpoint


def save_converted(
    model: nn.Module,
    plan: ConversionPlan | str | Path,
    folder: str | Path,
    *,
    report: ConversionReport | None = None,
    force: bool = False,
    fingerprint: bool = True,
    pictures: Mapping[str, bytes] | None = None,
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
    state = state_to_save(model)
    check_fits_plan(model, state, plan)
    write_checkpoint(
        model,
        plan,
        folder,
        state,
        report=report or predict_report(plan),
        fingerprint=take_fingerprint(model, plan.input_size) if fingerprint else None,
        provenance=provenance,
        force=force,
        pictures=pictures or {},
    )
    return folder


def save_just_converted(
    model: nn.Module,
    plan: ConversionPlan,
    folder: Path,
    *,
    report: ConversionReport,
    force: bool,
    pictures: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model right after its conversion, when it cannot have been edited.

    The arguments are those of `save_converted`. Values are checked; that the model is its plan's
    is not.

    Raises:
        CheckpointError: A value is not finite, or the folder cannot be written.
    """
    write_checkpoint(
        model,
        plan,
        folder,
        state_to_save(model),
        report=report,
        fingerprint=take_fingerprint(model, plan.input_size),
        provenance=provenance_of(model),
        force=force,
        pictures=pictures or {},
    )


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
    save_just_converted(model, report.plan, folder, report=report, force=force)
    return report


def check_fits_plan(model: nn.Module, state: Mapping[str, Tensor], plan: ConversionPlan) -> None:
    """Refuse a model that could not be loaded again from its folder.

    Args:
        model: The converted or folded model.
        state: Its state dict.
        plan: The plan that was carried out on it.

    Raises:
        CheckpointError: Layers, ties, names or shapes are not the plan's.
    """
    problem = next(_problems(model, state, plan), None)
    if problem is not None:
        raise CheckpointError(
            f"the model no longer fits its plan, so its folder could not be loaded: {problem}"
        )


def _problems(model: nn.Module, state: Mapping[str, Tensor], plan: ConversionPlan) -> Iterator[str]:
    """Yield a message for each difference between a model and its plan."""
    if not plan.folded:
        modules = dict(model.named_modules(remove_duplicate=False))
        yield from _layer_problems(modules, plan)
        yield from _tie_problems(modules, plan)
    source = ModelSource(name=plan.model or "", args=plan.model_args)
    if source.kind in REGISTRIES:
        rebuilt = build_model(source, device="meta")
        place_stored_plan_(rebuilt, plan)
        yield from describe_misfits(rebuilt, state)


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
