"""The files of a training run on disk, and how a killed run resumes from them."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from ..atomic_output import new_file
from ..errors import CheckpointError, is_out_of_memory
from ..text import one_line
from .recipe import Recipe
from .tracker import TRACK_FILE

if TYPE_CHECKING:
    from .training import Training

# Gather state dicts from all processes into the first one.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
STATE_FILE = "state.pt"
CURVE_ATTRIBUTES = {  # name in the state file -> attribute of `Training`
    "loss": "loss",
    "top1": "top1",
    "seconds": "epoch_seconds",
    "steps": "update_seconds",
    "before": "top1_before",
}


def settings_to_match(
    recipe: Recipe, settings: Mapping[str, Any], processes: int
) -> dict[str, str]:
    """Return the settings that a stored state and the run that resumes it must share."""
    values = asdict(recipe) | dict(settings) | {"num_processes": processes}
    return {name: str(value) for name, value in values.items()}


def save_state(training: "Training", path: Path) -> None:
    """Write everything that is needed to resume. If killed, the old or the new file is intact.

    Raises:
        CheckpointError: The file cannot be written.
    """
    model, optimizer = get_state_dict(training.model, training.optimizer.optimizer, options=WHOLE)
    average = None
    if training.average is not None:
        average = get_model_state_dict(training.average.module, options=WHOLE)
    scaler = None
    if training.accelerator.scaler is not None:
        scaler = training.accelerator.scaler.state_dict()
    curves = {name: getattr(training, attribute) for name, attribute in CURVE_ATTRIBUTES.items()}
    state = {
        "settings": training.settings,
        "model": model,
        "optimizer": optimizer,
        "average": average,
        "scheduler": training.scheduler.state_dict(),
        "scaler": scaler,
        "update": training.updates_done,
        "correct": training.correct,
        "curves": curves,
    }
    if training.accelerator.is_main_process:
        try:
            with new_file(path, force=True) as partial_path, partial_path.open("wb") as file:
                torch.save(state, file)
        except RuntimeError as error:  # torch raises no OSError if the disk is full
            raise CheckpointError(f"output {path} cannot be written: {one_line(error)}") from error


def load_state_(training: "Training", path: Path) -> None:
    """Load the state that `save_state` wrote into the training.

    Raises:
        CheckpointError: The file is damaged, or was written with other settings.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise  # the file itself may be intact
        raise CheckpointError(
            f"{path}: is damaged ({type(error).__name__}); delete it to restart this run"
        ) from error
    for name, value in training.settings.items():
        stored_value = state["settings"].get(name)
        if stored_value != value:
            raise CheckpointError(f"{path}: was written with {name} {stored_value}, not {value}")
    set_state_dict(
        training.model,
        training.optimizer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=WHOLE,
    )
    if training.average is not None:
        set_model_state_dict(training.average.module, state["average"], options=WHOLE)
    training.scheduler.load_state_dict(state["scheduler"])
    if training.accelerator.scaler is not None:
        training.accelerator.scaler.load_state_dict(state["scaler"])
    training.updates_done = state["update"]
    training.correct = state["correct"]
    for name, values in state["curves"].items():
        setattr(training, CURVE_ATTRIBUTES[name], values)


def prepare_track_file(training: "Training") -> Path | None:
    """Return the file of position records, truncated to the epochs in the loaded state.

    A killed run may have written records after its last state was saved. When it is resumed, it
    repeats those epochs and writes their records again.
    """
    if training.folder is None:
        return None
    track = training.folder / TRACK_FILE
    if training.accelerator.is_main_process:
        training.folder.mkdir(parents=True, exist_ok=True)
        track.touch()
        lines = track.read_bytes().splitlines(keepends=True)
        epochs_done = len(training.top1)
        # Truncate instead of rewriting: a kill during a rewrite would lose finished epochs.
        os.truncate(track, sum(len(line) for line in lines[:epochs_done]))
    return track
