"""Train a converted checkpoint folder, or any model of timm, on images of your own.

    # Your images: flowers/train/rose/1.jpg, flowers/val/rose/2.jpg, ... or flowers/rose/1.jpg, ...
    python examples/finetune.py convnext_tiny-dcls17 --data flowers
    # A first try without images, on scikit-learn's digits
    python examples/finetune.py convnext_tiny-dcls17
    # Convert a trained model first (without --dilated-size, train it as it is)
    python examples/finetune.py resnet18 --dilated-size 7 --pretrained --data flowers
    # Without labels: learn the outputs of a teacher
    python examples/finetune.py convnext_tiny-dcls17 --teacher convnext_tiny --data photographs
    # In several processes; --fsdp shards the model
    accelerate launch --num_processes 8 examples/finetune.py convnext_tiny-dcls17 --data flowers
    torchrun --nproc_per_node 2 examples/finetune.py convnext_tiny-dcls17 --fsdp

The output folder gets `best`, which timm loads as "local-dir:FOLDER/best"; `history.json`;
`positions.jsonl` (for `dcls-convert inspect FOLDER/best --history`); and `state.pt`. If a run was
killed, start it again with the same command: it continues after its last full epoch.

This file is meant to be copied and changed. compare.py, beside it, trains with it.
"""

import argparse
import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast, set_seed
from PIL import Image
from timm.data import Mixup, create_transform, get_img_extensions, resolve_data_config
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, ParseKwargs
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
from torch.utils.data import DataLoader, Dataset

import dcls_convert
from dcls_convert import DclsConvertError, tuning

HELD_OUT_EVERY = 5  # one of so many images of a class is a test image if there is no val folder
DIGITS_SIZE = (3, 32, 32)  # channels, rows, columns to which the 8 x 8 digits are scaled
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathered from all processes
AUGMENTATIONS: dict[str, dict[str, Any]] = {  # arguments of timm's create_transform
    "none": {"no_aug": True},
    "light": {"scale": (0.35, 1.0)},
    "strong": {"auto_augment": "rand-m9-mstd0.5-mmax9-inc1", "re_prob": 0.25},
}
Sample = tuple[Path | Image.Image, int]  # an image, or its file, and the number of its class


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training, which compare.py has too."""
    add = parser.add_argument
    add("--data", type=Path, help="folder of images; without it, scikit-learn's digits")
    add("--input-size", help="CHANNELSxROWSxCOLUMNS; default: the model's")
    add("--augmentation", default="light", choices=list(AUGMENTATIONS))
    add("--hflip", type=float, default=0.5, help="share of the images that are mirrored")
    add("--workers", type=int, default=0, help="processes that load images")
    add("--model-kwargs", nargs="*", default={}, action=ParseKwargs, metavar="KEY=VALUE")
    add("--pretrained", action="store_true", help="start from timm's trained weights")
    add("--epochs", type=int, default=10)
    add("--warmup-epochs", type=int, default=1)
    add("--batch-size", type=int, default=32, help="images per step and process")
    add("--accumulate", type=int, default=1, help="steps per update of the weights")
    add("--lr", type=float, default=1e-3)
    add("--position-lr-scale", type=float, default=5.0, help="times --lr, for positions")
    add("--weight-decay", type=float, default=0.05)
    add("--clip-grad", type=float, default=1.0, help="largest norm of the gradients")
    add("--smoothing", type=float, default=0.1, help="of the labels")
    add("--mixup", type=float, default=0.0)
    add("--cutmix", type=float, default=0.0)
    add("--ema", type=float, default=0.0, help="decay of averaged weights; 0: no average")
    add("--repulsive", type=float, default=0.0, help="weight of the squared repulsive loss")
    add("--freeze-statistics", action="store_true", help="keep BatchNorm's running statistics")
    add("--mixed-precision", choices=["no", "bf16", "fp16"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="finetune.py MODEL [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a folder that dcls-convert wrote, or a name of timm's")
    parser.add_argument("--dilated-size", type=int, help="convert the model of this name first")
    parser.add_argument("--teacher", help="learn the outputs of this model of timm's or folder")
    parser.add_argument("--teacher-checkpoint", default="", help="its weights; default: timm's")
    parser.add_argument("--temperature", type=float, default=4.0, help="divides both outputs")
    parser.add_argument("--output", type=Path, help="default: runs/MODEL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fsdp", action="store_true", help="shard the model (FSDP2)")
    add_training_options(parser)
    options = parser.parse_args()
    options.output = options.output or Path("runs") / Path(options.model).name
    return options


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """Return what must be equal when a run is resumed."""
    settings = {}
    for name, value in vars(options).items():
        if name == "data" and value is not None:
            value = value.resolve().name  # a copy of the folder may lie elsewhere
        if name not in ("output", "workers", "fsdp"):
            settings[name] = str(value)
    return settings


# Images.


@dataclass(frozen=True)
class Samples:
    """What there is to train on and to test with."""

    train: Sequence[Sample]
    test: Sequence[Sample]
    classes: int


class Images(Dataset[tuple[Tensor, int]]):
    """Images as a network takes them."""

    def __init__(self, samples: Sequence[Sample], mode: str, transform: Callable[..., Any]) -> None:
        self.samples = samples
        self.mode = mode
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.samples[index]
        if isinstance(image, Path):
            image = Image.open(image)
        if image.mode.startswith(("I", "F")):  # Pillow would clip them to 8 bits
            raise DclsConvertError(f"{self.samples[index][0]}: has more than 8 bits a channel")
        return self.transform(image.convert(self.mode)), label


def visible(folder: Path) -> list[Path]:
    """Return what the folder contains, sorted; names that begin with a dot are no data."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def image_files(folder: Path) -> list[Path]:
    """Return the files of images in a folder and the folders in it."""
    files = []
    for path in visible(folder):
        if path.is_dir():
            files += image_files(path)
        elif path.suffix.lower() in get_img_extensions(as_set=True):
            files.append(path)
    return files


