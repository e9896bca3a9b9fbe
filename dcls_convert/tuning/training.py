"""One training loop for all: timm's scheduler, averaged weights, mixed precision; accelerate's DDP,
and FSDP2.

All randomness follows from the seed and the place in the run; so a run that was killed and goes on
ends exactly as one that was never killed, where the arithmetic of the machine is repeatable.
"""

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader

from ..errors import CheckpointError, DclsConvertError, one_line
from ..networks.outputs import tensors_in
from ..networks.positions import clamp_positions_
from ..output import new_file
from .images import ImageData, Repeatable, batches, generators_kept, seed_all
from .param_groups import param_groups
from .recipe import Recipe
from .repulsion import repulsive_loss
from .tracker import TRACK, PositionTracker

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, broadcast, gather, patch_environment
except ImportError as error:
    raise DclsConvertError("training needs accelerate: pip install accelerate scipy") from error

WHOLE = StateDictOptions(
    full_state_dict=True, cpu_offload=True
)  # gathered from all processes, into the first
STATE = "state.pt"
Criterion = Callable[[Tensor, Tensor], Tensor]


def accelerator_for(
    *, device: str | None = None, mixed_precision: str | None = None
) -> Accelerator:
    """accelerate's, for a device as torch names it, or for the best there is. DclsConvertError: one
    of FSDP1."""
    wish = {} if device in (None, "cpu") else {"ACCELERATE_TORCH_DEVICE": str(device)}
    with patch_environment(**wish):  # which accelerate reads as it starts
        cpu = device == "cpu" or not torch.accelerator.is_available()
        accelerator = Accelerator(mixed_precision=mixed_precision, cpu=cpu)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise DclsConvertError(
            "accelerate launch with --use_fsdp is FSDP1; leave it, and give --fsdp to this program"
        )
    return accelerator


