"""Compare a model with what its folder loads."""

import math
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from ..errors import CheckpointError, DclsConvertError
from ..layers.dcls_conv import DclsConvNd
from ..layers.state_dicts import settings_text
from ..networks.measure import without_small_parameters
from ..networks.wrappers import plain_name
from ..planning.plan import ConversionPlan
from ..text import one_line
from .fingerprint import Fingerprint, fingerprint_deviation, set_precision_, take_fingerprint
from .folder import open_checkpoint
from .load import load_checkpoint

# Largest difference of outputs, as a fraction of their norm, between a model and its copy: above
# rounding, even if the model is on a GPU and the copy on the CPU, and below what an edit changes.
SAME_OUTPUTS = {"float64": 2e-5, "float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}


def check_layers(model: nn.Module, plan: ConversionPlan) -> None:
    """Refuse a model whose layers are not the plan's.

    Raises:
        CheckpointError: A layer is missing, or has another class, shape or tie.
    """
    if plan.folded:
        return
    modules = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[plain_name(name)] = module
    for layer in plan.layers:
        module = modules.get(layer.name)
        shape = layer.position_shape[1:]
        settings = settings_text(layer.dilated_size, layer.interpolation, layer.dense_axes)
        problem = None
        if module is None:
            problem = f"it has no {layer.name}"
        elif not isinstance(module, DclsConvNd):
            problem = f"{layer.name} is a {type(module).__name__}"
        elif tuple(module.weight.shape) != shape:
            problem = f"{layer.name}.weight has shape {tuple(module.weight.shape)}, not {shape}"
        elif module.settings != settings:
            problem = f"{layer.name} has window {module.settings}, not {settings}"
        if problem is not None:
            raise CheckpointError(
                f"the model does not fit its plan: {problem}. Give the network itself, as the plan "
                "converted it; plan.without(...) leaves layers out, and "
                "dataclasses.replace(plan, folded=True) is the plan of a folded network"
            )
    for layer in plan.layers:
        _check_tie(modules, layer.name, plan.owner_of(layer).name)


def _check_tie(modules: Mapping[str, nn.Module], name: str, owner_name: str) -> None:
    """Refuse (CheckpointError) a layer that does not read its positions from their owner."""
    owner = modules[owner_name]
    if owner.is_tied:
        raise CheckpointError(
            f"the model does not fit its plan: {owner_name} reads positions of a layer that is no "
            "longer in the model; copy.deepcopy(model) has them"
        )
    if modules[name].positions is not owner.positions:
        raise CheckpointError(
            f"the model does not fit its plan: {name} does not read its positions from "
            f"{owner_name}. To tie it again: model.get_submodule({name!r}).tie_("
            f"model.get_submodule({owner_name!r}))"
        )


def describe_difference(model: nn.Module, folder: Path, stored: Fingerprint) -> str | None:
    """Load a folder, and say how the loaded model differs from the one that was saved.

    Args:
        model: The model that was saved. Small parameters, such as a new layer scale, hide what is
            behind them; outputs are compared with other values in their places, too.
        folder: The folder.
        stored: The summary of the model's outputs. Without outputs, names and shapes are compared.

    Returns:
        The first difference; None if there is none.
    """
    checkpoint = open_checkpoint(folder)
    try:
        loaded = load_checkpoint(checkpoint)
    except DclsConvertError as error:
        message = one_line(error).removeprefix(f"{checkpoint.weights_path}: ")
        return message.removeprefix("does not fit the model; ")
    if stored.outputs is None:
        return None
    set_precision_(loaded, stored, dict(model.state_dict()))
    difference = _difference_of_outputs(take_fingerprint(loaded, checkpoint.inputs), stored)
    if difference is not None:
        return difference
    with without_small_parameters(model):
        expected = take_fingerprint(model, checkpoint.inputs)
    with without_small_parameters(loaded):
        return _difference_of_outputs(take_fingerprint(loaded, checkpoint.inputs), expected)


def _difference_of_outputs(loaded: Fingerprint, expected: Fingerprint) -> str | None:
    """Say how outputs differ; None if they do not, or if there are none to compare with."""
    if expected.outputs is None:
        return None
    if loaded.outputs is None:
        return f"rebuilt from its plan, it does not run ({loaded.reason})"
    deviation = fingerprint_deviation(loaded, expected)
    if deviation <= SAME_OUTPUTS[expected.dtype]:
        return None
    if math.isinf(deviation):
        return "for one random image, its outputs differ"
    percent = 100 * deviation
    digits = 0 if percent >= 10 else 2
    return f"for one random image, its outputs differ by {percent:,.{digits}f} %"