def read_samples(data: Path | None, *, labelled: bool = True) -> Samples:
    """Find the images of a folder: train and val (or validation) with classes, or classes alone.

    If there are only class folders, every fifth image of each is for testing. If `labelled` is
    False, the folders need not be classes.
    """
    if data is None:
        return read_digits()
    if not data.is_dir():
        raise DclsConvertError(f"--data {data}: is not a folder")
    splits = [path for path in visible(data) if path.name in ("train", "val", "validation")]
    if len(splits) not in (0, 2):
        raise DclsConvertError(f"--data {data}: needs train and val, or class folders alone")
    root = data
    if splits:
        root = splits[0]  # train
    folders = [root]
    if labelled:
        folders = [path for path in visible(root) if path.is_dir() and image_files(path)]
    train: list[Sample] = []
    test: list[Sample] = []
    for label, folder in enumerate(folders):
        files = image_files(folder)
        if splits:
            train += [(path, label) for path in files]
            test += [(path, label) for path in image_files(splits[1] / folder.relative_to(root))]
        else:
            kept, held_out = hold_out([(path, label) for path in files])
            train += kept
            test += held_out
    if not train or not test:
        raise DclsConvertError(f"--data {data}: {len(train)} images to train, {len(test)} to test")
    return Samples(train=train, test=test, classes=len(folders))


