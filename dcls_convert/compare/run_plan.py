"""What a call of `compare` has to train, and how long that will take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import DclsConvertError
from ..progress import Notify
from .arms import Arm
from .settings import with_epochs
from .stored_settings import adopt_stored_settings_, check_unused, has_begun_runs, write_settings
from .trainer import Trainer, advice_on_memory, in_turns


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The runs of one call, and how long they will take."""

    runs: tuple[tuple[Arm, int], ...]  # still to be trained by this call; (arm, seed)
    updates: int  # in an epoch
    seconds: float  # for all of these runs


def plan_runs_(
    trainer: Trainer,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    *,
    minutes: float | None,
    only: tuple[int, int],
    notify: Notify,
) -> RunPlan:
    """Find what this call has to train, and how long that takes; settle the trainer's settings.

    In a new folder, `minutes` for all runs decide the number of epochs, and the settings are
    written. In a folder with settings, these count.

    Args:
        trainer: Its settings are changed.
        arms: All arms of the comparison.
        seeds: All its seeds.
        minutes: Time for all runs of the comparison; None: the trainer's settings state the epochs.
        only: (i, n): this call trains the i-th of n parts of the runs.
        notify: Told which arm is timed.

    Raises:
        CheckpointError: The folder holds a comparison with other settings, holds other things, or
            cannot be written.
        DclsConvertError: An epoch takes longer than the minutes.
    """
    runs = pending_runs(trainer, part_of_runs(arms, seeds, only))
    pending_arms = list(dict.fromkeys(arm for arm, _ in runs))
    if has_begun_runs(trainer.folder):
        adopt_stored_settings_(trainer, minutes)
        epoch_seconds = time_arms(trainer, pending_arms, notify)
    else:
        check_unused(trainer.folder)
        if minutes:
            epoch_seconds = time_arms(trainer, arms, notify)
            epochs = choose_epochs(list(in_turns(arms, seeds)), epoch_seconds, minutes)
            trainer.settings = with_epochs(trainer.settings, epochs)
        else:
            epoch_seconds = time_arms(trainer, pending_arms, notify)
        if trainer.accelerator.is_main_process:
            write_settings(trainer, minutes)
    trainer.accelerator.wait_for_everyone()
    # Several processes or jobs may have timed the arms, but only one wrote its number of epochs.
    # All use that one.
    adopt_stored_settings_(trainer, minutes)
    epochs = trainer.settings.recipe.epochs
    seconds = sum(epochs * epoch_seconds[arm] for arm, _ in runs)
    return RunPlan(runs=tuple(runs), updates=_updates_per_epoch(trainer), seconds=seconds)


def pending_runs(trainer: Trainer, runs: Sequence[tuple[Arm, int]]) -> list[tuple[Arm, int]]:
    """The runs that are not finished."""
    pending = []
    for arm, seed in runs:
        if trainer.finished(arm, seed) is None:
            pending.append((arm, seed))
    return pending


def part_of_runs(
    arms: Sequence[Arm], seeds: Sequence[int], part: tuple[int, int]
) -> list[tuple[Arm, int]]:
    """The i-th of n parts of all runs; `part` is (i, n), counted from 1.

    With no more parts than seeds, a part has all arms of its seeds, so that one device trains what
    is compared. With more, a part has runs that follow one another in turns, by seed.
    """
    number, parts = part
    if parts <= len(seeds):
        return list(in_turns(arms, seeds[number - 1 :: parts]))
    runs = list(in_turns(arms, seeds))
    first = (number - 1) * len(runs) // parts
    end = number * len(runs) // parts
    return runs[first:end]


def time_arms(trainer: Trainer, arms: Sequence[Arm], notify: Notify) -> dict[Arm, float]:
    """Seconds of an epoch and its test, for each arm, from short trials."""
    updates = _updates_per_epoch(trainer)
    epoch_seconds = {}
    for number, arm in enumerate(arms):
        notify(f"timing {arm.label}, {number + 1} of {len(arms)}", number, len(arms))
        with advice_on_memory(arm.label):
            per_update, per_test = trainer.time_trial(arm)
        epoch_seconds[arm] = updates * per_update + per_test
    return epoch_seconds


def _updates_per_epoch(trainer: Trainer) -> int:
    update_size = trainer.settings.recipe.update_size(trainer.accelerator.num_processes)
    return len(trainer.data.train) // update_size


def choose_epochs(
    all_runs: Sequence[tuple[Arm, int]], epoch_seconds: Mapping[Arm, float], minutes: float
) -> int:
    """The number of epochs that all runs can do in the minutes.

    Raises:
        DclsConvertError: Not even one.
    """
    minutes_per_epoch = sum(epoch_seconds[arm] for arm, _ in all_runs) / 60
    if minutes < minutes_per_epoch:
        raise DclsConvertError(
            f"{minutes:g} minutes: one epoch of all {len(all_runs)} runs takes "
            f"{math.ceil(minutes_per_epoch)} minutes here; "
            "allow more time, or use fewer seeds, sizes or images"
        )
    return int(minutes / minutes_per_epoch)
