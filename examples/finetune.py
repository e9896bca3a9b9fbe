"""Fine-tune a converted checkpoint folder, or any model of timm, on your images or on scikit-learn's digits.

    python examples/finetune.py convnext_tiny-dcls17 --data flowers     # flowers/train/rose/1.jpg, flowers/validation
    python examples/finetune.py convnext_tiny-dcls17                    # digits: a first try, without any data
    python examples/finetune.py resnet18 --dilated-size 7 --pretrained  # converted first; without a size, left as it is
    python examples/finetune.py resnet18 --dilated-size 7               # from scratch: positions start at random
    python examples/finetune.py convnext_tiny-dcls17 --teacher convnext_tiny --data photographs   # without labels
    accelerate launch --num_processes 8 examples/finetune.py convnext_tiny-dcls17 [--fsdp]
    torchrun --nproc_per_node 2 examples/finetune.py convnext_tiny-dcls17    # the same without GPUs

The output folder gets `best`, which is a checkpoint folder, `history.json`, `positions.jsonl`, pictures, and
`state.pt`, with which `--resume` continues a run that was killed. All randomness follows from the seed and the place in
the run; so a resumed run ends exactly as one that was never killed, where the arithmetic of the machine is repeatable.
"""

import argparse
import contextlib
import copy
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, broadcast
except ImportError:  # --help works without it
    Accelerator = None
from finetune_data import DIGITS_SIZE, Batches, Repeatable, load_images, seed_all, set_transforms
from finetune_models import SoftTargets, build_model, build_teacher, shard_
from finetune_pictures import draw
from timm.data import Mixup
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.utils.data import DataLoader