class Training:
    """A network in training.

        training = Training(model, data, Recipe(epochs=30), "runs/one")
        training.run(lambda training: print(training.top1[-1]))

    Args:
        model: On the CPU, with values; it is trained in place. With or without DCLS layers.
        data: Images whose transforms are set.
        recipe: States everything that the result depends on.
        folder: Gets `state.pt` after each epoch, and `positions.jsonl`, as `PositionTracker` writes
            it. A state that is there already is gone on from. None: nothing is written.
        accelerator: As from `accelerator_for`.
        teacher: Its outputs, instead of labels, are what the model learns to give (Hinton et al.,
            arXiv:1503.02531).
        fsdp: Shard the model over the processes (FSDP2).
        workers: Processes that load images.
        save_every: Updates after which the state is written too; 0: only after epochs.
        settings: What else makes a run another one, for what is stored.

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
        accelerator: Accelerator,
        teacher: nn.Module | None = None,
        fsdp: bool = False,
        workers: int = 0,
        save_every: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe, self.data, self.folder, self.accelerator = recipe, data, folder, accelerator
        self.teacher, self.fsdp, self.workers, self.save_every = teacher, fsdp, workers, save_every
        if fsdp and accelerator.distributed_type == DistributedType.NO:
            raise DclsConvertError(
                "--fsdp: needs several processes: accelerate launch --num_processes 2 ..."
            )
        images, processes = len(data.train), accelerator.num_processes
        self.updates_per_epoch = images // (size := recipe.update_size(processes))
        if not self.updates_per_epoch:
            raise DclsConvertError(
                f"--batch-size: an update takes {size} images, more than all {images}; take fewer"
            )
        self.settings = {
            name: str(value) for name, value in (asdict(recipe) | dict(settings or {})).items()
        }
        self.settings["num_processes"] = str(processes)
        self.update = 0  # so many are done
        self.loss: list[float] = []  # of each update
        self.top1: list[
            float
        ] = []  # of each epoch; percent of the images to test that get their label's class
        self.seconds: list[float] = []  # of each epoch, without the test
        self.steps: list[float] = []  # seconds of each update of this process, without loading
        self.updates: list[float] = []  # and with it
        self.correct = torch.zeros(
            0, dtype=torch.bool
        )  # of each image to test, after the last epoch
        self.template, self.plain = (
            copy.deepcopy(model),
            model,
        )  # the first: whole and on the CPU, for checkpoints
        model.to(accelerator.device)
        if teacher is not None:
            teacher.to(accelerator.device).eval().requires_grad_(False)
        self.average = ModelEmaV3(model, decay=recipe.ema, use_warmup=True) if recipe.ema else None
        self.evaluated: nn.Module = self.average.module if self.average else model
        for module in [model, *([self.average.module] if self.average else [])] if fsdp else []:
            shard_(module, accelerator)
        # Without lr, the groups state a scale of the learning rate, which timm's schedulers apply.
        scale, decay = recipe.position_lr_scale, recipe.weight_decay
        groups = param_groups(model, weight_decay=decay, position_lr_scale=scale)
        self.optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(groups, lr=recipe.lr))
        self.model: Any = model if fsdp else accelerator.prepare_model(model)
        self.scheduler, _ = create_scheduler_v2(
            self.optimizer.optimizer,
            recipe.sched,
            num_epochs=recipe.epochs,
            warmup_epochs=min(recipe.warmup_epochs, recipe.epochs - 1),
            warmup_lr=recipe.lr / 100,
            step_on_epochs=False,
            updates_per_epoch=self.updates_per_epoch,
        )
        if folder is not None and (folder / STATE).exists():
            self._load_state_(folder / STATE)
        self.tracker = PositionTracker(self.plain, self._track())

    def trained(self) -> nn.Module:
        """The evaluated model, whole and on the CPU, in eval mode, in the first process; all
        processes must call it."""
        state = get_model_state_dict(self.evaluated, options=WHOLE)
        if self.accelerator.is_main_process:
            self.template.load_state_dict(state)
        return self.template.eval()

    def run(
        self,
        on_epoch: Callable[["Training"], None] = lambda _: None,
        *,
        most_updates: int | None = None,
    ) -> None:
        """Train to the end of the recipe, or of so many updates; `on_epoch` is called after each
        epoch's test.

        Raises:
            DclsConvertError: The loss is not finite.
            CheckpointError: The state cannot be written.
        """
        recipe = self.recipe
        per_epoch, last = self.updates_per_epoch, recipe.epochs * self.updates_per_epoch
        last = last if most_updates is None else min(last, most_updates)
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        keys = batches(len(self.data.train), recipe, rank, processes, self.update)
        mixing = {
            "mixup_alpha": recipe.mixup,
            "cutmix_alpha": recipe.cutmix,
            "label_smoothing": recipe.smoothing,
        }
        mixed = bool(recipe.mixup or recipe.cutmix)
        mixup = Mixup(**mixing, num_classes=len(self.data.classes) or 1) if mixed else None
        criterion: Criterion = partial(
            cross_entropy, label_smoothing=0.0 if mixup else recipe.smoothing
        )
        if self.teacher is not None:
            criterion = partial(soft_target_loss, temperature=recipe.temperature)
        with generators_kept():
            loaded, begun = iter(self._loader(self.data.train, keys)), time.monotonic()
            while self.update < last:
                started = time.monotonic()
                self.loss.append(self._update(loaded, mixup, criterion))
                self.updates.append(time.monotonic() - started)
                if not math.isfinite(self.loss[-1]):
                    problem = f"the loss is {self.loss[-1]} after {self.update} updates"
                    raise DclsConvertError(
                        f"{problem}; take a smaller learning rate than {recipe.lr:g}"
                    )
                epoch, done = divmod(self.update, per_epoch)
                if done == 0:
                    self.seconds.append(time.monotonic() - begun)
                    self.tracker.update(epoch)
                    self.correct = self.test()
                    self.top1.append(100 * float(self.correct.double().mean()))
                    on_epoch(self)
                    begun = time.monotonic()
                if self.folder is not None and (
                    done == 0 or (self.save_every and self.update % self.save_every == 0)
                ):
                    self._save_state(self.folder / STATE)

    @torch.no_grad()
    def test(self) -> Tensor:
        """For each image to test, whether its top class is the label's, or the teacher's; each
        process sees a part."""
        accelerator, model, size = self.accelerator, self.evaluated, self.recipe.batch_size
        for buffer in (
            model.buffers()
        ):  # batch statistics are each process's own: the first one's count, as in states
            broadcast(buffer)
        model.eval()
        count = len(self.data.test)
        wanted = list(range(accelerator.process_index, count, accelerator.num_processes))
        # In FSDP2 all processes must call the model equally often: the rest is filled up.
        wanted += wanted[:1] * (-(-count // accelerator.num_processes) - len(wanted))
        keys = [
            [(0, index) for index in wanted[first : first + size]]
            for first in range(0, len(wanted), size)
        ]
        right = []
        for images, labels in self._loader(self.data.test, keys):
            images, labels = images.to(accelerator.device), labels.to(accelerator.device)
            with accelerator.autocast():
                found = tensors_in(model(images))[0].argmax(1)
                targets = labels if self.teacher is None else self.teacher(images).argmax(1)
            right.append(found == targets)
        gathered: Any = gather(torch.cat(right))
        together: Tensor = gathered.cpu().unflatten(0, (accelerator.num_processes, -1)).T.flatten()
        return together[:count]

    def _update(self, loaded: Iterator[Any], mixup: Any, criterion: Criterion) -> float:
        """One update of the weights, from `accumulate` batches; its loss, over all processes."""
        recipe, accelerator = self.recipe, self.accelerator
        self.model.train()
        for norm in self.plain.modules() if recipe.freeze_statistics else ():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                norm.eval()
        total, seconds = torch.zeros((), device=accelerator.device), 0.0
        for batch in range(recipe.accumulate):
            last = batch == recipe.accumulate - 1
            images, labels = (
                part.to(accelerator.device, non_blocking=True) for part in next(loaded)
            )
            begun = time.perf_counter()
            seed_all(
                "update", recipe.seed, self.update, batch, accelerator.process_index
            )  # loading seeds, too
            if mixup:
                images, labels = mixup(images, labels if self.teacher is None else labels * 0)
            if images.dim() == 4:
                images = images.contiguous(memory_format=torch.channels_last)
            if self.fsdp:
                self.model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last or self.fsdp else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    with torch.no_grad():
                        targets = labels if self.teacher is None else self.teacher(images)
                    outputs = tensors_in(self.model(images))[
                        0
                    ]  # some models give auxiliary ones as well
                    loss = criterion(outputs, targets)
                    if recipe.repulsive:
                        loss = loss + recipe.repulsive * repulsive_loss(self.plain) ** 2
                accelerator.backward(loss / recipe.accumulate)
            total += loss.detach() / recipe.accumulate
            seconds += time.perf_counter() - begun
        begun = time.perf_counter()
        if recipe.clip_grad:
            accelerator.clip_grad_norm_(self.plain.parameters(), recipe.clip_grad)
        self.optimizer.step()
        clamp_positions_(
            self.plain
        )  # the layers do it too, but in FSDP2 only to their copy for one pass
        self.optimizer.zero_grad()
        self.update += 1
        self.scheduler.step_update(self.update)
        if self.average:
            self.average.update(self.plain, step=self.update)
        mean = float(accelerator.reduce(total, "mean"))  # which waits for the device
        self.steps.append(seconds + time.perf_counter() - begun)
        return mean

    def _loader(self, images: Any, keys: Any) -> DataLoader[Any]:
        pinned = self.accelerator.device.type == "cuda"
        repeatable = Repeatable(images, self.recipe.seed)
        return DataLoader(
            repeatable, batch_sampler=keys, num_workers=self.workers, pin_memory=pinned
        )

    def _track(self) -> Path | None:
        """The file of positions, with a line for each epoch that is done; a run that goes on writes
        the others."""
        if self.folder is None:
            return None
        track = self.folder / TRACK
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = track.read_bytes().splitlines(keepends=True) if track.exists() else []
            track.write_bytes(b"".join(lines[: len(self.top1)]))
        return track

    def _save_state(self, path: Path) -> None:
        """All at once or not at all, whenever the run is killed."""
        model, optimizer = get_state_dict(self.plain, self.optimizer.optimizer, options=WHOLE)
        scaler = self.accelerator.scaler
        state = {
            "settings": self.settings,
            "model": model,
            "optimizer": optimizer,
            "average": get_model_state_dict(self.average.module, options=WHOLE)
            if self.average
            else None,
            "scheduler": self.scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
            "update": self.update,
            "correct": self.correct,
            "curves": {name: getattr(self, name) for name in ("loss", "top1", "seconds", "steps")},
        }
        if self.accelerator.is_main_process:
            try:
                with new_file(path, force=True) as partial, partial.open("wb") as file:
                    torch.save(state, file)
            except RuntimeError as error:  # torch's own, of a full disk
                raise CheckpointError(
                    f"output {path} cannot be written: {one_line(error)}"
                ) from error

    def _load_state_(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path}: cannot be read: {one_line(error)[:200]}") from error
        for name, value in self.settings.items():
            if state["settings"].get(name) != value:
                found = state["settings"].get(name)
                raise CheckpointError(f"{path}: was written with {name} {found}, not {value}")
        optimizer = self.optimizer.optimizer
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.plain, optimizer, **parts, options=WHOLE)
        if self.average:
            set_model_state_dict(self.average.module, state["average"], options=WHOLE)
        self.scheduler.load_state_dict(state["scheduler"])
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.update, self.correct = state["update"], state["correct"]
        for name, values in state["curves"].items():
            setattr(self, name, values)


def usual(seconds: Sequence[float]) -> float:
    """Median of what updates took; the first ones warm up."""
    return statistics.median(seconds[2:] or seconds)


def soft_target_loss(outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Mean KL divergence in nats of a student's from a teacher's softmax, both at a temperature;
    outputs (N, classes).

    The square of the temperature keeps the size of the gradients. At a high one, this is the
    distance of the centred outputs. Hinton et al., arXiv:1503.02531, section 2.
    """
    student, teacher = (
        (logits.float() / temperature).log_softmax(1) for logits in (outputs, targets)
    )
    return kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def shard_(model: nn.Module, accelerator: Accelerator) -> None:
    """FSDP2: every block a group, the innermost first. Shared positions are in the group of a
    module around them."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    lists = [
        module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList)
    ]
    blocks = {
        id(block) for blocks in lists for block in blocks if any(True for _ in block.children())
    }
    for module in reversed(list(model.modules())):
        if id(module) in blocks and not isinstance(module, nn.Sequential | nn.ModuleList):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
