"""Compare a saved model with the model that its folder loads."""

import math
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..errors import DclsConvertError
from ..text import one_line
from .fingerprint import Fingerprint, fingerprint_deviation, set_precision_, take_fingerprint
from .folder import open_folder
from .load import load_state
from .stored_weights import read_state

# Outputs of a model and its copy on the same device count as equal up to this difference, as a
# fraction of their norm. Sums in another order differ by less, an edited model by more.
SAME_OUTPUTS = {"float64": 2e-5, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
# Do not compare outputs if two images give outputs that differ by less than this: a different
# network might give the same. Examples: a detector finds no boxes, or the signal vanishes in an
# untrained network.
LEAST_VARIATION = 1e-4
SAME_FOR_EVERY_IMAGE = "they are nearly the same for every image, as of some untrained networks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The result of loading a folder back; both fields are None if it gives the saved model."""

    difference: str | None = None  # how the loaded model differs from the saved one
    not_compared: str | None = None  # why outputs were not compared; names and shapes agree


def compare_with_folder(model: nn.Module, folder: Path, stored: Fingerprint) -> Comparison:
    """Load a folder, and compare the loaded model with the model that was saved.

    Args:
        model: The model that was saved. Its parameters change for a while, and are restored.
        folder: The folder.
        stored: The summary of the model's outputs.

    Raises:
        CheckpointError: The file's tensors differ from the tensors that were written.
    """
    opened = open_folder(folder)
    state = read_state(opened)
    try:
        loaded = load_state(opened, state, model=None, trust_code=False)
        set_precision_(loaded, stored, state)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1:
            loaded.to(devices.pop())
    except DclsConvertError as error:
        message = one_line(error).removeprefix(f"{opened.weights_path}: ")
        return Comparison(difference=message.removeprefix("does not fit the model; "))
    except Exception as error:  # no memory for a copy, for example
        return Comparison(not_compared=f"{type(error).__name__}: {one_line(error)[:120]}")
    if stored.outputs is None:
        return Comparison(not_compared=stored.reason)
    inputs = opened.inputs
    comparison = _compare_outputs(take_fingerprint(loaded, inputs), stored)
    if comparison is not None:
        return comparison
    if fingerprint_deviation(take_fingerprint(model, inputs, seed=1), stored) < LEAST_VARIATION:
        return Comparison(not_compared=SAME_FOR_EVERY_IMAGE)
    return Comparison()


def _compare_outputs(loaded: Fingerprint, expected: Fingerprint) -> Comparison | None:
    """Compare a loaded model's outputs with the expected outputs; None if they are the same."""
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
