"""A converted model into a folder, which appears whole or not at all."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import nn

from .. import __version__
from ..errors import CheckpointError
from ..layers.dcls_conv import DclsConvNd
from ..networks.sites import find_convs
from ..networks.source import REGISTRIES, TIMM_ARCHITECTURE, ModelSource, build_model
from ..networks.weights import check_weights, misfits
from ..output import check_output, new_folder
from ..pipeline.in_memory import convert_
from ..planning.plan import ConversionPlan
from ..reports.report import ConversionReport, measure_report
from ..surgery.place import timm_model_args
from .folder import (
    CARD,
    CONFIG,
    FORMAT_METADATA,
    PAGE,
    PICTURE,
    REPORT,
    WEIGHTS,
    not_of_a_checkpoint,
    read_plan,
    write_files,
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


def model_card(
    report: ConversionReport, loading: str, files: str, *, pictures: Container[str] = ()
) -> str:
    """README.md of a folder: what the model is, its numbers, the lines that load it, what else lies there."""
    from ..views.report import report_markdown

    name = report.model or "a model"
    title = (
        "folded from learnable element positions"
        if report.folded
        else "with learnable element positions"
    )
    folding = (
        "The model is folded: the kernels are constructed once and for all, and stand in plain convolutions of the "
        "windows' sizes; no positions are left to be learnt. "
    )
    shown = f"![Where the elements are in their windows]({PICTURE})\n\n" * (PICTURE in pictures)
    shown += f"`{PAGE}` shows positions and kernels.\n\n" * (PAGE in pictures)
    return (
        f"---\nlibrary_name: timm\ntags:\n- image-classification\n- timm\n- dcls\n---\n"
        f"# {name} {title} (DCLS)\n\n"
        f"Convolutions of {name} are replaced by dilated convolutions with learnable spacings "
        f"([arXiv:2112.03740](https://arxiv.org/abs/2112.03740)): each has a few weights, at learned positions in a "
        f"larger window. {folding * report.folded}"
        f"Made by dcls-convert {__version__}.\n\n"
        f"{shown}{report_markdown(report)}\n## Loading\n\n"
        f"Where this folder is `dcls-model` below:\n\n```python\n{loading.format(folder='dcls-model')}```\n\n"
        f"{files}\n"
    )


def loading_code(model: str | None) -> str:
    """The lines that load a folder, to be formatted with `folder`, for the plan's `model`."""
    kind = (model or "").partition(":")[0]
    if kind == "timm":
        return (
            "import timm\nimport dcls_convert  # registers the architecture with timm\n\n"
            'model = timm.create_model("local-dir:{folder}", pretrained=True, num_classes=10)\n'
        )
    how = "" if kind in REGISTRIES else ", trust_code=True" if model else ", model=unconverted"
    built = "" if kind in REGISTRIES or model else "  # which is built as before"
    return f'import dcls_convert\n\nmodel = dcls_convert.load_converted("{{folder}}"{how}){built}\n'


def training_code(model: str | None, *, trained: bool) -> str:
    """As `loading_code`, with an optimizer, at a rate for trained weights or others, and lines that save the result."""
    lr = "1e-4" if trained else "1e-3"
    imports, _, loading = loading_code(model).partition("\n\n")
    return (
        f"import torch\n{imports}\n\n{loading}"
        f"parameters = dcls_convert.tuning.param_groups(model, lr={lr})  # keeps weight decay off the positions\n"
        "optimizer = torch.optim.AdamW(parameters)\n"
        "...  # train\n"
        'dcls_convert.save_converted(model, "{folder}", "{folder}-tuned")\n'
    )


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
