"""The runs of a comparison: each trains one arm with one seed, and leaves a file of its own.

The file is in a folder for the run, in the comparison's output folder.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from ..atomic_output import new_file
from ..checkpoints.save import save_trained
from ..errors import DclsConvertError, is_out_of_memory
from ..fitting.images import Calibration
from ..image_files import BATCH
from ..pipeline.loaded import LoadedNetwork
from ..pipeline.request import ConversionRequest
from ..progress import Note, Notify, silent
from ..records import Record
from ..text import one_line
from ..tuning.distributed import from_first_process
from ..tuning.images import ImageData, set_transforms_
from ..tuning.training import Training, median_after_warmup
from ..tuning.training_state import STATE
from .arms import Arm, ArmNetwork, PositionShift, make_network
from .run_locks import locked
from .settings import Settings

RUNS = "runs"
MODELS = "models"
FINISHED = "run.json"
TRAIN_IMAGES_TO_CALIBRATE = 64  # at most; of the images to train on
# Of a timing trial, which estimates how long an arm takes.
TRIAL_UPDATES = 5
TRIAL_TEST_BATCHES = 3  # at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(Record):
    """One finished training; curves have a value for each epoch."""

    format: int = 1
    arm: Arm
    seed: int
    device: str
    processes: int
    params: int
    macs: int | None
    step_ms: float  # median over the updates, without loading
    images_per_second: float  # with loading
    peak_mib: float | None  # of a GPU's memory
    loss: tuple[float, ...]  # mean over the updates
    top1: tuple[float, ...]  # percent of the test images
    seconds: tuple[float, ...]  # without the test
    right: str  # one "0" or "1" per test image: classified right after the last epoch
    moved: PositionShift | None  # None without DCLS layers
    top1_before: float | None = None  # percent, before training

    def correct(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """1.0 for each test image classified right after the last epoch, else 0.0: (images,)."""
        return np.array([digit == "1" for digit in self.right], dtype=np.float64)


class TrialSeconds(NamedTuple):
    """Seconds that an arm takes, estimated from a short trial."""

    per_update: float  # with loading
    per_test: float  # of all test images


def run_folder(comparison: Path, arm: Arm, seed: int) -> Path:
    """Where a comparison's folder keeps a run."""
    return comparison / RUNS / f"{arm.file_name}-seed{seed}"


