"""The settings stored in the folder of a comparison, which hold for all later calls."""

from dataclasses import replace
from pathlib import Path

from ..atomic_output import new_file
from ..errors import CheckpointError, OutputExistsError
from ..input_files import is_checkpoint
from ..tuning.training_state import STATE_FILE
from .settings import SETTINGS_FILE, Settings, with_epochs
from .trainer import RUN_FILE, RUNS_FOLDER, Trainer


def has_begun_runs(folder: Path) -> bool:
    """True if a run in the folder is finished, or has a state from which it can be resumed.

    From then on, the stored settings hold for all later calls.
    """
    if not (folder / SETTINGS_FILE).exists():
        return False
    runs = folder / RUNS_FOLDER
    return any(runs.glob(f"*/{RUN_FILE}")) or any(runs.glob(f"*/{STATE_FILE}"))


def check_unused(folder: Path) -> None:
    """Raise CheckpointError if the folder holds a checkpoint or unrelated folders.

    Loose files are allowed, since they may be logs.
    """
    others = [path for path in folder.glob("[!.]*") if path.is_dir() and path.name != RUNS_FOLDER]
    if is_checkpoint(folder) or others:
        raise CheckpointError(
            f"output {folder}: holds something other than a comparison; use another folder"
        )


def write_settings(trainer: Trainer, minutes: float | None) -> None:
    """Write the trainer's settings into a folder in which no run has begun.

    Matching settings, which another job of the same comparison has written, are kept. Other
    settings were left by a call that ended early, and are replaced.
    """
    trainer.folder.mkdir(parents=True, exist_ok=True)
    path = trainer.folder / SETTINGS_FILE
    text = trainer.settings.to_json()
    try:
        with new_file(path, force=False) as partial_path:
            partial_path.write_text(text)
    except OutputExistsError:
        if not _stored_settings_match(trainer, minutes):
            with new_file(path, force=True) as partial_path:
                partial_path.write_text(text)


def _stored_settings_match(trainer: Trainer, minutes: float | None) -> bool:
    """True if the stored settings equal the trainer's.

    The number of seeds may differ, and, if `minutes` decides it, the number of epochs.
    """
    try:
        _matching_settings(trainer, minutes)
    except CheckpointError:
        return False
    return True


def adopt_stored_settings_(trainer: Trainer, minutes: float | None) -> None:
    """Set the trainer's number of seeds to the stored one, which the first call stated.

    If `minutes` decides the number of epochs, use the stored one as well.

    Raises:
        CheckpointError: The stored settings differ in other values, or cannot be read.
    """
    trainer.settings = _matching_settings(trainer, minutes)


def _matching_settings(trainer: Trainer, minutes: float | None) -> Settings:
    """Return the trainer's settings with the stored seeds and, with `minutes`, stored epochs.

    Raises:
        CheckpointError: The stored settings differ in other values, or cannot be read.
    """
    path = trainer.folder / SETTINGS_FILE
    stored = Settings.from_json(path.read_bytes(), str(path))
    settings = trainer.settings
    if minutes:
        settings = with_epochs(settings, stored.recipe.epochs)
    settings.check_same(stored, trainer.folder)
    return replace(settings, seeds=stored.seeds)