import dcls_convert
from dcls_convert import DclsConvertError, tuning
from dcls_convert.depthwise import choices

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathered from all processes, into the first
TRACK = "positions.jsonl"
MAY_CHANGE = ("resume", "workers", "save_every")  # options of a resumed run; any other would make it another run


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="finetune.py MODEL [options]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a folder that dcls-convert wrote, or a name of timm's")
    add("--dilated-size", type=int, help="convert the model of this name first")
    add("--pretrained", action="store_true", help="start a model of timm from its trained weights")
    add("--teacher", help="learn this model's outputs, of images without labels: a name of timm's, or a folder")
    add("--teacher-checkpoint", type=Path, help="its weights; without them, those that timm knows or the folder has")
    add("--temperature", type=float, default=4.0, help="by which both models' outputs are divided before softmax")
    add("--data", help="folder of images; without it, scikit-learn's digits")
    add("--dataset", default="", help="timm's name of the data set, such as torch/cifar10; a folder of classes without")
    add("--splits", nargs=2, default=("train", "validation"), metavar=("TRAIN", "VALIDATION"))
    add("--num-classes", type=int, help="where the data set does not name its classes")
    add("--output", type=Path, help="default: runs/MODEL")
    add("--resume", action="store_true", help="continue a run that was killed")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=32, help="images in each process at once")
    add("--accumulate", type=int, default=1, help="batches of one update")
    add("--lr", type=float, default=1e-3)
    add("--position-lr-scale", type=float, default=5.0)
    add("--weight-decay", type=float, default=0.05, help="of the weights; positions have none")
    add("--sched", default="cosine", choices=["cosine", "tanh", "step", "poly", "wsd", "constant"], help="timm's")
    add("--warmup-epochs", type=int, default=1)
    add("--clip-grad", type=float, default=1.0, help="largest norm of the gradients; 0: as they are")
    add("--smoothing", type=float, default=0.1, help="of the labels")
    add("--mixup", type=float, default=0.0)
    add("--cutmix", type=float, default=0.0)
    add("--aa", help="timm's augmentation policy, such as rand-m9-mstd0.5")
    add("--reprob", type=float, default=0.0, help="share of images of which a part is erased")
    add("--freeze-statistics", action="store_true", help="BatchNorm goes by those that it has: for few images")
    add("--drop-path", type=float, default=0.0)
    add("--ema", type=float, default=0.99, help="decay of the averaged weights, which are evaluated; 0: no average")
    add("--repulsive", type=float, default=0.0, help="weight of the repulsive loss, which keeps elements apart")
    add("--mixed-precision", choices=["no", "bf16", "fp16"], help="default: what accelerate launch says")
    add("--fsdp", action="store_true", help="shard the model over the processes (FSDP2)")
    add("--img-size", type=int, help=f"default: the model's; {DIGITS_SIZE} for digits")
    add("--workers", type=int, default=0, help="processes that load images, beside each that trains")
    add("--save-every", type=int, help="updates between two states; an epoch if not given")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in ("epochs", "batch_size", "accumulate", "dilated_size", "num_classes", "img_size", "save_every"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if args.ema < 0 or args.ema >= 1 or args.smoothing < 0 or args.smoothing >= 1:
        parser.error("--ema and --smoothing must be at least 0 and below 1")
    if args.temperature <= 0:
        parser.error(f"--temperature must be above 0, not {args.temperature:g}")
    if args.teacher_checkpoint and not args.teacher:
        parser.error("--teacher-checkpoint needs --teacher, which names the model")
    if args.teacher and args.num_classes:
        parser.error("--num-classes: with --teacher, the model keeps the classes that it has")
    if (args.mixup or args.cutmix) and args.batch_size % 2:
        parser.error("--mixup and --cutmix need an even --batch-size")
    args.output = args.output or Path("runs") / Path(args.model).name
    return args


# The run: everything that a state holds.


@dataclass
class Run:
    args: argparse.Namespace
    accelerator: Accelerator
    plan: Any  # None: a model without DCLS layers
    template: nn.Module  # whole and on the CPU, for checkpoints
    plain: nn.Module  # without DDP around it
    model: nn.Module
    average: ModelEmaV3 | None
    teacher: nn.Module | None
    optimizer: Any
    scheduler: Any = None
    tracker: Any = None
    update: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)  # "loss" by update, `measure` by epoch

    @property
    def evaluated(self) -> nn.Module:
        return self.average.module if self.average else self.plain

    @property
    def measure(self) -> str:
        """What is to be high on the images that are held out, in percent."""
        return "agreement" if self.teacher else "accuracy"

    @torch.no_grad()
    def targets(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What the model should give: the labels (N,), or the teacher's outputs (N, classes)."""
        return self.teacher(images) if self.teacher else labels


def start_run(args: argparse.Namespace, accelerator: Accelerator, classes: int | None) -> Run:
    plain, plan = build_model(args, classes)
    teacher = build_teacher(args, plain)
    template = copy.deepcopy(plain)
    plain.to(accelerator.device)
    if teacher:
        teacher.to(accelerator.device)
    average = ModelEmaV3(plain, decay=args.ema, use_warmup=True) if args.ema else None
    model = plain
    if args.fsdp:
        for module in [plain, *([average.module] if average else [])]:
            shard_(module, accelerator)
    # Without lr, the groups state a scale of the learning rate, which timm's schedulers apply.
    groups = tuning.param_groups(plain, weight_decay=args.weight_decay, position_lr_scale=args.position_lr_scale)
    optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(groups, lr=args.lr))
    if not args.fsdp:
        model = accelerator.prepare_model(plain)
    run = Run(args, accelerator, plan, template, plain, model, average, teacher, optimizer)
    run.history = {"loss": [], run.measure: []}
    return run


def settings(run: Run) -> dict[str, str]:
    stated = {name: str(value) for name, value in vars(run.args).items() if name not in MAY_CHANGE}
    return stated | {"num_processes": str(run.accelerator.num_processes)}


def save_state(run: Run) -> None:
    """All at once or not at all, whenever the run is killed."""
    model, optimizer = get_state_dict(run.plain, run.optimizer.optimizer, options=WHOLE)
    state = {
        "settings": settings(run),
        "model": model,
        "optimizer": optimizer,
        "average": get_model_state_dict(run.average.module, options=WHOLE) if run.average else None,
        "scheduler": run.scheduler.state_dict(),
        "scaler": run.accelerator.scaler.state_dict() if run.accelerator.scaler else None,
        "update": run.update,
        "history": run.history,
    }
    if run.accelerator.is_main_process:
        path = run.args.output / "state.pt"
        with open(path.with_suffix(".partial"), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".partial"), path)


def load_state_(run: Run, path: Path) -> None:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DclsConvertError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    for name, value in settings(run).items():
        if state["settings"].get(name) != value:
            found = state["settings"].get(name)
            raise DclsConvertError(f"--resume: {path} was written with {name} {found}, not {value}")
    set_state_dict(
        run.plain,
        run.optimizer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=WHOLE,
    )
    if run.average:
        set_model_state_dict(run.average.module, state["average"], options=WHOLE)
    run.scheduler.load_state_dict(state["scheduler"])
    if run.accelerator.scaler:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    run.update, run.history = state["update"], state["history"]


