"""The training loop of `compare` and of the example.

It uses timm's scheduler, averaged weights (EMA), mixed precision, accelerate's DDP, and FSDP2.

All random numbers follow from the seed and the place in the run. A run that was killed and resumed
therefore ends with the same weights as one that was never killed, if the machine's arithmetic is
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
from .clamping import clamp_positions_
from .distillation import soft_target_loss
from .distributed import broadcast_buffers, gathered, is_single_process, shard_
from .images import ImageData
from .param_groups import param_groups
from .recipe import Recipe
from .repulsion import repulsive_loss
from .seeding import SeededImages, batch_keys, preserved_rng_state, seed_all
from .tracker import PositionTracker
from .training_state import (
    STATE,
    WHOLE,
    load_state_,
    prepare_track_file,
    save_state,
    settings_to_match,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

WARMUP_UPDATES = 2  # whose times are left out of the median
Criterion = Callable[[Tensor, Tensor], Tensor]


class Training:
    """A network in training.

        training = Training(
            model, data, Recipe(epochs=30), Path("runs/one"), accelerator=accelerator_for()
        )
        training.run(lambda training: print(training.top1[-1]))

    Args:
        model: On the CPU, with values; it is trained in place. With or without DCLS layers.
        data: Images whose transforms are set.
        recipe: States everything that the result depends on.
        folder: Gets `state.pt` after each epoch, and `positions.jsonl`, as `PositionTracker` writes
            it. If a state is there already, training continues from it. None: nothing is written.
        accelerator: As from `accelerator_for`.
        teacher: The model learns its outputs instead of labels (Hinton et al., arXiv:1503.02531).
        fsdp: Shard the model over the processes (FSDP2).
        workers: Processes that load images.
        save_every: Updates after which the state is written too; 0: only after epochs.
        settings: Further values that must match when a stored state is resumed.

    Raises:
        DclsConvertError: Fewer images than one update takes; fsdp in one process.
        CheckpointError: The state in the folder cannot be read, or is of a run with other settings.
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
        self.top1: list[float] = []  # for each epoch: percent of the test images classified right
        self.top1_before: list[float] = []  # percent before training, if that was asked for
        self.epoch_seconds: list[float] = []  # for each epoch, without the test and without saving
        self.update_seconds: list[float] = []  # for each update of this process, without loading
        self.update_seconds_with_loading: list[float] = []  # for each update of this process
        # For each test image, whether it was classified right after the last epoch.
        self.correct = torch.zeros(0, dtype=torch.bool)
        # An unsharded copy on the CPU, into which `trained_model` loads the weights.
        self.whole_copy = copy.deepcopy(model)
        self.model = model
        self._move_and_shard_models_()
        # Without lr, the groups state a scale of the learning rate, which timm's schedulers apply.
        groups = param_groups(
            model,
            weight_decay=recipe.weight_decay,
            position_lr_scale=recipe.position_lr_scale,
        )
        self.optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(groups, lr=recipe.lr))
        # What a forward pass calls: the model itself, or DDP's wrapper around it.
        self.parallel_model: Any = model if fsdp else accelerator.prepare_model(model)
        self.scheduler = self._make_scheduler()
        if folder is not None and (folder / STATE).exists():
            load_state_(self, folder / STATE)
        self.tracker = PositionTracker(model, prepare_track_file(self))
        # At the end of an epoch, the loaded positions are those of the last record. Within an epoch
        # they have moved since, and the next record states no speed.
        if self.updates_done and self.updates_done % self.updates_per_epoch == 0:
            self.tracker.continue_from(len(self.top1))

    def trained_model(self) -> nn.Module:
        """The trained model, in eval mode, whole and on the CPU; of the averaged weights if any.

        It has the weights in the first process only, but all processes must call this method.
        """
        state = get_model_state_dict(self.evaluated, options=WHOLE)
        if self.accelerator.is_main_process:
            self.whole_copy.load_state_dict(state)
        return self.whole_copy.eval()

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
                    save_state(self, self.folder / STATE)
                if epoch_ends:
                    epoch_began = time.monotonic()

    @torch.no_grad()
    def test(self) -> Tensor:
        """For each test image, whether the top class is the label's, or the teacher's: (images,).

        Each process computes a part of it, and gets the whole.
        """
        accelerator = self.accelerator
        # BatchNorm statistics differ between processes. The first one's are tested, since they are
        # those that a state stores.
        broadcast_buffers(self.evaluated)
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
        # Image i was tested by process i mod processes, as its image number i // processes.
        by_process: Any = gathered(torch.cat(correct)).cpu()
        in_order: Tensor = by_process.unflatten(0, (accelerator.num_processes, -1)).T.flatten()
        return in_order[: len(self.data.test)]

    def _move_and_shard_models_(self) -> None:
        """Move the models to the device, make the averaged one, and shard both under FSDP2."""
        self.model.to(self.accelerator.device)
        if not self.fsdp:  # which takes contiguous parameters only
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
                f"take a smaller learning rate than {self.recipe.lr:g}"
            )

    def _end_epoch(self) -> None:
        self.tracker.update(self.updates_done // self.updates_per_epoch)
        self.correct = self.test()
        self.top1.append(_percent(self.correct))

    def _is_time_to_save(self) -> bool:
        return self.save_every > 0 and self.updates_done % self.save_every == 0

    def _test_keys(self) -> list[list[tuple[int, int]]]:
        """The keys (epoch, index) of this process's test images, batch by batch."""
        count = len(self.data.test)
        processes = self.accelerator.num_processes
        images_per_process = math.ceil(count / processes)
        keys = []
        # FSDP2 needs the same number of forward calls in every process, so pad with the last image.
        # `test` cuts the padding off.
        for number in range(images_per_process):
            index = number * processes + self.accelerator.process_index
            keys.append((0, min(index, count - 1)))
        size = self.recipe.batch_size
        return [keys[first : first + size] for first in range(0, len(keys), size)]

    def _train_update(
        self, loaded: Iterator[Any], mixup: Mixup | None, criterion: Criterion
    ) -> float:
        """Update the weights once, from `accumulate` batches; the loss, averaged over processes."""
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
            # Seeded here, since loading in this process seeds the global generators too.
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
        """Add a batch's gradients to those of the update; the batch's share of the update's loss.

        `batch_index` counts the batches of the update from 0.
        """
        recipe = self.recipe
        accelerator = self.accelerator
        is_last = batch_index == recipe.accumulate - 1
        if mixup is not None:
            if self.teacher is not None:  # labels are not used, and may not be class numbers
                labels = torch.zeros_like(labels)
            images, labels = mixup(images, labels)
        if images.dim() == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        # Processes exchange gradients once in an update, with its last batch.
        if self.fsdp:
            self.parallel_model.set_requires_gradient_sync(is_last)
        exchange: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if not self.fsdp and not is_last:
            exchange = accelerator.no_sync(self.parallel_model)
        with exchange:
            with accelerator.autocast():
                targets = self._targets(images, labels)
                # Some models return auxiliary outputs as well; the first is the classifier's.
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
        """Change the weights by the gradients of the update, and everything that follows them."""
        if self.recipe.clip_grad:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
        self.optimizer.step()
        # The layers clamp too, but under FSDP2 only their copy for one pass.
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
    """Store the kernels of 2-D convolutions with their channels last, as images are.

    The kernels decide for images of one channel, which are stored alike both ways.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)


def _percent(correct: Tensor) -> float:
    return 100 * float(correct.double().mean())


def _updates_per_epoch(images: int, update_size: int) -> int:
    updates = images // update_size
    if updates == 0:
        raise DclsConvertError(
            f"--batch-size: an update takes {update_size} images, "
            f"more than all {images}; take fewer"
        )
    return updates


def median_after_warmup(update_seconds: Sequence[float]) -> float:
    """Median time of an update, without the first ones, which warm up."""
    return statistics.median(update_seconds[WARMUP_UPDATES:] or update_seconds)
