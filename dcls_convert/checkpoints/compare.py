"""Compare a model with what its folder loads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..errors import CheckpointError, DclsConvertError
from ..layers.dcls_conv import DclsConvNd
from ..layers.state_dicts import settings_text
from ..networks.wrappers import by_plain_name
from ..planning.plan import ConversionPlan
from ..text import one_line
from .fingerprint import Fingerprint, fingerprint_deviation, set_precision_, take_fingerprint
from .folder import open_checkpoint
from .load import load_state

# Largest difference of outputs, as a fraction of their norm, between a model and its copy on the
# same device: above rounding in another order of sums, and below what an edit changes.
SAME_OUTPUTS = {"float64": 2e-5, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
# If the outputs for two images differ by less than this, outputs cannot tell one network from
# another: a detector finds no boxes, or the signal vanishes in a network without training.
LEAST_VARIATION = 1e-4
SAME_FOR_EVERY_IMAGE = "they are nearly the same for every image, as of some untrained networks"


def check_layers(model: nn.Module, plan: ConversionPlan) -> None:
    """Refuse a model whose layers are not the plan's.

    Raises:
        CheckpointError: A layer is missing, or has another class, shape or tie.
    """
    modules = by_plain_name(model.named_modules(remove_duplicate=False))
    for layer in plan.layers:
        module = modules.get(layer.name)
        shape = layer.position_shape[1:]
        if plan.folded:
            shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.dilated_size)
        settings = settings_text(
            layer.dilated_size, layer.interpolation, layer.dense_axes, layer.grow
        )
        is_dcls = isinstance(module, DclsConvNd)
        problem = None
        if module is None:
            problem = f"it has no {layer.name}"
        elif is_dcls == plan.folded:
            problem = f"{layer.name} is a {type(module).__name__}"
        elif tuple(module.weight.shape) != shape:
            problem = f"{layer.name}.weight has shape {tuple(module.weight.shape)}, not {shape}"
        elif is_dcls and module.settings != settings:
            problem = f"{layer.name} has window {module.settings}, not {settings}"
        if problem is not None:
            raise CheckpointError(
                f"the model does not fit its plan: {problem}. Give the network itself, as the plan "
                "converted it; plan.without(...) leaves layers out, and "
                "dataclasses.replace(plan, folded=True) is the plan of a folded network"
            )
    if plan.folded:
        return
    for layer in plan.layers:
        _check_tie(modules, layer.name, layer.owner or layer.name)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What loading a folder has shown."""

    difference: str | None = None  # from the model that was saved
    # Why outputs were not compared, although names and shapes agree.
    not_compared: str | None = None


def compare_with_folder(model: nn.Module, folder: Path, stored: Fingerprint) -> Comparison:
    """Load a folder, and compare what it loads with the model that was saved.

    Args:
        model: The model that was saved. Its parameters have their values again at the end.
        folder: The folder.
        stored: The summary of the model's outputs.

    Raises:
        CheckpointError: The file's tensors are not those that were written.
    """
    checkpoint = open_checkpoint(folder)
    state = checkpoint.read_state()
    try:
        loaded = load_state(checkpoint, state, model=None, trust_code=False)
        set_precision_(loaded, stored, state)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1:
            loaded.to(devices.pop())
    except DclsConvertError as error:
        message = one_line(error).removeprefix(f"{checkpoint.weights_path}: ")
        return Comparison(difference=message.removeprefix("does not fit the model; "))
    except Exception as error:  # no memory for a copy, for example
        return Comparison(not_compared=f"{type(error).__name__}: {one_line(error)[:120]}")
    if stored.outputs is None:
        return Comparison(not_compared=stored.reason)
    inputs = checkpoint.inputs
    comparison = _compare_outputs(take_fingerprint(loaded, inputs), stored)
    if comparison is not None:
        return comparison
    if fingerprint_deviation(take_fingerprint(model, inputs, seed=1), stored) < LEAST_VARIATION:
        return Comparison(not_compared=SAME_FOR_EVERY_IMAGE)
    return Comparison()


def _compare_outputs(loaded: Fingerprint, expected: Fingerprint) -> Comparison | None:
    """Compare the outputs of a loaded model with the expected ones; None if they are the same."""
    if loaded.outputs is None:
        return Comparison(not_compared=f"rebuilt, it does not run ({loaded.reason})")
    deviation = fingerprint_deviation(loaded, expected)
    if deviation <= SAME_OUTPUTS[expected.dtype]:
        return None
    if math.isinf(deviation):
        return Comparison(difference="for one random image, its outputs differ")
    percent = 100 * deviation
    digits = 0 if percent >= 10 else 2
    difference = f"for one random image, its outputs differ by {percent:,.{digits}f} %"
    return Comparison(difference=difference)
