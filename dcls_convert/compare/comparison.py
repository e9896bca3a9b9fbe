"""A comparison by training: the network as it is beside its conversions, run by run, and the
answer."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import CheckpointError, DclsConvertError, OutputExistsError
from ..files import is_checkpoint
from ..output import new_file
from ..progress import Notify
from ..records import Record
from .answer import ArmResult, results
from .arms import Arm
from .runs import SETTINGS, Run, Settings, Trainer, in_turns

COMPARISON = "comparison.json"
LR, LR_BATCH = (
    1e-3,
    256,
)  # from scratch; as the square root of the batch, the paper's 4e-3 for 4,096 images
TUNED = 0.1  # of the rate, for weights that are trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Record):
    """All of it: `comparison.json`."""

    format: int = 1
    settings: Settings
    arms: tuple[ArmResult, ...]
    runs: tuple[Run, ...]
    missing: tuple[str, ...]  # runs that are asked for and not there yet
    interrupted: bool = False  # before this call's work was done


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is to be done, and how long it will take."""

    runs: tuple[tuple[Arm, int], ...]  # of this call, without those that are there
    updates: int  # in an epoch
    seconds: float  # for all of these runs


def usual_lr(batch_size: int, *, trained: bool) -> float:
    """The learning rate for so many images in an update, to two digits."""
    return float(f"{LR * math.sqrt(batch_size / LR_BATCH) * (TUNED if trained else 1):.2g}")


def settle(
    trainer: Trainer,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    *,
    minutes: float | None,
    only: tuple[int, int],
    notify: Notify,
) -> Work:
    """Time the arms, and decide the epochs where minutes for all runs are given; the folder's
    settings overrule both.

    The trainer's settings become those that count. With `only` (i, n), the work is every n-th run,
    from the i-th on. CheckpointError: the folder holds a comparison with other settings, or cannot
    be written; DclsConvertError: the minutes are less than an epoch takes.
    """
    runs = list(in_turns(arms, seeds))
    mine = runs[only[0] - 1 :: only[1]]
    left = tuple(run for run in mine if trainer.finished(*run) is None)
    path = trainer.folder / SETTINGS
    if known := path.exists():
        _take_settings(trainer, minutes)
    elif is_checkpoint(trainer.folder) or any(
        path.is_dir() for path in trainer.folder.glob("[!.]*")
    ):  # logs may be
        raise CheckpointError(
            f"output {trainer.folder}: holds other things than a comparison; name another folder"
        )
    timed = arms if minutes and not known else list(dict.fromkeys(arm for arm, _ in left))
    took = {}
    for number, arm in enumerate(timed):
        notify(f"timing {arm.label}, {number + 1} of {len(timed)}", number, len(timed))
        took[arm] = trainer.time_trial(arm)
    updates = len(trainer.data.train) // trainer.settings.recipe.update_size(
        trainer.accelerator.num_processes
    )
    epoch = {arm: updates * update + test for arm, (update, test) in took.items()}
    if minutes and not known:
        every = sum(epoch[arm] for arm, _ in runs) / 60
        if minutes < every:
            raise DclsConvertError(
                f"{minutes:g} minutes: an epoch of all {len(runs)} runs takes "
                f"{math.ceil(every)} here; give more, or take fewer seeds, sizes or images"
            )
        trainer.settings = with_epochs(trainer.settings, int(minutes / every))
    if not known and trainer.accelerator.is_main_process:
        trainer.folder.mkdir(parents=True, exist_ok=True)
        with (
            contextlib.suppress(OutputExistsError),
            new_file(path, force=False) as partial,
        ):  # of another call
            partial.write_text(trainer.settings.to_json())
    trainer.accelerator.wait_for_everyone()
    _take_settings(trainer, minutes)
    seconds = sum(trainer.settings.recipe.epochs * epoch[arm] for arm, _ in left)
    return Work(runs=left, updates=updates, seconds=seconds)


def _take_settings(trainer: Trainer, minutes: float | None) -> None:
    """Check that the folder's are the trainer's, but for epochs that minutes would decide."""
    path = trainer.folder / SETTINGS
    stored = Settings.from_json(path.read_bytes(), str(path))
    if minutes:
        trainer.settings = with_epochs(trainer.settings, stored.recipe.epochs)
    trainer.settings.check_same(stored, trainer.folder)


def with_epochs(settings: Settings, epochs: int) -> Settings:
    """With a warm-up of one epoch, or of one in 20."""
    return replace(
        settings, recipe=replace(settings.recipe, epochs=epochs, warmup_epochs=max(1, epochs // 20))
    )


def carry_out(
    trainer: Trainer, work: Work, arms: Sequence[Arm], seeds: Sequence[int], notify: Notify
) -> Comparison:
    """Train what is left, and answer from all runs that are there; `comparison.json` is written
    after each.

    An interrupt ends it with the runs so far, where there are some.
    """
    try:
        for done, (arm, seed) in enumerate(work.runs):

            def tell(what: str, *_: int, done: int = done) -> None:
                notify(f"run {done + 1} of {len(work.runs)}, {what}", done, len(work.runs))

            trainer.run(arm, seed, tell)
            _gather(trainer, arms, seeds)
    except KeyboardInterrupt:
        if not (comparison := _gather(trainer, arms, seeds)).runs:
            raise
        return replace(comparison, interrupted=True)
    return _gather(trainer, arms, seeds)


def _gather(trainer: Trainer, arms: Sequence[Arm], seeds: Sequence[int]) -> Comparison:
    """From the runs that are there; `comparison.json` gets it."""
    found = {(arm, seed): trainer.finished(arm, seed) for arm, seed in in_turns(arms, seeds)}
    runs = tuple(run for arm in arms for seed in seeds if (run := found[arm, seed]) is not None)
    missing = tuple(
        f"{arm.label}, seed {seed}" for (arm, seed), run in found.items() if run is None
    )
    comparison = Comparison(
        settings=trainer.settings, arms=results(runs), runs=runs, missing=missing
    )
    if trainer.accelerator.is_main_process:
        with new_file(trainer.folder / COMPARISON, force=True) as partial:
            partial.write_text(comparison.to_json())
    return comparison