# Training.


def train_update(run: Run, batches: Iterator[Any], mixup: Any, criterion: nn.Module) -> float:
    """One update of the weights, from `accumulate` batches; its loss, over all processes."""
    args, accelerator = run.args, run.accelerator
    run.model.train()
    if args.freeze_statistics:
        for norm in run.plain.modules():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                norm.eval()
    total = torch.zeros((), device=accelerator.device)
    for batch in range(args.accumulate):
        last = batch == args.accumulate - 1
        images, labels = (part.to(accelerator.device, non_blocking=True) for part in next(batches))
        seed_all("update", args.seed, run.update, batch, accelerator.process_index)  # after loading, which seeds too
        if mixup:
            images, labels = mixup(images, labels * 0 if run.teacher else labels)
        images = images.contiguous(memory_format=torch.channels_last)
        if args.fsdp:
            run.model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last or args.fsdp else accelerator.no_sync(run.model):
            with accelerator.autocast():
                loss = criterion(run.model(images), run.targets(images, labels))
                if args.repulsive:
                    loss = loss + args.repulsive * tuning.repulsive_loss(run.plain) ** 2
            accelerator.backward(loss / args.accumulate)
        total += loss.detach() / args.accumulate
    if args.clip_grad:
        accelerator.clip_grad_norm_(run.plain.parameters(), args.clip_grad)
    run.optimizer.step()
    tuning.clamp_positions_(run.plain)  # the layers do it too, but in FSDP2 only to their copy for one pass
    run.optimizer.zero_grad()
    run.update += 1
    run.scheduler.step_update(run.update)
    if run.average:
        run.average.update(run.plain, step=run.update)
    return float(accelerator.reduce(total, "mean"))