@dataclass(kw_only=True)
class Trainer:
    """Makes, times and trains the networks of a comparison."""

    request: ConversionRequest  # each run replaces its seed, each arm its sizes
    data: ImageData
    settings: Settings
    folder: Path
    accelerator: Any  # from `accelerator_for`
    workers: int = 0
    fsdp: bool = False
    note: Note = silent  # told what the user should know

    def prepare(self, arm: Arm, seed: int) -> ArmNetwork:
        """Build and convert this arm's network with this seed.

        Side effect: the data get the transforms that the network needs.
        """
        self.accelerator.free_memory()  # it would keep every network that it has prepared
        request = replace(self.request, seed=seed)
        structure = LoadedNetwork(request).structure
        settings = self.settings
        set_transforms_(
            self.data,
            structure,
            settings.input_size,
            settings.augmentation,
            mirrored=settings.mirrored,
        )
        if request.trained and request.calibration is None and arm.kind != "original":
            request = replace(request, calibration=self._calibration())
        return make_network(request, arm, note=self.note)

    def _calibration(self) -> Calibration:
        """Images to train on, spread over the data set, without augmentation."""
        images = self.data.train
        count = min(TRAIN_IMAGES_TO_CALIBRATE, len(images))
        chosen = []
        with _transformed_as(images, self.data.test):
            for number in range(count):
                sample = images[number * len(images) // count]  # (image, label)
                chosen.append(sample[0])
        return Calibration(batches=torch.split(torch.stack(chosen), BATCH))

    def time_trial(self, arm: Arm) -> TrialSeconds:
        """Train an arm for some updates, and test it with some images, to time both.

        Raises:
            DclsConvertError: The model fails on these images.
        """
        network = self.prepare(arm, 0)
        all_images = len(self.data.test)
        test_images = min(all_images, TRIAL_TEST_BATCHES * self.settings.recipe.batch_size)
        data = replace(self.data, test=Subset(self.data.test, range(test_images)))
        # An epoch has one update at least, so that these are epochs enough for TRIAL_UPDATES.
        recipe = replace(self.settings.recipe, epochs=TRIAL_UPDATES)
        training = Training(
            network.model, data, recipe, accelerator=self.accelerator, fsdp=self.fsdp
        )
        try:
            training.run(max_updates=TRIAL_UPDATES)
        except Exception as error:  # the model's own code
            if isinstance(error, DclsConvertError) or is_out_of_memory(error):
                raise
            raise DclsConvertError(
                f"{arm.label}: fails on these images: {one_line(error)[:200]}"
            ) from error
        test_began = time.monotonic()
        training.test()
        test_seconds = time.monotonic() - test_began
        return TrialSeconds(
            per_update=median_after_warmup(training.update_seconds_with_loading),
            per_test=test_seconds * all_images / test_images,
        )

    def finished(self, arm: Arm, seed: int) -> Run | None:
        """A run that is finished, read from its file; None if there is no such file."""
        path = run_folder(self.folder, arm, seed) / FINISHED
        if not path.exists():
            return None
        return Run.from_json(path.read_bytes(), str(path))

    def run_unless_locked(self, arm: Arm, seed: int, notify: Notify, *, wait: bool) -> str | None:
        """Train an arm with a seed, unless another process does or has done so.

        Args:
            wait: Wait to see whether another process that has locked the run still lives.

        Returns:
            The other process that trains the run; None if the run is finished.
        """
        with contextlib.ExitStack() as stack:
            other_owner: str | None = None  # of the lock; None: this process has it
            is_finished = False
            if self.accelerator.is_main_process:
                lock = locked(run_folder(self.folder, arm, seed), wait=wait)
                other_owner = stack.enter_context(lock)
                is_finished = self.finished(arm, seed) is not None
            other_owner, is_finished = from_first_process([other_owner, is_finished])
            if other_owner is None and not is_finished:
                with advice_on_memory(f"{arm.label}, seed {seed}"):
                    self.run(arm, seed, notify)
            return other_owner

    def run(self, arm: Arm, seed: int, notify: Notify) -> None:
        """Train an arm with a seed, or continue its training, and write its file and its model."""
        title = f"{arm.label}, seed {seed}"
        notify(f"{title}: converting")
        network = self.prepare(arm, seed)
        recipe = replace(self.settings.recipe, seed=seed)
        folder = run_folder(self.folder, arm, seed)
        if self._is_on_gpu():
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        training = Training(
            network.model,
            self.data,
            recipe,
            folder,
            accelerator=self.accelerator,
            workers=self.workers,
            fsdp=self.fsdp,
            settings={
                "arm": arm.label,
                "model": self.settings.model,
                "train_images": len(self.data.train),
            },
        )

        def tell(training: Training) -> None:
            epoch = len(training.top1)
            top1 = training.top1[-1]
            notify(f"{title}: epoch {epoch} of {recipe.epochs}, top-1 {top1:.2f} %")

        try:
            training.run(tell, test_first=True)
        except DclsConvertError as error:
            raise type(error)(f"{title}: {error}") from error
        trained = training.trained_model()
        run = self._record(arm, seed, training, network, trained)
        if self.accelerator.is_main_process:
            save_trained(trained, network.plan, self.folder / MODELS / folder.name)
            with new_file(folder / FINISHED, force=True) as path:
                path.write_text(run.to_json())
            (folder / STATE).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()

    def _is_on_gpu(self) -> bool:
        on_gpu: bool = self.accelerator.device.type == "cuda"
        return on_gpu

    def _record(
        self, arm: Arm, seed: int, training: Training, network: ArmNetwork, trained: nn.Module
    ) -> Run:
        """The record of a training that is over; `trained` is its model."""
        device = self.accelerator.device
        device_name = device.type
        peak_mib = None
        if self._is_on_gpu():
            device_name = torch.cuda.get_device_name(device)
            peak_mib = torch.cuda.max_memory_allocated(device) / 2**20
        updates = training.updates_per_epoch
        images = updates * training.recipe.update_size(self.accelerator.num_processes)
        epoch_loss = []
        for first in range(0, training.updates_done, updates):
            epoch_loss.append(statistics.mean(training.loss[first : first + updates]))
        return Run(
            arm=arm,
            seed=seed,
            device=device_name,
            processes=self.accelerator.num_processes,
            params=sum(parameter.numel() for parameter in trained.parameters()),
            macs=network.macs,
            step_ms=1e3 * median_after_warmup(training.update_seconds),
            images_per_second=images / statistics.median(training.epoch_seconds),
            peak_mib=peak_mib,
            loss=tuple(epoch_loss),
            top1=tuple(training.top1),
            top1_before=next(iter(training.top1_before), None),
            seconds=tuple(training.epoch_seconds),
            right="".join("1" if correct else "0" for correct in training.correct.tolist()),
            moved=network.position_shift(trained),
        )


@contextlib.contextmanager
def advice_on_memory(title: str) -> Iterator[None]:
    """Raise DclsConvertError, which begins with `title`, if memory is exhausted inside."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DclsConvertError(
            f"{title}: out of memory; take a smaller --batch-size or --input-size"
        ) from error


@contextlib.contextmanager
def _transformed_as(images: Any, others: Any) -> Iterator[None]:
    """Inside, a data set of timm has the transform of another one."""
    own_transform = images.transform
    images.transform = others.transform
    try:
        yield
    finally:
        images.transform = own_transform


def in_turns(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[tuple[Arm, int]]:
    """All arms with the first seed, then all with the next.

    So a comparison that is cut short has complete pairs of runs.
    """
    for seed in seeds:
        for arm in arms:
            yield arm, seed
