"""Fold a folder's model into plain convolutions, and write it in one of the FORMATS."""

import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints.folder import OpenedFolder, open_folder
from ..checkpoints.load import load_state
from ..checkpoints.stored_weights import read_state, why_not_our_folder
from ..errors import CheckpointError, DclsConvertError, ModelError
from ..networks.building import build_model
from ..networks.find_convs import parameter_count
from ..networks.source import resolve_model
from ..options import MAX_PIXELS
from ..output import check_output_path, why_not_a_file
from ..placing.fold import fold_to_dense_
from ..progress import Notify, ignore_messages
from ..running.compare_outputs import check_close
from ..running.input_spec import InputSpec, image_inputs, inputs_text, pixel_count
from ..text import join_with_and, shortened
from .folded_model import (
    FOLDING_BOUND,
    ExportReport,
    FoldedModel,
    arguments_for,
    run_model,
)
from .formats import FORMATS, FormatName

FOLD_IN_PYTHON = "in Python, fold_to_dense_(model) folds it without comparing them"


def fold_folder(
    folder: Path,
    format: FormatName = "timm",
    output: Path | None = None,
    *,
    input_size: Sequence[int] | None = None,
    model: str | None = None,
    force: bool = False,
    trust_code: bool = False,
    notify: Notify = ignore_messages,
) -> ExportReport:
    """Fold a folder's model, check that its outputs stay the same, and write it.

    Args:
        folder: The folder.
        format: A name in FORMATS.
        output: Folder or file to write; without it, the folder's name with the format's suffix, in
            the current directory.
        input_size: Size of the image on which outputs are compared and for which the network is
            exported; None for the size that the folder states, or the inputs of the plan.
        model: The unconverted network, such as "package.module:factory", if the folder does not
            name it. Its code is imported and run.
        force: Replace an earlier output.
        trust_code: Import and run the code that the folder names as its model.
        notify: Called with the name of each step.

    Raises:
        DclsConvertError: The model cannot be folded or written, or its outputs would change.
    """
    opened = open_folder(folder)
    if output is None:
        output = Path(folder.resolve().name + FORMATS[format].suffix)
    _check_output(format, opened.folder, output, force=force)
    _check_packages(format)
    if input_size is None:
        input_size = opened.stated_size
    inputs = _check_inputs(opened, input_size)

    notify("loading")
    network = _load(opened, model, trust_code=trust_code)
    notify("folding")
    params_before = parameter_count(network)
    outputs, error = _fold_(network, inputs, folder)
    folded = FoldedModel(
        model=network,
        opened=opened,
        input_size=None if input_size is None else tuple(input_size),
        inputs=inputs,
        outputs=outputs,
        relative_error=error,
        params_before=params_before,
        output=output,
        force=force,
        notify=notify,
    )
    writer: Callable[[FoldedModel], ExportReport] = pkgutil.resolve_name(FORMATS[format].writer)
    return writer(folded)


def _load(opened: OpenedFolder, model: str | None, *, trust_code: bool) -> nn.Module:
    """Load the folder; `model` names the unconverted network, or is None."""
    unconverted = None
    if model is not None:
        unconverted = build_model(resolve_model(model), trust_code=True)
    state = read_state(opened)
    return load_state(opened, state, model=unconverted, trust_code=trust_code).eval()


def _fold_(network: nn.Module, inputs: InputSpec, folder: Path) -> tuple[Any, float]:
    """Fold a network; return its outputs before folding, and their relative error after it."""
    arguments = arguments_for(network, inputs)
    try:
        outputs = run_model(network, arguments, f"{folder}: its model")
    except ModelError as problem:
        raise ModelError(f"{problem}; {FOLD_IN_PYTHON}") from problem
    fold_to_dense_(network)
    folded_outputs = run_model(network, arguments, "the folded model")
    what = f"{folder}: folding"
    return outputs, check_close(outputs, folded_outputs, bound=FOLDING_BOUND, what=what)


def _check_packages(format: FormatName) -> None:
    """Refuse (DclsConvertError) a format if a package for it is not installed."""
    packages = FORMATS[format].packages
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise DclsConvertError(
            f"format {format} needs {join_with_and(missing)}: pip install {' '.join(missing)}"
        )


def _check_inputs(opened: OpenedFolder, input_size: Sequence[int] | None) -> InputSpec:
    """Return the inputs on which to compare outputs; refuse unknown or too large inputs."""
    inputs = opened.plan.inputs
    if input_size is not None:
        if opened.plan.input_size is None or inputs is None:
            inputs = image_inputs(input_size)
        inputs = (replace(inputs[0], shape=(1, *input_size)),)  # keeps the plan's range of values
    if inputs is None:
        raise CheckpointError(
            f"{opened.folder}: its plan states no inputs, so its outputs cannot be compared; "
            f"give an input size, or convert it with example_inputs in Python; {FOLD_IN_PYTHON}"
        )
    if pixel_count(inputs) > MAX_PIXELS:
        raise CheckpointError(
            f"{opened.folder}: outputs are compared on {MAX_PIXELS:,} pixels at most, not on "
            f"{inputs_text(inputs)}"
        )
    return inputs


def _check_output(format: FormatName, folder: Path, output: Path, *, force: bool) -> None:
    """Refuse an output that is the folder itself, has another suffix, or must not be replaced."""
    if FORMATS[format].file:
        suffix = FORMATS[format].suffix
        if not output.name.endswith(suffix):
            raise CheckpointError(f"output {shortened(output)} must end in {suffix}")
        check_output_path(output, force=force, why_keep=why_not_a_file)
        return
    for name, other in FORMATS.items():
        if other.file and output.name.endswith(other.suffix):
            raise CheckpointError(
                f"output {shortened(output)}: add --format {name}, or write a folder"
            )
    if output.resolve() == folder.resolve():
        raise CheckpointError(
            f"output {output} is the folder itself, whose positions would be lost"
        )
    check_output_path(output, force=force, why_keep=why_not_our_folder)
