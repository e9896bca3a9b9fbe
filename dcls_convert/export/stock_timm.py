"""Write a folded model as a folder that timm loads without this package.

This is possible if the architecture has arguments that set its kernel sizes.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints.card import loading_code, model_card
from ..checkpoints.fingerprint import take_fingerprint
from ..checkpoints.folder import CARD, WEIGHTS
from ..checkpoints.save import save_just_converted
from ..checkpoints.stored_weights import why_not_our_folder
from ..checkpoints.write import clamped_state_, timm_config, write_config, write_weights
from ..conversion.provenance import provenance_of
from ..errors import DclsConvertError, ModelError
from ..networks.building import build_model, shapes_of
from ..networks.find_convs import find_convs_for
from ..networks.source import ModelSource
from ..output import new_output
from ..planning.plan import ConversionPlan
from ..reports.report import ConversionReport, predict_report
from ..running.compare_outputs import ComparisonError, check_close
from ..weights.files import load_safetensors
from ..weights.loading import alias_names
from .folded_model import FOLDING_BOUND, ExportReport, FoldedModel, arguments_for, run_model

# Names of timm's arguments for kernel sizes contain one of these words: kernel_size, kernel_sizes,
# kernels, local_conv_size.
KERNEL_WORDS = ("kernel", "conv_size")
LOAD_BY_TIMM = 'import timm\n\nmodel = timm.create_model("local-dir:{folder}", pretrained=True)\n'


def write_timm_folder(folded: FoldedModel) -> ExportReport:
    """Write a folder that timm loads by itself or, if that is impossible, our own folder."""
    folded.notify("looking for timm's own arguments")
    model = folded.model
    plan = replace(folded.opened.plan, folded=True)
    report = predict_report(plan)
    try:
        kernel_args = find_kernel_args(model, plan)
        error = _write_for_timm(folded, plan, report, kernel_args)
        return folded.report("stock timm", error, LOAD_BY_TIMM, kernel_args=kernel_args)
    except (ModelError, ComparisonError) as reason:
        if folded.opened.plan.folded:
            raise DclsConvertError(
                f"{folded.opened.folder} is folded already, and {reason}"
            ) from reason
        folded.notify(f"writing {folded.output}, a folder of dcls-convert")
        save_just_converted(model, folded.output, report=report, force=folded.force)
        return folded.report("dcls", 0.0, loading_code(plan.model), note=str(reason))


def _write_for_timm(
    folded: FoldedModel, plan: ConversionPlan, report: ConversionReport, kernel_args: dict[str, Any]
) -> float:
    """Write the folder, load it with timm, and return the relative error of the outputs."""
    config = timm_config(folded.model, plan)
    _, _, name = str(plan.model).partition(":")
    architecture, _, _ = name.partition(".")  # without timm's tag
    config["architecture"] = architecture
    config["model_args"] = {**plan.model_args, **kernel_args}
    timm_model = architecture
    if kernel_args:
        arguments = ", ".join(f"{key}={value}" for key, value in kernel_args.items())
        timm_model += f" with {arguments}"
    files = f"timm builds its own {timm_model}; no other package is needed."
    provenance = provenance_of(folded.model)
    card = model_card(
        report,
        LOAD_BY_TIMM,
        files,
        folder=folded.output.resolve().name,
        provenance=provenance,
    )
    folded.notify(f"writing {folded.output}")
    with new_output(folded.output, force=folded.force, why_keep=why_not_our_folder) as partial:
        partial.mkdir()
        write_config(partial, config, provenance)
        (partial / CARD).write_text(card, encoding="utf-8", newline="")
        fingerprint = take_fingerprint(folded.model, plan.inputs)
        write_weights(partial, clamped_state_(folded.model), fingerprint)
        with weights_on_meta_(folded.model, partial / WEIGHTS):
            source = ModelSource(name=f"local-dir:{partial}")
            # Safe: the folder names one of timm's own architectures, so no other code is run.
            loaded = build_model(source, pretrained=True, trust_code=True).eval()
            # Run the loaded model: equal shapes do not mean equal outputs.
            subject = f"timm's {timm_model}"
            outputs = run_model(loaded, arguments_for(loaded, folded.inputs), subject)
            return check_close(folded.outputs, outputs, bound=FOLDING_BOUND, what=subject)


@contextlib.contextmanager
def weights_on_meta_(model: nn.Module, path: Path) -> Iterator[None]:
    """Move the model's weights to the meta device, which frees memory for another model.

    After a ModelError or a ComparisonError, the weights are read back from the file; otherwise the
    model stays without values. A model with aliases keeps its values throughout.
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
    """Find timm arguments with which the base model has the folded model's tensor names and shapes.

    Candidates are tried one after another.

    Raises:
        ModelError: The model is not timm's, or no candidate gives these shapes.
    """
    source = plan.source
    if source is None or source.prefix != "timm":
        raise ModelError(f"{plan.model or 'the model'} is not in timm's registry")
    base = build_model(source, device="meta")
    parameters = inspect.signature(type(base).__init__).parameters
    arguments = [name for name in parameters if any(word in name for word in KERNEL_WORDS)]
    folded_shapes = shapes_of(model)
    candidates: list[dict[str, Any]] = [{}]  # enough if windows have the kernels' size
    for value in _candidate_sizes(base, plan):
        for argument in arguments:
            candidates.append({argument: value})
    for kernel_args in candidates:
        changed = replace(source, args={**source.args, **kernel_args})
        # An architecture may refuse this argument or value and accept the next one.
        with contextlib.suppress(DclsConvertError):
            if shapes_of(build_model(changed, device="meta")) == folded_shapes:
                return kernel_args
    if not arguments:
        raise ModelError(f"{source.name} has no argument for the size of its kernels")
    tried = ", ".join(arguments)
    raise ModelError(
        f"{source.name} cannot be built with these kernel sizes: no value of {tried} gives them"
    )


def _candidate_sizes(base: nn.Module, plan: ConversionPlan) -> Iterator[int | list[int]]:
    """Yield kernel sizes to try: first one integer for all layers, then a list with one per stage.

    A stage without converted layers keeps the size of its depthwise kernels.
    """
    windows = {layer.name: set(layer.dilated_size) for layer in plan.layers}
    yield from sorted(set().union(*windows.values()))
    sites = [site for site in find_convs_for(base, plan.inputs).sites if site.stage is not None]
    sizes: list[int] = []
    for stage in dict.fromkeys(site.stage for site in sites):
        members = [site for site in sites if site.stage == stage]
        sides = set[int]().union(*(windows.get(site.name, ()) for site in members))
        if not sides:  # nothing converted: keep the depthwise size
            depthwise = [site for site in members if site.kind == "depthwise"]
            sides = set().union(*(site.kernel_size for site in depthwise))
        if len(sides) != 1:  # this stage needs several sizes
            return
        sizes += sides
    yield sizes
