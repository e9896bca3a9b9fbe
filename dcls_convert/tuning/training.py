"""The training loop of `compare` and of the example.

It supports timm's schedulers, averaged weights (EMA), mixed precision, accelerate's DDP, and FSDP2.

All random numbers follow from the seed and the progress of the run. A run that was killed and
resumed therefore ends with the same weights as an uninterrupted one, if the machine's arithmetic is
repeatable.
"""

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.data import Mixup
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from ..errors import DclsConvertError
from ..networks.model_outputs import tensors_in
from .clamp_positions import clamp_positions_
from .distillation import soft_target_loss
from .distributed import broadcast_buffers_, gathered, is_single_process, shard_
from .param_groups import param_groups
from .recipe import Recipe
from .repulsion import repulsive_loss
from .seeding import SeededImages, batch_keys, preserved_rng_state, seed_all
from .tracker import PositionTracker
from .training_images import ImageData
from .training_state import (
    STATE_FILE,
    WHOLE,
    load_state_,
    prepare_track_file,
    save_state,
    settings_to_match,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

WARMUP_UPDATES = 2  # left out of the median update time
Criterion = Callable[[Tensor, Tensor], Tensor]


class Training:
    """A training run: the model, its data and optimizer, and what was measured so far.

        training = Training(
            model, data, Recipe(epochs=30), Path("runs/one"), accelerator=accelerator_for()
        )
        training.run(lambda training: print(training.top1[-1]))

    Args:
        model: An initialised model on the CPU, which is trained in place. It may have no DCLS
            layers.
        data: Images, with their transforms set.
        recipe: The settings of the training.
        folder: Receives `state.pt` after each epoch, and `positions.jsonl` from `PositionTracker`.
            If it already contains a state, training continues from there. With None, nothing is
            written.
        accelerator: See `accelerator_for`.
        teacher: The model learns its outputs instead of labels (Hinton et al., arXiv:1503.02531).
        fsdp: Shard the model over the processes (FSDP2).
        workers: Number of processes that load images.
        save_every: Also write the state every `save_every` updates; 0: only after epochs.
        settings: Further values that must match when a stored state is resumed.

    Raises:
        DclsConvertError: There are fewer images than one update needs, or `fsdp` is set in a single
            process.
        CheckpointError: The state in the folder cannot be read, or has other settings.
    """

    def __init__(
        self,
        model: nn.Module,
        data: ImageData,
        recipe: Recipe,
        folder: Path | None = None,
        *,
        accelerator: "Accelerator",
        teacher: nn.Module | None = None,
        fsdp: bool = False,
        workers: int = 0,
        save_every: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if fsdp and is_single_process(accelerator):
            raise DclsConvertError(
                "--fsdp: needs several processes: accelerate launch --num_processes 2 ..."
            )
        self.data = data
        self.recipe = recipe
        self.folder = folder
        self.accelerator = accelerator
        self.teacher = teacher
        self.fsdp = fsdp
        self.workers = workers
        self.save_every = save_every
        self.settings = settings_to_match(recipe, settings or {}, accelerator.num_processes)
        self.updates_per_epoch = _updates_per_epoch(
            len(data.train), recipe.update_size(accelerator.num_processes)
        )
        self.updates_done = 0
        self.loss: list[float] = []  # for each update
        self.top1: list[float] = []  # for each epoch: percent of test images classified correctly
        self.top1_before: list[float] = []  # the same before training, if it was tested
        # For each epoch, without its test and the state that is saved after it. An epoch that is
        # resumed has only its rest.
        self.epoch_seconds: list[float] = []
        self.update_seconds: list[float] = []  # for each update of this process, without loading
        self.update_seconds_with_loading: list[float] = []  # for each update of this process
        # For each test image, whether it was classified correctly after the last epoch.
        self.correct = torch.zeros(0, dtype=torch.bool)
        # An unsharded copy on the CPU, into which `trained_model` loads the weights.
        self.unsharded_copy = copy.deepcopy(model)
        self.model = model
        self._move_and_shard_models_()
        self.optimizer = self._make_optimizer()
        # Called in the forward pass: the model itself, or DDP's wrapper around it.
        self.parallel_model: Any = model if fsdp else accelerator.prepare_model(model)
        self.scheduler = self._make_scheduler()
        self._resume_()

    def _make_optimizer(self) -> Any:
        # Without lr, the groups have an lr_scale, which timm's schedulers apply.
        groups = param_groups(
            self.model,
            weight_decay=self.recipe.weight_decay,
            position_lr_scale=self.recipe.position_lr_scale,
        )
        optimizer = torch.optim.AdamW(groups, lr=self.recipe.lr)
        return self.accelerator.prepare_optimizer(optimizer)

    def _resume_(self) -> None:
        """Load the folder's state, if there is one, and continue its record of positions."""
        if self.folder is not None and (self.folder / STATE_FILE).exists():
            load_state_(self, self.folder / STATE_FILE)
        self.tracker = PositionTracker(self.model, prepare_track_file(self))
        # If the state was saved at the end of an epoch, its positions are those of the last record.
        # If it was saved within an epoch, they have moved since, and the next record has no speed.
        if self.updates_done and self.updates_done % self.updates_per_epoch == 0:
            self.tracker.continue_from(len(self.top1))

    def trained_model(self) -> nn.Module:
        """Return the trained model, unsharded, on the CPU and in eval mode.

        It has the averaged weights if there are any. All processes must call this method, but only
        the first one gets the trained weights.
        """
        state = get_model_state_dict(self.evaluated, options=WHOLE)
        if self.accelerator.is_main_process:
            self.unsharded_copy.load_state_dict(state)
        return self.unsharded_copy.eval()

    def run(
        self,
        on_epoch: Callable[["Training"], None] = lambda _: None,
        *,
        max_updates: int | None = None,
        test_first: bool = False,
    ) -> None:
        """Train to the end of the recipe, or until `max_updates` updates are done.

        `on_epoch` is called after each epoch and its test. With `test_first`, the model is also
        tested before the first update.

        Raises:
            DclsConvertError: The loss is not finite.
            CheckpointError: The state cannot be written.
        """
        last_update = self.recipe.epochs * self.updates_per_epoch
        if max_updates is not None:
            last_update = min(last_update, max_updates)
        keys = batch_keys(
            len(self.data.train),
            self.recipe,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            start=self.updates_done,
        )
        mixup = self._make_mixup()
        criterion = self._make_criterion(mixup)
        with preserved_rng_state():
            if test_first and self.updates_done == 0:
                self.top1_before = [_percent(self.test())]
            loaded = iter(self._loader(self.data.train, keys))
            epoch_began = time.monotonic()
            while self.updates_done < last_update:
                update_began = time.monotonic()
                self.loss.append(self._train_update(loaded, mixup, criterion))
                self.update_seconds_with_loading.append(time.monotonic() - update_began)
                self._check_loss()
                epoch_ends = self.updates_done % self.updates_per_epoch == 0
                if epoch_ends:
                    self.epoch_seconds.append(time.monotonic() - epoch_began)
                    self._end_epoch()
                    on_epoch(self)
                if self.folder is not None and (epoch_ends or self._is_time_to_save()):
                    save_state(self, self.folder / STATE_FILE)
                if epoch_ends:
                    epoch_began = time.monotonic()

    @torch.no_grad()
    def test(self) -> Tensor:
        """Return for each test image whether it is classified correctly: (images,).

        With a teacher, the correct class is the teacher's. Each process computes a part of the
        result, and gets all of it.
        """
        accelerator = self.accelerator
        # BatchNorm statistics differ between processes. Test with those of the first process, which
        # a state stores.
        broadcast_buffers_(self.evaluated)
        self.evaluated.eval()
        correct = []
        for images, labels in self._loader(self.data.test, self._test_keys()):
            images = images.to(accelerator.device)
            labels = labels.to(accelerator.device)
            with accelerator.autocast():
                predicted = tensors_in(self.evaluated(images))[0].argmax(1)
                if self.teacher is None:
                    expected = labels
                else:
                    expected = self.teacher(images).argmax(1)
            correct.append(predicted == expected)
        # Process i % processes tested image i, as its image number i // processes.
        by_process: Any = gathered(torch.cat(correct)).cpu()
        in_order: Tensor = by_process.unflatten(0, (accelerator.num_processes, -1)).T.flatten()
        return in_order[: len(self.data.test)]

    def _move_and_shard_models_(self) -> None:
        """Move the models to the device, make the averaged model, and shard both under FSDP2."""
        self.model.to(self.accelerator.device)
        if not self.fsdp:  # FSDP2 accepts only contiguous parameters
            _store_channels_last_(self.model)
        if self.teacher is not None:
            self.teacher.to(self.accelerator.device).eval().requires_grad_(False)
        self.average: ModelEmaV3 | None = None
        self.evaluated: nn.Module = self.model
        if self.recipe.ema:
            self.average = ModelEmaV3(self.model, decay=self.recipe.ema, use_warmup=True)
            self.evaluated = self.average.module
        if self.fsdp:
            shard_(self.model, self.accelerator)
            if self.average is not None:
                shard_(self.average.module, self.accelerator)

    def _make_scheduler(self) -> Any:
        recipe = self.recipe
        scheduler, _ = create_scheduler_v2(
            self.optimizer.optimizer,
            recipe.sched,
            num_epochs=recipe.epochs,
            warmup_epochs=min(recipe.warmup_epochs, recipe.epochs - 1),
            warmup_lr=recipe.lr / 100,
            step_on_epochs=False,
            updates_per_epoch=self.updates_per_epoch,
        )
        return scheduler

    def _make_mixup(self) -> Mixup | None:
        recipe = self.recipe
        if not (recipe.mixup or recipe.cutmix):
            return None
        return Mixup(
            mixup_alpha=recipe.mixup,
            cutmix_alpha=recipe.cutmix,
            label_smoothing=recipe.smoothing,
            num_classes=len(self.data.classes) or 1,
        )

    def _make_criterion(self, mixup: Mixup | None) -> Criterion:
        if self.teacher is not None:
            return partial(soft_target_loss, temperature=self.recipe.temperature)
        if mixup is not None:
            return cross_entropy  # Mixup smooths the labels itself
        return partial(cross_entropy, label_smoothing=self.recipe.smoothing)

    def _check_loss(self) -> None:
        loss = self.loss[-1]
        if not math.isfinite(loss):
            raise DclsConvertError(
                f"the loss is {loss} after {self.updates_done} updates; "
                f"use a smaller learning rate than {self.recipe.lr:g}"
            )

    def _end_epoch(self) -> None:
        self.tracker.update(self.updates_done // self.updates_per_epoch)
        self.correct = self.test()
        self.top1.append(_percent(self.correct))

    def _is_time_to_save(self) -> bool:
        return self.save_every > 0 and self.updates_done % self.save_every == 0

    def _test_keys(self) -> list[list[tuple[int, int]]]:
        """Return the keys (epoch, index) of this process's test images, in batches."""
        count = len(self.data.test)
        processes = self.accelerator.num_processes
        images_per_process = math.ceil(count / processes)
        keys = []
        # FSDP2 needs the same number of forward calls in every process, so pad with the last image;
        # `test` removes the padding.
        for number in range(images_per_process):
            index = number * processes + self.accelerator.process_index
            keys.append((0, min(index, count - 1)))
        size = self.recipe.batch_size
        return [keys[first : first + size] for first in range(0, len(keys), size)]

    def _train_update(
        self, loaded: Iterator[Any], mixup: Mixup | None, criterion: Criterion
    ) -> float:
        """Update the weights once, from `accumulate` batches.

        Returns the loss, averaged over processes.
        """
        recipe = self.recipe
        accelerator = self.accelerator
        self._set_train_mode_()
        loss = torch.zeros((), device=accelerator.device)
        seconds = 0.0
        for batch_index in range(recipe.accumulate):
            images, labels = next(loaded)
            images = images.to(accelerator.device, non_blocking=True)
            labels = labels.to(accelerator.device, non_blocking=True)
            began = time.perf_counter()
            # Seed for each batch, since loading images in this process also seeds the global
            # generators.
            seed_all(
                "update", recipe.seed, self.updates_done, batch_index, accelerator.process_index
            )
            loss += self._backward(batch_index, images, labels, mixup, criterion)
            seconds += time.perf_counter() - began
        began = time.perf_counter()
        self._step()
        mean_loss = float(accelerator.reduce(loss, "mean"))  # waits for the device
        seconds += time.perf_counter() - began
        self.update_seconds.append(seconds)
        return mean_loss

    def _set_train_mode_(self) -> None:
        self.parallel_model.train()
        if self.recipe.freeze_statistics:
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def _backward(
        self,
        batch_index: int,
        images: Tensor,
        labels: Tensor,
        mixup: Mixup | None,
        criterion: Criterion,
    ) -> Tensor:
        """Accumulate the gradients of a batch, and return its share of the loss of the update.

        `batch_index` counts the batches of the update from 0.
        """
        recipe = self.recipe
        accelerator = self.accelerator
        is_last = batch_index == recipe.accumulate - 1
        if mixup is not None:
            if self.teacher is not None:  # labels are unused, and need not be class numbers
                labels = torch.zeros_like(labels)
            images, labels = mixup(images, labels)
        if images.dim() == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        # Processes exchange gradients once per update, in its last batch.
        if self.fsdp:
            self.parallel_model.set_requires_gradient_sync(is_last)
        exchange: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if not self.fsdp and not is_last:
            exchange = accelerator.no_sync(self.parallel_model)
        with exchange:
            with accelerator.autocast():
                targets = self._targets(images, labels)
                # Some models also return auxiliary outputs; the first output is the classifier's.
                outputs = tensors_in(self.parallel_model(images))[0]
                loss = criterion(outputs, targets)
                if recipe.repulsive:
                    loss = loss + recipe.repulsive * repulsive_loss(self.model) ** 2
            accelerator.backward(loss / recipe.accumulate)
        return loss.detach() / recipe.accumulate

    def _targets(self, images: Tensor, labels: Tensor) -> Tensor:
        if self.teacher is None:
            return labels
        with torch.no_grad():
            outputs: Tensor = self.teacher(images)
        return outputs

    def _step(self) -> None:
        """Step the optimizer, clamp the positions, and update the schedule and the average."""
        if self.recipe.clip_grad:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
        self.optimizer.step()
        # The layers clamp too, but under FSDP2 only their copy for one forward pass.
        clamp_positions_(self.model)
        self.optimizer.zero_grad()
        self.updates_done += 1
        self.scheduler.step_update(self.updates_done)
        if self.average is not None:
            self.average.update(self.model, step=self.updates_done)

    def _loader(self, images: Any, keys: Any) -> DataLoader[Any]:
        return DataLoader(
            SeededImages(images, self.recipe.seed),
            batch_sampler=keys,
            num_workers=self.workers,
            pin_memory=self.accelerator.device.type == "cuda",
        )


def _store_channels_last_(model: nn.Module) -> None:
    """Store the kernels of 2-D convolutions in channels-last format, as images are.

    Images of one channel are stored alike in both formats, so for them torch goes by the kernels.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)


def _percent(correct: Tensor) -> float:
    return 100 * float(correct.cpu().double().mean())


def _updates_per_epoch(images: int, update_size: int) -> int:
    updates = images // update_size
    if updates == 0:
        raise DclsConvertError(
            f"--batch-size: one update needs {update_size} images, "
            f"but there are only {images}; use a smaller batch size"
        )
    return updates


def median_after_warmup(update_seconds: Sequence[float]) -> float:
    """Return the median update time, without the warm-up updates."""
    return statistics.median(update_seconds[WARMUP_UPDATES:] or update_seconds)