@torch.no_grad()
def evaluate(run: Run, images: Any) -> float:
    """The share of images in percent for which the (averaged) model's top class is the label, or the teacher's.

    Each process looks at its part.
    """
    accelerator, model, size = run.accelerator, run.evaluated, run.args.batch_size
    for buffer in model.buffers():  # batch statistics are each process's own: the first one's count, as in the state
        broadcast(buffer)
    model.eval()
    count = len(images)
    wanted = list(range(accelerator.process_index, count, accelerator.num_processes))
    # In FSDP2 all processes must call the model equally often: the rest is filled up with images that do not count.
    wanted += [-1] * (-(-count // accelerator.num_processes) - len(wanted))
    keys = [[(0, max(index, 0)) for index in wanted[first : first + size]] for first in range(0, len(wanted), size)]
    right = torch.zeros((), device=accelerator.device)
    first, repeatable = 0, Repeatable(images, run.args.seed)
    for pixels, labels in DataLoader(repeatable, batch_sampler=keys, num_workers=run.args.workers):
        pixels, labels = pixels.to(accelerator.device), labels.to(accelerator.device)
        with accelerator.autocast():
            found, targets = model(pixels).argmax(1), run.targets(pixels, labels)
        counts = torch.tensor(wanted[first : first + len(labels)], device=found.device) >= 0
        right += ((found == (targets.argmax(1) if run.teacher else targets)) & counts).sum()
        first += len(labels)
    return 100 * float(accelerator.reduce(right, "sum")) / count


def save_best(run: Run) -> None:
    """The evaluated weights as a checkpoint folder; of a model without DCLS layers, in timm's format."""
    state = get_model_state_dict(run.evaluated, options=WHOLE)
    if run.accelerator.is_main_process:
        run.template.load_state_dict(state)
        if run.plan is None:
            timm.models.save_for_hf(run.template, run.args.output / "best", safe_serialization=True)
        else:
            dcls_convert.save_converted(run.template.eval(), run.plan, run.args.output / "best", force=True)


def train(run: Run, train_images: Any, valid_images: Any, classes: int | None) -> None:
    args, accelerator, history, measured = run.args, run.accelerator, run.history, run.history[run.measure]
    plan = Batches(len(train_images), args, accelerator.process_index, accelerator.num_processes, run.update)
    loader = DataLoader(
        Repeatable(train_images, args.seed),
        batch_sampler=plan,
        num_workers=args.workers,
        pin_memory=accelerator.device.type == "cuda",
    )
    mixing = args.mixup or args.cutmix
    mixup = Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=classes or 1) if mixing else None
    labelled = nn.CrossEntropyLoss(label_smoothing=0.0 if mixing else args.smoothing)
    criterion = SoftTargets(args.temperature) if run.teacher else labelled
    if run.teacher and not run.update:
        accelerator.print(f"before: agreement {evaluate(run, valid_images):.2f} %", flush=True)
    batches, begun = iter(loader), time.monotonic()
    while run.update < args.epochs * plan.updates_per_epoch:
        history["loss"].append(train_update(run, batches, mixup, criterion))
        epoch, done = divmod(run.update, plan.updates_per_epoch)
        if accelerator.is_main_process and sys.stderr.isatty():
            bar = "#" * (30 * (done or plan.updates_per_epoch) // plan.updates_per_epoch)
            print(f"\r[{bar:30}] {run.update} updates, loss {history['loss'][-1]:.4f}", end=" ", file=sys.stderr)
        if done == 0:
            run.tracker.update(epoch)
            measured.append(evaluate(run, valid_images))
            loss = float(np.mean(history["loss"][-plan.updates_per_epoch :]))
            accelerator.print(
                f"epoch {epoch:3d}/{args.epochs}: loss {loss:.4f}, {run.measure} {measured[-1]:.2f} %, "
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
            begun = time.monotonic()
            if measured[-1] >= max(measured):  # of equal ones, the one that has learnt longest
                save_best(run)
        if done == 0 or (args.save_every and run.update % args.save_every == 0):
            save_state(run)


def prepare(args: argparse.Namespace, accelerator: Accelerator) -> tuple[Run, Any, Any, int | None]:
    """Everything that can be refused, before the first update."""
    if accelerator.distributed_type == DistributedType.FSDP:
        raise DclsConvertError("--use_fsdp of accelerate launch: give --fsdp to this script instead")
    if args.fsdp and accelerator.distributed_type == DistributedType.NO:
        raise DclsConvertError("--fsdp: needs several processes: accelerate launch --num_processes 2 ...")
    state = args.output / "state.pt"
    if state.exists() and not args.resume:
        raise DclsConvertError(f"{args.output}: holds a run already; --resume continues it, --output names another")
    train_images, valid_images, classes = load_images(args)
    run = start_run(args, accelerator, classes)
    set_transforms(train_images, valid_images, run.plain, args)
    per_epoch = Batches(len(train_images), args, 0, accelerator.num_processes).updates_per_epoch
    if not per_epoch:
        raise DclsConvertError(
            f"--batch-size {args.batch_size}: one update takes more than all {len(train_images)} images"
        )
    run.scheduler, _ = create_scheduler_v2(
        run.optimizer.optimizer,
        args.sched,
        num_epochs=args.epochs,
        warmup_epochs=min(args.warmup_epochs, args.epochs - 1),
        warmup_lr=args.lr / 100,
        step_on_epochs=False,
        updates_per_epoch=per_epoch,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    if accelerator.is_main_process:
        for leftover in args.output.glob(".best.*"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)
    if state.exists():
        load_state_(run, state)
    track = args.output / TRACK
    if accelerator.is_main_process and track.exists():  # a line an epoch: a resumed run writes the later ones again
        track.write_bytes(b"".join(track.read_bytes().splitlines(keepends=True)[: len(run.history[run.measure])]))
    run.tracker = tuning.PositionTracker(run.plain, track)
    return run, train_images, valid_images, classes


def main() -> None:
    args = parse_arguments()
    if Accelerator is None:
        sys.exit("error: accelerate is not installed: pip install 'dcls-convert[train]'")
    accelerator = Accelerator(mixed_precision=args.mixed_precision, cpu=not torch.accelerator.is_available())
    try:
        run, train_images, valid_images, classes = prepare(args, accelerator)
    except DclsConvertError as error:
        if accelerator.is_main_process:
            print(f"error: {error}", file=sys.stderr)
        accelerator.end_training()
        sys.exit(error.exit_code)
    train(run, train_images, valid_images, classes)
    state = get_model_state_dict(run.evaluated, options=WHOLE)
    if accelerator.is_main_process:
        run.template.load_state_dict(state)
        (args.output / "history.json").write_text(json.dumps(run.history) + "\n")
        draw(args.output, run.history, tuning.read_track(args.output / TRACK), run.template)
        for choice in choices():  # on GPUs
            print(choice)
        print(f"best {run.measure} {max(run.history[run.measure]):.2f} %: {args.output / 'best'}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
