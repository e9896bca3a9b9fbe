"""The runs of a comparison: each trains one arm with one seed, and ends as a file of its own in the
output folder."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from ..checkpoints.save import save_trained
from ..errors import CheckpointError, DclsConvertError, one_line
from ..fitting.images import BATCH, Calibration
from ..options import Augmentation
from ..output import new_file
from ..pipeline import Job
from ..progress import Notify
from ..records import Record
from ..tuning.images import ImageData, set_transforms_
from ..tuning.recipe import Recipe
from ..tuning.training import STATE, Training, median_after_warmup
from .arms import Arm, ArmNetwork, Moved, make_network

SETTINGS, RUNS, MODELS, FINISHED = "settings.json", "runs", "models", "run.json"
CALIBRATED_ON = 64  # of the images to train on
TRIAL_UPDATES, TRIAL_BATCHES = 5, 3  # to time each arm by


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Record):
    """What all runs of a comparison have in common; of a folder, stated by the first call."""

    format: int = 1
    model: str
    model_args: dict[str, Any] = field(default_factory=dict)
    weights: str = "random"  # "pretrained", or the file's name
    planning: dict[str, str] = field(
        default_factory=dict
    )  # options of the conversion that are not the usual ones
    data: str
    classes: int
    train_images: int
    test_images: int
    input_size: tuple[int, ...] | None
    augmentation: Augmentation
    recipe: Recipe  # but for the seed
    mixed_precision: str | None = None

    def check_same(self, stored: "Settings", folder: Path) -> None:
        """CheckpointError names the first thing in which the runs of the folder are others."""
        mine, theirs = (
            {**one.to_dict(), **asdict(one.recipe), "recipe": None} for one in (self, stored)
        )
        for name, value in mine.items():
            if name != "data" and value != theirs[name]:  # machines have it in different places
                found = f"compares with {name.replace('_', ' ')} {theirs[name]}, not {value}"
                raise CheckpointError(f"output {folder}: {found}; name another folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(Record):
    """One training that ended; curves have a value for each epoch."""

    format: int = 1
    arm: Arm
    seed: int
    device: str
    processes: int
    params: int
    macs: int | None
    step_ms: float  # median
    images_per_second: float  # with loading
    peak_mib: float | None
    loss: tuple[float, ...]  # mean over the updates
    top1: tuple[float, ...]  # percent of the images to test
    seconds: tuple[float, ...]  # without the test
    right: str  # "1" for each image to test whose class is found in the end, else "0"
    moved: Moved | None

    def is_right(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        return np.array([character == "1" for character in self.right], dtype=np.float64)


@dataclass(kw_only=True)
class Trainer:
    """Makes, times and trains the networks of a comparison."""

    job: Job  # whose seed and sizes the runs replace
    data: ImageData
    settings: Settings
    folder: Path
    accelerator: Any  # from `accelerator_for`
    workers: int = 0
    fsdp: bool = False

    def network(self, arm: Arm, seed: int) -> ArmNetwork:
        """As it starts; the data give images for it."""
        self.accelerator.free_memory()  # which else holds every network that it has prepared
        job, size = replace(self.job, seed=seed), self.settings.input_size
        set_transforms_(self.data, job.meta, size, self.settings.augmentation)
        if job.trained and job.calibration is None and arm.kind != "original":
            job.calibration = self._calibration()
        return make_network(job, arm)

    def _calibration(self) -> Calibration:
        """Of images to train on, as they are tested."""
        images = self.data.train
        augmenting, images.transform = images.transform, self.data.test.transform
        most = min(CALIBRATED_ON, len(images))
        chosen = [images[index * len(images) // most][0] for index in range(most)]
        images.transform = augmenting
        return Calibration(batches=torch.split(torch.stack(chosen), BATCH))

    def seconds(self, arm: Arm) -> tuple[float, float]:
        """What an update takes, with loading, and a test of all images; from a short trial."""
        network = self.network(arm, 0)
        some = min(len(self.data.test), TRIAL_BATCHES * self.settings.recipe.batch_size)
        data = replace(self.data, test=Subset(self.data.test, range(some)))
        recipe = replace(self.settings.recipe, epochs=TRIAL_UPDATES)
        training = Training(
            network.model, data, recipe, accelerator=self.accelerator, fsdp=self.fsdp
        )
        try:
            training.run(most_updates=TRIAL_UPDATES)
        except (DclsConvertError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the model's own code
            raise DclsConvertError(
                f"{arm.label}: fails on these images: {one_line(error)[:200]}"
            ) from error
        begun = time.monotonic()
        training.test()
        return median_after_warmup(training.update_seconds_with_loading), (
            time.monotonic() - begun
        ) * len(self.data.test) / some

    def path(self, arm: Arm, seed: int) -> Path:
        return self.folder / RUNS / f"{arm.file_name}-seed{seed}"

    def finished(self, arm: Arm, seed: int) -> Run | None:
        path = self.path(arm, seed) / FINISHED
        return Run.from_json(path.read_bytes(), str(path)) if path.exists() else None

    def run(self, arm: Arm, seed: int, notify: Notify) -> Run:
        """Train an arm with a seed, or go on with its training, and leave its file in the
        folder."""
        where, cuda = self.path(arm, seed), self.accelerator.device.type == "cuda"
        notify(f"{arm.label}, seed {seed}: converting")
        network, recipe = self.network(arm, seed), replace(self.settings.recipe, seed=seed)
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        settings = {
            "arm": arm.label,
            "model": self.settings.model,
            "train_images": len(self.data.train),
        }
        training = Training(
            network.model,
            self.data,
            recipe,
            where,
            accelerator=self.accelerator,
            workers=self.workers,
            fsdp=self.fsdp,
            settings=settings,
        )

        def tell(training: Training) -> None:
            epoch, top1 = len(training.top1), training.top1[-1]
            notify(
                f"{arm.label}, seed {seed}: epoch {epoch} of {recipe.epochs}, top-1 {top1:.2f} %"
            )

        try:
            training.run(tell)
        except DclsConvertError as error:
            raise type(error)(f"{arm.label}, seed {seed}: {error}") from error
        trained, updates, steps = (
            training.trained(),
            training.updates_done,
            training.updates_per_epoch,
        )
        peak = torch.cuda.max_memory_allocated(self.accelerator.device) / 2**20 if cuda else None
        images = steps * recipe.update_size(self.accelerator.num_processes)
        run = Run(
            arm=arm,
            seed=seed,
            device=torch.cuda.get_device_name(self.accelerator.device)
            if cuda
            else self.accelerator.device.type,
            processes=self.accelerator.num_processes,
            params=sum(parameter.numel() for parameter in trained.parameters()),
            macs=network.macs,
            step_ms=1e3 * median_after_warmup(training.update_seconds),
            images_per_second=images / statistics.median(training.epoch_seconds),
            peak_mib=peak,
            loss=tuple(
                statistics.mean(training.loss[first : first + steps])
                for first in range(0, updates, steps)
            ),
            top1=tuple(training.top1),
            seconds=tuple(training.epoch_seconds),
            right="".join("01"[right] for right in training.correct.tolist()),
            moved=network.moved(trained),
        )
        if self.accelerator.is_main_process:
            save_trained(trained, network.plan, self.folder / MODELS / where.name)
            with new_file(where / FINISHED, force=True) as path:
                path.write_text(run.to_json())
            (where / STATE).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        return run


def in_turns(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[tuple[Arm, int]]:
    """All arms with the first seed, then all with the next: a comparison that is cut short has
    pairs."""
    return ((arm, seed) for seed in seeds for arm in arms)
