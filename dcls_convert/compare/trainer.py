"""Train the runs of a comparison. Each run trains one arm with one seed.

Every run has its own folder in the comparison's output folder, with a file of its results.
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
from ..conversion.loaded import LoadedNetwork
from ..conversion.request import ConversionRequest
from ..errors import DclsConvertError, is_out_of_memory
from ..fitting.calibration_images import Calibration
from ..image_files import BATCH
from ..progress import Note, Notify, ignore_messages
from ..records import Record
from ..text import one_line
from ..tuning.distributed import from_first_process
from ..tuning.training import Training, median_after_warmup
from ..tuning.training_images import ImageData, set_transforms_
from ..tuning.training_state import STATE_FILE
from .arms import Arm, ArmNetwork, PositionShift, make_network
from .run_locks import locked
from .settings import Settings

RUNS_FOLDER = "runs"
MODELS_FOLDER = "models"
RUN_FILE = "run.json"
MAX_CALIBRATION_IMAGES = 64  # taken from the training images
# A timing trial estimates how long an arm takes.
TRIAL_UPDATES = 5
MAX_TRIAL_TEST_BATCHES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(Record):
    """A finished run. Tuples have one value per epoch."""

    format: int = 1
    arm: Arm
    seed: int
    device: str
    processes: int
    params: int
    macs: int | None
    step_ms: float  # median over the updates, without loading
    images_per_second: float  # with loading
    peak_mib: float | None  # peak GPU memory; None on a CPU
    loss: tuple[float, ...]  # mean over the updates of the epoch
    top1: tuple[float, ...]  # percent of the test images
    seconds: tuple[float, ...]  # without testing
    right: str  # one digit per test image: "1" if classified correctly after the last epoch
    moved: PositionShift | None  # None without DCLS layers
    top1_before: float | None = None  # percent, before training

    def correct(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """Return 1.0 for each test image that `right` marks as correct, else 0.0: (images,)."""
        return np.array([digit == "1" for digit in self.right], dtype=np.float64)


class TrialSeconds(NamedTuple):
    """Training and test times of an arm, estimated by a short trial."""

    per_update: float  # with loading
    per_test: float  # for all test images


def run_folder(comparison: Path, arm: Arm, seed: int) -> Path:
    """Return the folder of a run, inside the folder of its comparison."""
    return comparison / RUNS_FOLDER / f"{arm.file_name}-seed{seed}"


@dataclass(kw_only=True)
class Trainer:
    """Builds, times and trains the networks of a comparison."""

    request: ConversionRequest  # its seed is replaced by each run, its size by each arm
    data: ImageData
    settings: Settings
    folder: Path
    accelerator: Any  # from `accelerator_for`
    workers: int = 0
    fsdp: bool = False
    note: Note = ignore_messages  # receives messages for the user

    def prepare(self, arm: Arm, seed: int) -> ArmNetwork:
        """Build and convert the network of an arm with a seed.

        As a side effect, this sets the transforms of the data to those that the network needs.
        """
        self.accelerator.free_memory()  # otherwise it keeps every network that it has prepared
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
        """Take training images, evenly spread over the data set, without augmentation."""
        images = self.data.train
        count = min(MAX_CALIBRATION_IMAGES, len(images))
        chosen = []
        with _borrowed_transform(images, self.data.test):
            for number in range(count):
                sample = images[number * len(images) // count]  # (image, label)
                chosen.append(sample[0])
        return Calibration(batches=torch.split(torch.stack(chosen), BATCH))

    def time_trial(self, arm: Arm) -> TrialSeconds:
        """Train an arm for a few updates and test it with a few images, to time both.

        Raises:
            DclsConvertError: The model fails on these images.
        """
        network = self.prepare(arm, 0)
        all_images = len(self.data.test)
        test_images = min(all_images, MAX_TRIAL_TEST_BATCHES * self.settings.recipe.batch_size)
        data = replace(self.data, test=Subset(self.data.test, range(test_images)))
        # An epoch has at least one update, so this many epochs suffice.
        recipe = replace(self.settings.recipe, epochs=TRIAL_UPDATES)
        training = Training(
            network.model, data, recipe, accelerator=self.accelerator, fsdp=self.fsdp
        )
        try:
            training.run(max_updates=TRIAL_UPDATES)
        except Exception as error:  # the model's own code may raise anything
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
        """Read a finished run from its file. Return None if it is not finished."""
        path = run_folder(self.folder, arm, seed) / RUN_FILE
        if not path.exists():
            return None
        return Run.from_json(path.read_bytes(), str(path))

    def run_unless_locked(self, arm: Arm, seed: int, notify: Notify, *, wait: bool) -> str | None:
        """Train an arm with a seed, unless another process is training it or has finished it.

        Args:
            wait: If another process has locked the run, wait to see whether it is still alive.

        Returns:
            The other process that is training the run; None if the run is now finished.
        """
        with contextlib.ExitStack() as stack:
            other_owner: str | None = None  # owner of the lock; None if it is this process
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
        """Train an arm with a seed, or resume its training, and write its results and its model."""
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

        def notify_epoch(training: Training) -> None:
            epoch = len(training.top1)
            top1 = training.top1[-1]
            notify(f"{title}: epoch {epoch} of {recipe.epochs}, top-1 {top1:.2f} %")

        try:
            training.run(notify_epoch, test_first=True)
        except DclsConvertError as error:
            raise type(error)(f"{title}: {error}") from error
        trained = training.trained_model()
        run = self._record(arm, seed, training, network, trained)
        if self.accelerator.is_main_process:
            save_trained(trained, network.plan, self.folder / MODELS_FOLDER / folder.name)
            with new_file(folder / RUN_FILE, force=True) as path:
                path.write_text(run.to_json())
            (folder / STATE_FILE).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()

    def _is_on_gpu(self) -> bool:
        on_gpu: bool = self.accelerator.device.type == "cuda"
        return on_gpu

    def _record(
        self, arm: Arm, seed: int, training: Training, network: ArmNetwork, trained: nn.Module
    ) -> Run:
        """Return the record of a finished training; `trained` is its model."""
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
    """Raise DclsConvertError with advice if memory is exhausted inside the block.

    The message begins with `title`.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DclsConvertError(
            f"{title}: out of memory; use a smaller --batch-size or --input-size"
        ) from error


@contextlib.contextmanager
def _borrowed_transform(images: Any, source: Any) -> Iterator[None]:
    """Give a timm data set the transform of another one inside the block."""
    own_transform = images.transform
    images.transform = source.transform
    try:
        yield
    finally:
        images.transform = own_transform


def runs_by_seed(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[tuple[Arm, int]]:
    """Yield all arms with the first seed, then all arms with the next seed.

    In this order, a comparison that is cut short has complete pairs of runs.
    """
    for seed in seeds:
        for arm in arms:
            yield arm, seed
