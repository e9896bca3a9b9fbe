"""A comparison by training: the network as it is beside its conversions, and the answer."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..atomic_output import new_file
from ..progress import Notify
from ..records import Record
from .arm_results import MIN_SEEDS, ArmResult, Correction, results
from .arms import Arm
from .run_plan import RunPlan
from .settings import Settings
from .trainer import Run, Trainer, in_turns

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
    try:
        # First the free runs; then those whose owner turns out to be dead, which takes a while.
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
    # With fewer seeds than an answer needs, nothing could be claimed: these do not count as looks.
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
