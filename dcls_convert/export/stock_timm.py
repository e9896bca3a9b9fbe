"""Write a folded model as a folder for timm, which loads it alone if the architecture's arguments set kernel sizes."""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints.folder import CARD, WEIGHTS, not_of_a_checkpoint, write_files
from ..checkpoints.save import loading_code, model_card, save_converted, timm_config
from ..errors import DclsConvertError, ModelError
from ..networks.outputs import ComparisonError, check_equal
from ..networks.sites import find_convs
from ..networks.source import ModelSource, build_model, shapes_of
from ..networks.weights import alias_names, load_file
from ..output import new_folder
from ..planning.plan import ConversionPlan
from ..reports.report import measure_report
from .folding import FOLDING_BOUND, ExportFormat, Folded, Folding, run_model

# timm's arguments for kernel sizes hold one of these words: kernel_size, kernel_sizes, kernels, local_conv_size.
KERNEL_WORDS = ("kernel", "conv_size")
LOAD_BY_TIMM = 'import timm\n\nmodel = timm.create_model("local-dir:{folder}", pretrained=True)\n'


def write(folding: Folding) -> Folded:
    """Write a folder that timm loads without this package; if timm cannot, a folded checkpoint of this package."""
    folding.notify("looking for timm's own arguments")
    model, plan, output = folding.model, replace(folding.plan, folded=True), folding.output
    report = measure_report(model, plan)
    try:
        kernel_args = find_kernel_args(model, plan)
        stock = (plan.model or "").partition(":")[2].partition(".")[0]  # in timm's registry
        config = {
            **timm_config(model, plan),
            "architecture": stock,
            "model_args": {**plan.model_args, **kernel_args},
        }
        if kernel_args:
            stock += f" with {', '.join(f'{name}={value}' for name, value in kernel_args.items())}"
        folding.notify(f"writing {output}")
        card = model_card(
            report, LOAD_BY_TIMM, f"timm builds its own {stock}; no other package is needed."
        )
        with new_folder(output, force=folding.force, foreign=not_of_a_checkpoint) as partial:
            write_files(model, plan, partial, config, {CARD: card})
            with weights_in_file_alone(model, partial / WEIGHTS):
                # What timm loads is run, since equal shapes do not mean equal outputs.
                what, source = f"timm's {stock}", ModelSource(name=f"local-dir:{partial}")
                loaded = build_model(
                    source, pretrained=True, trust_code=True
                ).eval()  # one of timm's own architectures
                outputs = run_model(loaded, [images.float() for images in folding.images], what)
                error = check_equal(folding.outputs, outputs, bound=FOLDING_BOUND, what=what)
        return folding.record("stock timm", error, LOAD_BY_TIMM, kernel_args=kernel_args)
    except (ModelError, ComparisonError) as reason:
        if folding.plan.folded:
            raise DclsConvertError(
                f"{folding.folded.checkpoint} is folded already, and {reason}"
            ) from reason
        folding.notify(f"writing {output}, a checkpoint of this program")
        save_converted(model, plan, output, report=report, force=folding.force)
        return folding.record("dcls", 0.0, loading_code(plan.model), note=str(reason))


@contextlib.contextmanager
def weights_in_file_alone(model: nn.Module, path: Path) -> Iterator[None]:
    """Inside, the model's weights are on meta, to make room for another; they are read again after an error alone."""
    if alias_names(model):
        yield
        return
    model.load_state_dict(
        {name: tensor.to("meta") for name, tensor in model.state_dict().items()}, assign=True
    )
    try:
        yield
    except (ModelError, ComparisonError):
        model.load_state_dict(load_file(path), assign=True)
        raise


def find_kernel_args(model: nn.Module, plan: ConversionPlan) -> dict[str, Any]:
    """Find, by trying, kernel sizes with which timm builds a network that has the folded one's names and shapes."""
    kind, _, name = (plan.model or "").partition(":")
    if kind != "timm":
        raise ModelError(f"{plan.model or 'the model'} is not of timm's registry")
    base = build_model(ModelSource(name=f"timm:{name}", args=plan.model_args), device="meta")
    known = inspect.signature(type(base).__init__).parameters
    arguments = [argument for argument in known if any(word in argument for word in KERNEL_WORDS)]
    choices = ({argument: value} for value in _values(base, plan) for argument in arguments)
    for kernel_args in itertools.chain([{}], choices):  # {}: for windows of the old kernels' size
        args = {**plan.model_args, **kernel_args}
        # Where the architecture does not take this argument, or not this value, the next one may do.
        with contextlib.suppress(DclsConvertError):
            if shapes_of(
                build_model(ModelSource(name=f"timm:{name}", args=args), device="meta")
            ) == shapes_of(model):
                return kernel_args
    if not arguments:
        raise ModelError(f"timm's {name} has no argument for the size of its kernels")
    tried = ", ".join(arguments)
    raise ModelError(
        f"timm's {name} cannot be built with these kernels: no value of {tried} gives them"
    )


def _values(base: nn.Module, plan: ConversionPlan) -> Iterator[int | list[int]]:
    """Sizes to try: for all layers, then per stage; a stage without converted layers keeps its depthwise size."""
    windows = {layer.name: set(layer.dilated_size) for layer in plan.layers}
    yield from sorted(set().union(*windows.values()))
    converted: dict[str, set[int]] = {}
    kept: dict[str, set[int]] = {}
    for site in find_convs(base, plan.input_size).sites:
        if site.stage is not None:
            converted.setdefault(site.stage, set()).update(windows.get(site.name, ()))
            kept.setdefault(site.stage, set()).update(
                site.kernel_size if site.kind == "depthwise" else ()
            )
    sizes = [converted[stage] or kept[stage] for stage in converted]
    if all(len(of_stage) == 1 for of_stage in sizes):
        yield [min(of_stage) for of_stage in sizes]


FORMAT = ExportFormat(suffix="-folded", noun="folder for timm", write=write)