def hold_out(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to train on and, of every five, one to test with."""
    train = [sample for number, sample in enumerate(samples, 1) if number % HELD_OUT_EVERY]
    return train, list(samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def read_digits() -> Samples:
    from sklearn.datasets import load_digits

    digits = load_digits()
    samples: list[Sample] = []
    for pixels, label in zip(digits.images, digits.target, strict=True):
        image = Image.fromarray((pixels * (255 / 16)).astype("uint8"))
        samples.append((image.resize(DIGITS_SIZE[1:], Image.Resampling.BICUBIC), int(label)))
    train, test = hold_out(samples)
    return Samples(train=train, test=test, classes=10)


def input_size(options: argparse.Namespace) -> tuple[int, ...] | None:
    """Return (channels, rows, columns), or None for the model's own."""
    if options.input_size:
        return tuple(int(side) for side in options.input_size.split("x"))
    if options.data is None:
        return DIGITS_SIZE
    return None


def open_images(
    samples: Samples, model: nn.Module, options: argparse.Namespace
) -> tuple[Images, Images]:
    """Return the training images, which are augmented, and the test images."""
    config = resolve_data_config({"input_size": input_size(options)}, model=model)
    channels = config["input_size"][0]
    mode = {1: "L", 3: "RGB"}[channels]
    common = {name: config[name] for name in ("input_size", "interpolation")}
    common |= {name: tuple(config[name])[:channels] for name in ("mean", "std")}
    augmentation = {"hflip": options.hflip} | AUGMENTATIONS[options.augmentation]
    crop = {"crop_pct": config["crop_pct"]}
    if options.data is None:  # a mirrored or cropped digit is none
        augmentation["hflip"] = 0.0
        crop["crop_pct"] = 1.0
    training = create_transform(**common, is_training=True, **augmentation)
    testing = create_transform(**common, **crop)
    return Images(samples.train, mode, training), Images(samples.test, mode, testing)


# Models.


def build_model(options: argparse.Namespace, classes: int | None) -> tuple[nn.Module, Any]:
    """Return the model, and its plan or its folder, or None if it is not converted."""
    arguments = {"num_classes": classes} | options.model_kwargs  # None: the model's own classes
    torch.manual_seed(options.seed)  # for random weights, or a new head
    if Path(options.model).is_dir():
        model = timm.create_model(f"local-dir:{options.model}", pretrained=True, **arguments)
        return model, options.model
    if not timm.is_model(options.model):
        raise DclsConvertError(f"{options.model}: neither a folder nor a model of timm")
    model = timm.create_model(options.model, pretrained=options.pretrained, **arguments)
    if options.dilated_size is None:
        return model, None
    init: Any = "random"
    if options.pretrained:
        init = "fit"  # elements close to the trained kernels
    report = dcls_convert.convert_(
        model,
        dilated_size=options.dilated_size,
        init=init,
        input_size=input_size(options),
        seed=options.seed,
    )
    return model, report.plan


def build_teacher(options: argparse.Namespace, student: nn.Module) -> nn.Module | None:
    if not options.teacher:
        return None
    name = options.teacher
    if Path(name).is_dir():
        name = f"local-dir:{name}"
    weights = options.teacher_checkpoint
    classes = None
    if weights:
        classes = student.num_classes
    teacher = timm.create_model(
        name, pretrained=not weights, checkpoint_path=weights, num_classes=classes
    )
    mine = resolve_data_config(model=student)
    other = resolve_data_config(model=teacher)
    if any(tuple(mine[key]) != tuple(other[key]) for key in ("mean", "std")):
        raise DclsConvertError(f"--teacher {name}: takes images with another mean and std")
    return teacher.eval().requires_grad_(False)


def save_trained(model: nn.Module, plan: Any, folder: Path) -> None:
    if plan is None:
        timm.models.save_for_hf(model, str(folder), safe_serialization=True)
    else:
        dcls_convert.save_converted(model, plan, folder, force=True)


# Training.


def make_accelerator(options: argparse.Namespace) -> Accelerator:
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.accumulate,
        cpu=not torch.accelerator.is_available(),
    )
    if accelerator.distributed_type == DistributedType.FSDP:
        # accelerate's mixed precision would round positions to 8 bits.
        raise DclsConvertError("omit accelerate's --use_fsdp, and pass --fsdp to this script")
    return accelerator


