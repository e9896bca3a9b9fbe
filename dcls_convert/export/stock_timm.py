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

from ..checkpoints.card import loading_code, model_card
from ..checkpoints.folder import CARD, WEIGHTS, not_of_a_checkpoint
from ..checkpoints.save import save_converted, timm_config, write_files
from ..errors import DclsConvertError, ModelError
from ..networks.outputs import ComparisonError, check_equal
from ..networks.sites import find_convs
from ..networks.source import ModelSource, build_model, shapes_of
from ..networks.weights import alias_names, load_file
from ..output import new_folder
from ..planning.plan import ConversionPlan
from ..reports.report import ConversionReport, measure_report
from .folded_model import FOLDING_BOUND, ExportFormat, Folded, Folding, run_model

# Parts of the names of timm's arguments for kernel sizes: kernel_size, kernel_sizes, kernels,
# local_conv_size.
KERNEL_WORDS = ("kernel", "conv_size")
LOAD_BY_TIMM = 'import timm\n\nmodel = timm.create_model("local-dir:{folder}", pretrained=True)\n'


def write(folding: Folding) -> Folded:
    """Write a folder that timm loads alone; if timm cannot, a folded checkpoint of this package."""
    folding.notify("looking for timm's own arguments")
    model = folding.model
    plan = replace(folding.plan, folded=True)
    report = measure_report(model, plan)
    try:
        kernel_args = find_kernel_args(model, plan)
        error = _write_for_timm(folding, plan, report, kernel_args)
        return folding.record("stock timm", error, LOAD_BY_TIMM, kernel_args=kernel_args)
    except (ModelError, ComparisonError) as reason:
        if folding.plan.folded:
            raise DclsConvertError(
                f"{folding.folded.checkpoint} is folded already, and {reason}"
            ) from reason
        folding.notify(f"writing {folding.output}, a checkpoint of this program")
        save_converted(model, plan, folding.output, report=report, force=folding.force)
        return folding.record("dcls", 0.0, loading_code(plan.model), note=str(reason))


def _write_for_timm(
    folding: Folding, plan: ConversionPlan, report: ConversionReport, kernel_args: dict[str, Any]
) -> float:
    """Write the folder, and run what timm loads from it; the relative error of its outputs."""
    model = folding.model
    architecture = (plan.model or "").partition(":")[2].partition(".")[0]  # without timm's tag
    config = {
        **timm_config(model, plan),
        "architecture": architecture,
        "model_args": {**plan.model_args, **kernel_args},
    }
    stock = architecture
    if kernel_args:
        stock += f" with {', '.join(f'{name}={value}' for name, value in kernel_args.items())}"
    folding.notify(f"writing {folding.output}")
    card = model_card(
        report, LOAD_BY_TIMM, f"timm builds its own {stock}; no other package is needed."
    )
    with new_folder(folding.output, force=folding.force, foreign=not_of_a_checkpoint) as partial:
        write_files(model, plan, partial, config, {CARD: card})
        with weights_in_file_alone(model, partial / WEIGHTS):
            # Equal shapes do not mean equal outputs, so the loaded model is run.
            source = ModelSource(name=f"local-dir:{partial}")
            # No code of others is run: the folder names one of timm's own architectures.
            loaded = build_model(source, pretrained=True, trust_code=True).eval()
            images = [batch.float() for batch in folding.images]
            what = f"timm's {stock}"
            outputs = run_model(loaded, images, what)
            return check_equal(folding.outputs, outputs, bound=FOLDING_BOUND, what=what)


@contextlib.contextmanager
def weights_in_file_alone(model: nn.Module, path: Path) -> Iterator[None]:
    """A context in which the model's weights are on meta, to make room for another model.

    They are read from the file again only after an error; without one, nobody needs them.
    """
    if alias_names(model):
        yield
        return
    meta_state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    model.load_state_dict(meta_state, assign=True)
    try:
        yield
    except (ModelError, ComparisonError):
        model.load_state_dict(load_file(path), assign=True)
        raise


def find_kernel_args(model: nn.Module, plan: ConversionPlan) -> dict[str, Any]:
    """timm's arguments that give the base model the folded model's tensor names and shapes.

    They are found by trying. ModelError if the model is not timm's, or nothing gives the shapes.
    """
    kind, _, name = (plan.model or "").partition(":")
    if kind != "timm":
        raise ModelError(f"{plan.model or 'the model'} is not of timm's registry")
    base = build_model(ModelSource(name=f"timm:{name}", args=plan.model_args), device="meta")
    known = inspect.signature(type(base).__init__).parameters
    arguments = [argument for argument in known if any(word in argument for word in KERNEL_WORDS)]
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


def _candidates(
    base: nn.Module, plan: ConversionPlan, arguments: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Arguments to try: first none, for windows of the old kernels' size."""
    yield {}
    for value in _values(base, plan):
        for argument in arguments:
            yield {argument: value}


def _values(base: nn.Module, plan: ConversionPlan) -> Iterator[int | list[int]]:
    """Kernel sizes to try: one for all layers, then a list with one for each stage.

    A stage without converted layers keeps the size of its depthwise kernels.
    """
    windows = {layer.name: set(layer.dilated_size) for layer in plan.layers}
    yield from sorted(set().union(*windows.values()))
    converted: dict[str, set[int]] = {}
    kept: dict[str, set[int]] = {}
    for site in find_convs(base, plan.input_size).sites:
        if site.stage is None:
            continue
        converted.setdefault(site.stage, set()).update(windows.get(site.name, ()))
        of_stage = kept.setdefault(site.stage, set())
        if site.kind == "depthwise":
            of_stage.update(site.kernel_size)
    sizes = [converted[stage] or kept[stage] for stage in converted]
    if all(len(of_stage) == 1 for of_stage in sizes):
        yield [min(of_stage) for of_stage in sizes]


FORMAT = ExportFormat(suffix="-folded", noun="folder for timm", write=write)
