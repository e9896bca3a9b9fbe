"""A comparison by training: the network as it is beside its conversions, and the answer."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..atomic_output import new_file
from ..errors import CheckpointError, DclsConvertError, OutputExistsError
from ..given_files import is_checkpoint
from ..progress import Notify
from ..records import Record
from ..tuning.training_state import STATE
from .answer import MIN_SEEDS, ArmResult, Correction, results
from .arms import Arm
from .runs import FINISHED, RUNS, Run, Trainer, advice_on_memory, in_turns
from .settings import SETTINGS, Settings, with_epochs

COMPARISON = "comparison.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Record):
    """The contents of `comparison.json`."""

    format: int = 1
    settings: Settings
    arms: tuple[ArmResult, ...]
    runs: tuple[Run, ...]
    missing: tuple[str, ...]  # runs that are not finished yet
    interrupted: bool = False  # whether this call was, before its runs were finished
    # Numbers of seeds of the finished comparisons that were written into this folder.
    looks: tuple[int, ...] = ()
    correction: Correction = field(default_factory=Correction)


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
    is_new = not _has_begun_runs(trainer.folder)
    if is_new:
        _check_unused(trainer.folder)
    else:
        _take_stored_settings_(trainer, minutes)
    if is_new and minutes:
        epoch_seconds = time_arms(trainer, arms, notify)
        epochs = choose_epochs(list(in_turns(arms, seeds)), epoch_seconds, minutes)
        trainer.settings = with_epochs(trainer.settings, epochs)
    else:
        pending_arms = list(dict.fromkeys(arm for arm, _ in runs))
        epoch_seconds = time_arms(trainer, pending_arms, notify)
    settle_settings_(trainer, minutes, is_new=is_new)
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
    arms: Sequence[Arm], seeds: Sequence[int], only: tuple[int, int]
) -> list[tuple[Arm, int]]:
    """The i-th of n parts of all runs; `only` is (i, n).

    With no more parts than seeds, a part has all arms of its seeds, so that one device trains what
    is compared. With more, a part has runs that follow one another in turns, by seed.
    """
    part, parts = only
    if parts <= len(seeds):
        return list(in_turns(arms, seeds[part - 1 :: parts]))
    runs = list(in_turns(arms, seeds))
    first = (part - 1) * len(runs) // parts
    end = part * len(runs) // parts
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
            f"{minutes:g} minutes: an epoch of all {len(all_runs)} runs takes "
            f"{math.ceil(minutes_per_epoch)} here; "
            "give more, or take fewer seeds, sizes or images"
        )
    return int(minutes / minutes_per_epoch)


def _has_begun_runs(folder: Path) -> bool:
    """Whether a run in the folder is finished, or has a state from which it can go on.

    From then on, the folder's settings hold for all later calls.
    """
    if not (folder / SETTINGS).exists():
        return False
    runs = folder / RUNS
    return any(runs.glob(f"*/{FINISHED}")) or any(runs.glob(f"*/{STATE}"))


def _check_unused(folder: Path) -> None:
    """CheckpointError if a folder holds a checkpoint, or folders; files may be logs."""
    others = [path for path in folder.glob("[!.]*") if path.is_dir() and path.name != RUNS]
    if is_checkpoint(folder) or others:
        raise CheckpointError(
            f"output {folder}: holds other things than a comparison; name another folder"
        )


def settle_settings_(trainer: Trainer, minutes: float | None, *, is_new: bool) -> None:
    """Write the trainer's settings into a new folder; then all processes take the folder's.

    Of several processes and jobs that timed the arms, one has written its number of epochs: all
    others take this number.
    """
    if is_new and trainer.accelerator.is_main_process:
        _write_settings_(trainer, minutes)
    trainer.accelerator.wait_for_everyone()
    _take_stored_settings_(trainer, minutes)


def _write_settings_(trainer: Trainer, minutes: float | None) -> None:
    """Write the trainer's settings into a folder in which no run has begun.

    Settings that are there already are kept if they differ only in a number of epochs that
    `minutes` decided. Then another job of the same comparison has written them. Other settings are
    replaced. A call that ended early has left them.
    """
    trainer.folder.mkdir(parents=True, exist_ok=True)
    path = trainer.folder / SETTINGS
    text = trainer.settings.to_json()
    try:
        with new_file(path, force=False) as partial_path:
            partial_path.write_text(text)
    except OutputExistsError:
        try:
            _take_stored_settings_(trainer, minutes)
        except CheckpointError:
            with new_file(path, force=True) as partial_path:
                partial_path.write_text(text)


def _take_stored_settings_(trainer: Trainer, minutes: float | None) -> None:
    """Check that the folder's settings are the trainer's.

    The trainer gets the folder's number of seeds, which the first call stated. If `minutes` decide
    the number of epochs, the trainer gets the folder's number too.
    """
    path = trainer.folder / SETTINGS
    stored = Settings.from_json(path.read_bytes(), str(path))
    if minutes:
        trainer.settings = with_epochs(trainer.settings, stored.recipe.epochs)
    trainer.settings.check_same(stored, trainer.folder)
    trainer.settings = replace(trainer.settings, seeds=stored.seeds)


def train_pending(
    trainer: Trainer, plan: RunPlan, arms: Sequence[Arm], seeds: Sequence[int], notify: Notify
) -> Comparison:
    """Train the planned runs, and compare all finished ones.

    `comparison.json` is written after each run.
    An interrupt ends the training. The comparison is then of the runs that are finished.

    Raises:
        KeyboardInterrupt: An interrupt before any run is finished.
    """
    owners: dict[tuple[Arm, int], str] = {}  # of runs that other processes train

    def train(numbered_runs: Sequence[tuple[int, tuple[Arm, int]]], *, patient: bool) -> None:
        for number, (arm, seed) in numbered_runs:
            notify_run = functools.partial(_notify_run, notify, number, len(plan.runs))
            owner = trainer.run_unless_locked(arm, seed, notify_run, patient=patient)
            if owner is not None:
                owners[arm, seed] = owner
                continue
            owners.pop((arm, seed), None)
            _write_comparison(trainer, arms, seeds, owners)

    try:
        runs = list(enumerate(plan.runs))
        train(runs, patient=False)
        # Only after a while can be seen whether the owners of the locked runs still live.
        locked_runs = [(number, run) for number, run in runs if run in owners]
        train(locked_runs, patient=True)
    except KeyboardInterrupt:
        comparison = _write_comparison(trainer, arms, seeds, owners)
        if not comparison.runs:
            raise
        return replace(comparison, interrupted=True)
    return _write_comparison(trainer, arms, seeds, owners)


def _notify_run(notify: Notify, number: int, count: int, what: str, *_: int) -> None:
    """Say what is being done in a run, as a step of all runs; `number` counts from 0."""
    notify(f"run {number + 1} of {count}, {what}", number, count)


def _write_comparison(
    trainer: Trainer,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    owners: Mapping[tuple[Arm, int], str],
) -> Comparison:
    """The comparison of all finished runs; the first process also writes it as `comparison.json`.

    Meanwhile, another call may finish a run and write the file with more runs. This process would
    replace it by one with fewer, so it writes again until no run was finished in the meantime.
    """
    comparison = _comparison_of(trainer, arms, seeds, owners)
    if not trainer.accelerator.is_main_process:
        return comparison
    while True:
        with new_file(trainer.folder / COMPARISON, force=True) as partial_path:
            partial_path.write_text(comparison.to_json())
        written = comparison
        comparison = _comparison_of(trainer, arms, seeds, owners)
        if len(comparison.runs) == len(written.runs):
            return comparison


def _comparison_of(
    trainer: Trainer,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    owners: Mapping[tuple[Arm, int], str],
) -> Comparison:
    found: dict[tuple[Arm, int], Run | None] = {}
    for arm, seed in in_turns(arms, seeds):
        found[arm, seed] = trainer.finished(arm, seed)
    missing = []
    for (arm, seed), run in found.items():
        owner = owners.get((arm, seed))
        if run is None and owner is None:
            missing.append(f"{arm.label}, seed {seed}")
        elif run is None:
            missing.append(f"{arm.label}, seed {seed} (trained by {owner})")
    runs = []
    for arm in arms:
        for seed in seeds:
            run = found[arm, seed]
            if run is not None:
                runs.append(run)
    looks = _looks(trainer.folder)
    with_this = tuple(dict.fromkeys([*looks, len(seeds)]))
    # With fewer seeds than an answer needs, nothing could be claimed, so these are no looks.
    answers = [number for number in with_this if number >= MIN_SEEDS]
    correction = Correction(conversions=len(arms) - 1, looks=max(1, len(answers)))
    return Comparison(
        settings=trainer.settings,
        arms=results(runs, correction),
        runs=tuple(runs),
        missing=tuple(missing),
        looks=looks if missing else with_this,
        correction=correction,
    )


def _looks(folder: Path) -> tuple[int, ...]:
    """Numbers of seeds of the finished comparisons in a folder so far."""
    path = folder / COMPARISON
    if not path.exists():
        return ()
    return Comparison.from_json(path.read_bytes(), str(path)).looks