def shard_(model: nn.Module, accelerator: Accelerator) -> None:
    """Shard the model by FSDP2: first each block, and then the rest.

    Positions that the blocks of a stage share then belong to the group of the rest.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    lists = (nn.Sequential, nn.ModuleList)
    blocks: dict[nn.Module, None] = {}
    for container in model.modules():
        if isinstance(container, lists):
            for block in container:
                if next(block.children(), None) is not None and not isinstance(block, lists):
                    blocks[block] = None
    for block in reversed(blocks):  # inner blocks first
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Training:
    """A training run: the model, its images and optimizer, and what was measured so far.

    It writes its state into `folder` after each epoch, and continues from a state that is there if
    its `settings` are the same.
    """

    def __init__(
        self,
        model: nn.Module,
        images: tuple[Images, Images],  # to train on, and to test with
        classes: int,
        options: argparse.Namespace,
        accelerator: Accelerator,
        *,
        folder: Path,
        settings: Mapping[str, str],
        teacher: nn.Module | None = None,
        fsdp: bool = False,
    ) -> None:
        self.options = options
        self.settings = dict(settings)
        self.accelerator = accelerator
        self.folder = folder
        self.history: list[dict[str, float]] = []  # for each epoch
        self.updates = 0
        self.correct = torch.zeros(0, dtype=torch.bool)  # for each test image, after the last epoch
        self.unsharded = copy.deepcopy(model)  # on the CPU; `trained_model` fills it
        self.model = model.to(accelerator.device)
        self.teacher = teacher
        if teacher is not None:
            teacher.to(accelerator.device)
        self.average = None
        self.tested = model
        if options.ema:
            self.average = ModelEmaV3(model, options.ema, use_warmup=True)
            self.tested = self.average.module
        self.parallel = model  # called in training
        if fsdp:
            shard_(model, accelerator)
            if self.average is not None:
                shard_(self.tested, accelerator)
        else:
            self.parallel = accelerator.prepare_model(model)  # DDP's wrapper
        self.mixup = None
        if options.mixup or options.cutmix:
            self.mixup = Mixup(
                options.mixup,
                options.cutmix,
                label_smoothing=options.smoothing,
                num_classes=classes,
            )
        self._make_loaders(images)
        self._make_optimizer()
        self._resume_()

    def _make_loaders(self, images: tuple[Images, Images]) -> None:
        options = self.options
        self.order = torch.Generator()  # of the training images; seeded anew for each epoch
        train = DataLoader(
            images[0],
            options.batch_size,
            shuffle=True,
            drop_last=True,
            generator=self.order,
            num_workers=options.workers,
        )
        test = DataLoader(images[1], options.batch_size, num_workers=options.workers)
        self.train_loader = self.accelerator.prepare_data_loader(train)
        self.test_loader = self.accelerator.prepare_data_loader(test)
        if len(self.train_loader) == 0:
            raise DclsConvertError(f"--batch-size: there are only {len(images[0])} images")

    def _make_optimizer(self) -> None:
        options = self.options
        # As in the paper, positions have five times the learning rate, and no weight decay. Without
        # lr, the groups have an lr_scale, which timm's schedulers apply.
        groups = tuning.param_groups(
            self.model,
            weight_decay=options.weight_decay,
            position_lr_scale=options.position_lr_scale,
        )
        optimizer = torch.optim.AdamW(groups, lr=options.lr)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.scheduler, _ = create_scheduler_v2(
            optimizer,
            "cosine",
            num_epochs=options.epochs,
            warmup_epochs=min(options.warmup_epochs, options.epochs - 1),
            warmup_lr=options.lr / 100,
            step_on_epochs=False,
            updates_per_epoch=math.ceil(len(self.train_loader) / options.accumulate),
        )

    def run(self, after_epoch: Callable[["Training"], None] = lambda _: None) -> None:
        """Train to the last epoch; `after_epoch` is called after each one and its test."""
        while len(self.history) < self.options.epochs:
            loss = self._train_epoch()
            epoch = len(self.history) + 1
            if not math.isfinite(loss):
                raise DclsConvertError(f"the loss is {loss} in epoch {epoch}: use a smaller --lr")
            self.tracker.update(epoch)
            self.correct = self.test()
            accuracy = 100 * float(self.correct.double().mean())
            self.history.append({"epoch": epoch, "loss": loss, "accuracy": accuracy})
            after_epoch(self)
            self._save_state()

    def _train_epoch(self) -> float:
        """Train for an epoch; return its mean loss."""
        options = self.options
        # All randomness follows from the seed and the epoch, so that a run that was killed
        # continues alike, and networks that are compared see the same images.
        seed = 1000 * options.seed + len(self.history)
        self.order.manual_seed(seed)
        set_seed(seed, device_specific=True)
        self.parallel.train()
        if options.freeze_statistics:
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        losses = []
        for images, labels in self.train_loader:
            with self.accelerator.accumulate(self.parallel):
                loss = self._loss(images, labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self._update()
            losses.append(loss.detach())
        return float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        options = self.options
        smoothing = options.smoothing
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
            smoothing = 0.0  # Mixup smooths the labels itself
        with self.accelerator.autocast():
            outputs = self.parallel(images)
            if self.teacher is None:
                loss = cross_entropy(outputs, labels, label_smoothing=smoothing)
            else:  # Hinton et al., arXiv:1503.02531
                heat = options.temperature
                student = (outputs.float() / heat).log_softmax(1)
                teacher = (self.teacher(images).float() / heat).log_softmax(1)
                loss = heat**2 * kl_div(student, teacher, reduction="batchmean", log_target=True)
            if options.repulsive:
                loss = loss + options.repulsive * tuning.repulsive_loss(self.model) ** 2
        return loss

    def _update(self) -> None:
        """Step the optimizer, clamp the positions, and update the schedule and the average."""
        if self.options.clip_grad:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.options.clip_grad)
        self.optimizer.step()
        # The layers clamp too, but under FSDP2 only their copy for one forward pass.
        tuning.clamp_positions_(self.model)
        self.optimizer.zero_grad()
        self.updates += 1
        self.scheduler.step_update(self.updates)
        if self.average is not None:
            self.average.update(self.model, step=self.updates)

    @torch.no_grad()
    def test(self) -> Tensor:
        """Return for each test image whether it is classified as its label, or the teacher, says.

        The averaged weights are tested if there are any. All processes get the whole result.
        """
        for buffer in self.tested.buffers():  # each process has its own statistics of BatchNorm
            broadcast(buffer)
        self.tested.eval()
        correct = []
        for images, labels in self.test_loader:
            with self.accelerator.autocast():
                predicted = self.tested(images).argmax(1)
                expected = labels
                if self.teacher is not None:
                    expected = self.teacher(images).argmax(1)
            correct.append(self.accelerator.gather_for_metrics((predicted == expected).int()))
        return torch.cat(correct).bool().cpu()

    def trained_model(self) -> nn.Module:
        """Return the trained model on the CPU; all processes call it, the first gets weights."""
        state = get_model_state_dict(self.tested, options=WHOLE)
        if self.accelerator.is_main_process:
            self.unsharded.load_state_dict(state)
        return self.unsharded.eval()

    # Resuming.

    def _save_state(self) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer, options=WHOLE)
        state = {
            "settings": self.settings,
            "model": model,
            "optimizer": optimizer,
            "average": get_model_state_dict(self.tested, options=WHOLE),
            "scheduler": self.scheduler.state_dict(),
            "updates": self.updates,
            "history": self.history,
            "correct": self.correct,
        }
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler.state_dict()
        if self.accelerator.is_main_process:
            partial = self.folder / "state.partial"
            torch.save(state, partial)
            partial.replace(self.folder / "state.pt")  # a kill leaves the old or the new one
            (self.folder / "history.json").write_text(json.dumps(self.history) + "\n")

    def _resume_(self) -> None:
        """Load the folder's state, if there is one, and open its record of positions."""
        self.folder.mkdir(parents=True, exist_ok=True)
        track = self.folder / "positions.jsonl"
        self.tracker = tuning.PositionTracker(self.model, track)
        if not (self.folder / "state.pt").exists():
            track.unlink(missing_ok=True)
            return
        self._load_(torch.load(self.folder / "state.pt", map_location="cpu", weights_only=True))
        if self.accelerator.is_main_process:  # the epoch that was killed may have left a record
            lines = track.read_text().splitlines(keepends=True)
            track.write_text("".join(lines[: len(self.history)]))
        self.tracker.continue_from(len(self.history))

    def _load_(self, state: Mapping[str, Any]) -> None:
        for name, value in self.settings.items():
            stored = state["settings"].get(name)
            if stored != value:
                raise DclsConvertError(
                    f"{self.folder}: holds a run with {name} {stored}, not {value}; "
                    "use another --output"
                )
        set_state_dict(
            self.model,
            self.optimizer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=WHOLE,
        )
        if self.average is not None:
            set_model_state_dict(self.tested, state["average"], options=WHOLE)
        self.scheduler.load_state_dict(state["scheduler"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.updates = state["updates"]
        self.history = state["history"]
        self.correct = state["correct"]


def main() -> None:
    options = parse_arguments()
    accelerator = make_accelerator(options)
    try:
        samples = read_samples(options.data, labelled=options.teacher is None)
        classes: int | None = samples.classes
        if options.teacher:
            classes = None  # the model keeps those that it has
        model, plan = build_model(options, classes)
        training = Training(
            model,
            open_images(samples, model, options),
            samples.classes,
            options,
            accelerator,
            folder=options.output,
            settings=settings_of(options),
            teacher=build_teacher(options, model),
            fsdp=options.fsdp,
        )

        def after_epoch(training: Training) -> None:
            last = training.history[-1]
            accelerator.print("epoch {epoch}: loss {loss:.4f}, {accuracy:.2f} %".format(**last))
            # If epochs are equally good, keep the last, which was trained the longest.
            if last["accuracy"] == max(epoch["accuracy"] for epoch in training.history):
                trained = training.trained_model()
                if accelerator.is_main_process:
                    save_trained(trained, plan, options.output / "best")

        training.run(after_epoch)
    except DclsConvertError as error:
        raise SystemExit(f"error: {error}") from None
    best = max(epoch["accuracy"] for epoch in training.history)
    accelerator.print(f"best accuracy {best:.2f} %: {options.output / 'best'}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
