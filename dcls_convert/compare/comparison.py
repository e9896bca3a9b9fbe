"""Compare a network with its conversions by training them, and store the results."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..atomic_output import new_file
from ..progress import Notify
from ..records import Record
from .answer import MIN_SEEDS, ArmResult, Correction, compare_arms
from .arms import Arm
from .run_plan import RunPlan
from .settings import Settings
from .trainer import Run, Trainer, runs_by_seed

COMPARISON_FILE = "comparison.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Record):
    """The contents of `comparison.json`."""

    format: int = 1
    settings: Settings
    arms: tuple[ArmResult, ...]
    runs: tuple[Run, ...]
    missing: tuple[str, ...]  # runs that are not finished yet
    interrupted: bool = False  # whether this call was interrupted before its runs were finished
    # For each finished comparison that was written into this folder, its number of seeds.
    looks: tuple[int, ...] = ()
    correction: Correction = field(default_factory=Correction)


def train_pending(
    trainer: Trainer, plan: RunPlan, arms: Sequence[Arm], seeds: Sequence[int], notify: Notify
) -> Comparison:
    """Train the planned runs, and compare all finished ones.

    `comparison.json` is written after each run. An interrupt ends the training; the comparison then
    has the runs that are finished.

    Raises:
        KeyboardInterrupt: Interrupted before any run was finished.
    """
    owners: dict[tuple[Arm, int], str] = {}  # runs that other processes are training -> process
    try:
        # First train the runs that are free. Then wait for the others, in case their owner is dead.
        for wait in (False, True):
            for number, (arm, seed) in enumerate(plan.runs):
                if wait and (arm, seed) not in owners:
                    continue
                notify_run = functools.partial(_notify_run, notify, number, len(plan.runs))
                owner = trainer.run_unless_locked(arm, seed, notify_run, wait=wait)
                if owner is not None:
                    owners[arm, seed] = owner
                    continue
                owners.pop((arm, seed), None)
                _write_comparison(trainer, arms, seeds, owners)
    except KeyboardInterrupt:
        comparison = _write_comparison(trainer, arms, seeds, owners)
        if not comparison.runs:
            raise
        return replace(comparison, interrupted=True)
    return _write_comparison(trainer, arms, seeds, owners)


def _notify_run(notify: Notify, number: int, count: int, message: str, *_: int) -> None:
    """Report progress within a run as progress over all runs; `number` counts from 0."""
    notify(f"run {number + 1} of {count}, {message}", number, count)


def _write_comparison(
    trainer: Trainer,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    owners: Mapping[tuple[Arm, int], str],
) -> Comparison:
    """Compare all finished runs. The first process also writes `comparison.json`.

    While it writes, another call may finish a run and write a file with more runs, which this
    process would replace. So it writes again until no run was finished in the meantime.
    """
    comparison = _compare_finished(trainer, arms, seeds, owners)
    if not trainer.accelerator.is_main_process:
        return comparison
    while True:
        with new_file(trainer.folder / COMPARISON_FILE, force=True) as partial_path:
            partial_path.write_text(comparison.to_json())
        written = comparison
        comparison = _compare_finished(trainer, arms, seeds, owners)
        if len(comparison.runs) == len(written.runs):
            return comparison


def _compare_finished(
    trainer: Trainer,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    owners: Mapping[tuple[Arm, int], str],
) -> Comparison:
    run_of: dict[tuple[Arm, int], Run | None] = {}
    for arm, seed in runs_by_seed(arms, seeds):
        run_of[arm, seed] = trainer.finished(arm, seed)
    missing = []
    for (arm, seed), run in run_of.items():
        owner = owners.get((arm, seed))
        if run is None and owner is None:
            missing.append(f"{arm.label}, seed {seed}")
        elif run is None:
            missing.append(f"{arm.label}, seed {seed} (trained by {owner})")
    runs = []
    for arm in arms:
        for seed in seeds:
            run = run_of[arm, seed]
            if run is not None:
                runs.append(run)
    looks = _looks(trainer.folder)
    looks_with_this = tuple(dict.fromkeys([*looks, len(seeds)]))
    # With fewer than MIN_SEEDS seeds nothing could be claimed, so these looks do not count.
    counted_looks = [seed_count for seed_count in looks_with_this if seed_count >= MIN_SEEDS]
    correction = Correction(conversions=len(arms) - 1, looks=max(1, len(counted_looks)))
    return Comparison(
        settings=trainer.settings,
        arms=compare_arms(runs, correction),
        runs=tuple(runs),
        missing=tuple(missing),
        looks=looks if missing else looks_with_this,
        correction=correction,
    )


def _looks(folder: Path) -> tuple[int, ...]:
    """Return the number of seeds of each comparison that was finished in a folder so far."""
    path = folder / COMPARISON_FILE
    if not path.exists():
        return ()
    return Comparison.from_json(path.read_bytes(), str(path)).looks
