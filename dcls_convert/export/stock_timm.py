"""A folded model as a folder that timm loads without this package.

That is possible if the architecture has arguments that set its kernel sizes.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..atomic_output import new_folder
from ..checkpoints.card import model_card
from ..checkpoints.folder import CARD, WEIGHTS, why_not_a_checkpoint
from ..checkpoints.loading_code import loading_code
from ..checkpoints.save import save_converted, timm_config, write_checkpoint_files
from ..errors import DclsConvertError, ModelError
from ..networks.building import build_model, shapes_of
from ..networks.find_convs import find_convs
from ..networks.model_outputs import ComparisonError, check_close
from ..networks.source import ModelSource
from ..networks.weights import alias_names
from ..networks.weights_files import load_safetensors
from ..pipeline.provenance import provenance_of
from ..planning.plan import ConversionPlan
from ..reports.measure import measure_report
from ..reports.report import ConversionReport
from .folded_model import FOLDING_BOUND, ExportReport, FoldedModel, run_model

# Parts of the names of timm's arguments for kernel sizes: kernel_size, kernel_sizes, kernels,
# local_conv_size.
KERNEL_WORDS = ("kernel", "conv_size")
LOAD_BY_TIMM = 'import timm\n\nmodel = timm.create_model("local-dir:{folder}", pretrained=True)\n'


def write_timm_folder(folded: FoldedModel) -> ExportReport:
    """Write a folder that timm loads alone; if timm cannot, a folded checkpoint of this package."""
    folded.notify("looking for timm's own arguments")
    model = folded.model
    plan = replace(folded.checkpoint.plan, folded=True)
    report = measure_report(model, plan)
    try:
        kernel_args = find_kernel_args(model, plan)
        error = _write_for_timm(folded, plan, report, kernel_args)
        return folded.report("stock timm", error, LOAD_BY_TIMM, kernel_args=kernel_args)
    except (ModelError, ComparisonError) as reason:
        if folded.checkpoint.plan.folded:
            raise DclsConvertError(
                f"{folded.checkpoint.folder} is folded already, and {reason}"
            ) from reason
        folded.notify(f"writing {folded.output}, a checkpoint of this program")
        save_converted(model, plan, folded.output, report=report, force=folded.force)
        return folded.report("dcls", 0.0, loading_code(plan.model), note=str(reason))


def _write_for_timm(
    folded: FoldedModel, plan: ConversionPlan, report: ConversionReport, kernel_args: dict[str, Any]
) -> float:
    """Write the folder, and run what timm loads from it; the relative error of its outputs."""
    architecture = (plan.model or "").partition(":")[2].partition(".")[0]  # without timm's tag
    config = timm_config(folded.model, plan)
    config["architecture"] = architecture
    config["model_args"] = {**plan.model_args, **kernel_args}
    stock = architecture
    if kernel_args:
        arguments = ", ".join(f"{name}={value}" for name, value in kernel_args.items())
        stock += f" with {arguments}"
    files = f"timm builds its own {stock}; no other package is needed."
    provenance = provenance_of(folded.model)
    card = model_card(report, LOAD_BY_TIMM, files, provenance=provenance)
    folded.notify(f"writing {folded.output}")
    with new_folder(folded.output, force=folded.force, why_keep=why_not_a_checkpoint) as partial:
        write_checkpoint_files(
            folded.model, plan, partial, config, {CARD: card}, provenance=provenance
        )
        with weights_on_meta_(folded.model, partial / WEIGHTS):
            # Equal shapes do not mean equal outputs, so the loaded model is run.
            return _error_of_folder(folded, partial, f"timm's {stock}")


def _error_of_folder(folded: FoldedModel, folder: Path, what: str) -> float:
    """The relative error of the outputs of what timm loads from a folder."""
    source = ModelSource(name=f"local-dir:{folder}")
    # No code of others is run: the folder names one of timm's own architectures.
    loaded = build_model(source, pretrained=True, trust_code=True).eval()
    images = [batch.float() for batch in folded.images]
    outputs = run_model(loaded, images, what)
    return check_close(folded.outputs, outputs, bound=FOLDING_BOUND, what=what)


@contextlib.contextmanager
def weights_on_meta_(model: nn.Module, path: Path) -> Iterator[None]:
    """Inside, the model has no values: its weights are on meta, to make room for another model.

    They are read from the file again only after a ModelError or a ComparisonError; otherwise the
    model stays empty. A model with aliases keeps its values.
    """
    if alias_names(model):
        yield
        return
    meta_state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    model.load_state_dict(meta_state, assign=True)
    try:
        yield
    except (ModelError, ComparisonError):
        model.load_state_dict(load_safetensors(path), assign=True)
        raise


def find_kernel_args(model: nn.Module, plan: ConversionPlan) -> dict[str, Any]:
    """timm's arguments that give the base model the folded model's tensor names and shapes.

    They are found by trying.

    Raises:
        ModelError: The model is not timm's, or nothing gives the shapes.
    """
    kind, _, name = (plan.model or "").partition(":")
    if kind != "timm":
        raise ModelError(f"{plan.model or 'the model'} is not of timm's registry")
    base = build_model(ModelSource(name=f"timm:{name}", args=plan.model_args), device="meta")
    known = inspect.signature(type(base).__init__).parameters
    arguments = list(filter(_is_kernel_argument, known))
    folded_shapes = shapes_of(model)
    for kernel_args in _candidates(base, plan, arguments):
        source = ModelSource(name=f"timm:{name}", args={**plan.model_args, **kernel_args})
        # An architecture may refuse this argument or value and accept the next one.
        with contextlib.suppress(DclsConvertError):
            if shapes_of(build_model(source, device="meta")) == folded_shapes:
                return kernel_args
    if not arguments:
        raise ModelError(f"timm's {name} has no argument for the size of its kernels")
    tried = ", ".join(arguments)
    raise ModelError(
        f"timm's {name} cannot be built with these kernels: no value of {tried} gives them"
    )


def _is_kernel_argument(name: str) -> bool:
    return any(word in name for word in KERNEL_WORDS)


def _candidates(
    base: nn.Module, plan: ConversionPlan, arguments: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Arguments to try: first none, for windows of the old kernels' size."""
    yield {}
    for value in _values(base, plan):
        for argument in arguments:
            yield {argument: value}


def _values(base: nn.Module, plan: ConversionPlan) -> Iterator[int | list[int]]:
    """Kernel sizes to try: integers for all layers, then a list with one for each stage.

    A stage without converted layers keeps the size of its depthwise kernels.
    """
    windows = {layer.name: set(layer.dilated_size) for layer in plan.layers}
    yield from sorted(set().union(*windows.values()))
    window_sides: dict[str, set[int]] = {}  # by stage, of its converted layers
    old_sides: dict[str, set[int]] = {}  # by stage, of its depthwise kernels before conversion
    for site in find_convs(base, plan.input_size).sites:
        if site.stage is None:
            continue
        window_sides.setdefault(site.stage, set()).update(windows.get(site.name, ()))
        old_sides.setdefault(site.stage, set())
        if site.kind == "depthwise":
            old_sides[site.stage].update(site.kernel_size)
    sizes: list[int] = []
    for stage, sides in window_sides.items():
        stage_sides = sides or old_sides[stage]
        if len(stage_sides) != 1:  # no single size builds this stage
            return
        sizes += stage_sides
    yield sizes
