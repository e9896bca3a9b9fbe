"""Plan what a call of `compare` has to train, and estimate how long it will take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import DclsConvertError
from ..progress import Notify
from .arms import Arm
from .settings import with_epochs
from .stored_settings import adopt_stored_settings_, check_unused, has_begun_runs, write_settings
from .trainer import Trainer, advice_on_memory, runs_by_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The runs of one call, and how long they will take."""

    runs: tuple[tuple[Arm, int], ...]  # still to be trained by this call; (arm, seed)
    updates: int  # per epoch
    seconds: float  # estimate for all these runs


def plan_runs_(
    trainer: Trainer,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    *,
    minutes: float | None,
    only: tuple[int, int],
    notify: Notify,
) -> RunPlan:
    """Find the runs that this call has to train, estimate their time, and fix the settings.

    In a new folder, `minutes` decides the number of epochs, and the settings are written. If runs
    have begun in the folder, its stored settings hold.

    Args:
        trainer: Its settings are changed.
        arms: All arms of the comparison.
        seeds: All seeds of the comparison.
        minutes: Time for all runs of the comparison. If None, the trainer's settings state the
            number of epochs.
        only: (i, n): this call trains the i-th of n parts of the runs.
        notify: Receives the arm that is being timed.

    Raises:
        CheckpointError: The folder holds a comparison with other settings, holds other things, or
            cannot be written.
        DclsConvertError: A single epoch of all runs takes longer than `minutes`.
    """
    runs = pending_runs(trainer, part_of_runs(arms, seeds, only))
    pending_arms = list(dict.fromkeys(arm for arm, _ in runs))
    if has_begun_runs(trainer.folder):
        adopt_stored_settings_(trainer, minutes)
        epoch_seconds = time_arms(trainer, pending_arms, notify)
    else:
        check_unused(trainer.folder)
        # The number of epochs depends on the times of all arms, also of those of other calls.
        arms_to_time = arms if minutes else pending_arms
        epoch_seconds = time_arms(trainer, arms_to_time, notify)
        if minutes:
            epochs = choose_epochs(list(runs_by_seed(arms, seeds)), epoch_seconds, minutes)
            trainer.settings = with_epochs(trainer.settings, epochs)
        if trainer.accelerator.is_main_process:
            write_settings(trainer, minutes)
    trainer.accelerator.wait_for_everyone()
    # Several processes or jobs may have timed the arms and chosen different numbers of epochs. All
    # use the number that was written.
    adopt_stored_settings_(trainer, minutes)
    epochs = trainer.settings.recipe.epochs
    seconds = sum(epochs * epoch_seconds[arm] for arm, _ in runs)
    return RunPlan(runs=tuple(runs), updates=_updates_per_epoch(trainer), seconds=seconds)


def pending_runs(trainer: Trainer, runs: Sequence[tuple[Arm, int]]) -> list[tuple[Arm, int]]:
    """Return the runs that are not finished yet."""
    pending = []
    for arm, seed in runs:
        if trainer.finished(arm, seed) is None:
            pending.append((arm, seed))
    return pending


def part_of_runs(
    arms: Sequence[Arm], seeds: Sequence[int], part: tuple[int, int]
) -> list[tuple[Arm, int]]:
    """Return the i-th of n parts of all runs; `part` is (i, n), with i counted from 1.

    If there are at most as many parts as seeds, each part has some seeds with all their arms, so
    that runs that are compared are trained on the same device. If there are more, the runs, ordered
    by seed, are split into contiguous parts.
    """
    number, parts = part
    if parts <= len(seeds):
        return list(runs_by_seed(arms, seeds[number - 1 :: parts]))
    runs = list(runs_by_seed(arms, seeds))
    first = (number - 1) * len(runs) // parts
    end = number * len(runs) // parts
    return runs[first:end]


def time_arms(trainer: Trainer, arms: Sequence[Arm], notify: Notify) -> dict[Arm, float]:
    """Estimate the seconds of an epoch with its test, for each arm, from short trials."""
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
    """Return the number of epochs for which all runs fit into `minutes`.

    Raises:
        DclsConvertError: Not even one epoch fits.
    """
    minutes_per_epoch = sum(epoch_seconds[arm] for arm, _ in all_runs) / 60
    if minutes < minutes_per_epoch:
        raise DclsConvertError(
            f"{minutes:g} minutes: one epoch of all {len(all_runs)} runs takes "
            f"{math.ceil(minutes_per_epoch)} minutes here; "
            "allow more time, or use fewer seeds, sizes or images"
        )
    return int(minutes / minutes_per_epoch)
