"""Train a converted, unfolded folder, or any model of timm, on images of your own.

    # Your images: flowers/train/rose/1.jpg, flowers/val/rose/2.jpg, ... or flowers/rose/1.jpg, ...
    python examples/finetune.py convnext_tiny-dcls17 --data flowers
    # Without labels: learn the outputs of a teacher
    python examples/finetune.py convnext_tiny-dcls17 --teacher convnext_tiny --data photographs
    # In several processes; --fsdp shards the model
    torchrun --nproc_per_node 8 examples/finetune.py convnext_tiny-dcls17 --data flowers

Without train and val, every fifth image is held out. The best epoch is chosen by the images that
are held out, so its accuracy on them is optimistic. If there is a flowers/test beside train, with
the same class folders, the best epoch is tested on it at the end.

The output folder gets `best`, which timm loads as "local-dir:FOLDER/best", and which states the
input size, the normalisation and the names of the classes; `history.json`; `positions.jsonl`, which
`dcls-convert inspect FOLDER/best --history FOLDER/positions.jsonl` draws into a `--picture`; and
`state.pt`. If a run was killed, start it again with the same command: it continues after its last
full epoch.

This file is meant to be copied and changed. compare.py, beside it, trains with it.
"""

import argparse
import copy
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file
from timm.data import ImageDataset, create_transform, resolve_data_config
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, ParseKwargs
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader

import dcls_convert
from dcls_convert import DclsConv1d, DclsConv2d, DclsConv3d, DclsConvertError, tuning

try:
    from accelerate import Accelerator
    from accelerate.utils import broadcast, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; in the clone: pip install '.[train]'") from None

DCLS = (DclsConv1d, DclsConv2d, DclsConv3d)
# Prefixes of hidden files and of folders that operating systems create; in lower case.
NO_DATA = (".", "#recycle", "$recycle.bin", "@eadir", "__macosx", "lost+found", "system volume")
HELD_OUT_EVERY = 5  # one of so many images is held out if there are no train and val
MANY_TIMES = 4  # resizing to so many times more or fewer pixels is said
MAX_SEED = 4_000_000  # times 1000, plus the epoch: at most 32 bits, for numpy
LARGEST_GRADIENT = 1.0  # gradients are clipped to this norm
TEMPERATURE = 4.0  # divides the outputs of model and teacher (Hinton et al., arXiv:1503.02531)
# Gathered from all processes.
WHOLE = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)
AUGMENTATIONS: dict[str, dict[str, Any]] = {  # arguments of timm's create_transform
    "none": {"no_aug": True},
    "light": {"scale": (0.35, 1.0)},
    "strong": {"auto_augment": "rand-m9-mstd0.5-mmax9-inc1", "re_prob": 0.25},
}


def number(kind: type, least: int, most: int = 10**9) -> Callable[[str], Any]:
    """Return a function that reads a number in this range, for argparse."""

    def read(text: str) -> Any:
        if not least <= kind(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least} to {most:,}")
        return kind(text)

    read.__name__ = kind.__name__  # argparse names it if the text is not a number
    return read


def home_path(text: str) -> Path:
    """Read a path. The shell does not expand a "~" in quotes."""
    return Path(os.path.expanduser(text))


def model_name(text: str) -> str:
    """Read a folder, with or without timm's prefix, or another name."""
    return os.path.expanduser(text.removeprefix("local-dir:"))


def key_and_value(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text}: must be KEY=VALUE")
    return text


class InputSize(argparse.Action):
    """Reads "3 64 64", "3x64x64" or "64x64"."""

    def __call__(self, parser: Any, options: Any, words: Any, option: str | None = None) -> None:
        sides = "x".join(words).split("x")
        if len(words) == 1 and len(sides) == 2:  # as dcls-convert takes them
            sides = ["3", *sides]
        if len(sides) != 3 or not all(side.isdecimal() and int(side) for side in sides):
            message = "must be channels, rows and columns, such as 3 64 64 or 3x64x64"
            raise argparse.ArgumentError(self, f"{' '.join(words)}: {message}")
        options.input_size = [int(side) for side in sides]


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training, which compare.py has too."""

    def add(name: str, help: str, **settings: Any) -> None:
        if settings.get("default") is not None:
            help += "; default: %(default)s"
        parser.add_argument(name, help=help, **settings)

    share = number(float, 0, 1)
    not_negative = number(float, 0)
    kwargs = {"nargs": "*", "type": key_and_value, "action": ParseKwargs, "metavar": "KEY=VALUE"}
    size = {"nargs": "+", "action": InputSize, "metavar": "SIDE"}
    add("--data", "folder with a folder of images for each class", type=home_path, required=True)
    add("--input-size", "3 64 64 or 3x64x64; default: the model's", **size)
    add("--augmentation", "of images to train", default="light", choices=list(AUGMENTATIONS))
    add("--hflip", "share of the images that are mirrored", type=share, default=0.5)
    add("--workers", "processes that load images", type=number(int, 0), default=0)
    add("--model-kwargs", "arguments of the model", default={}, **kwargs)
    add("--pretrained", "start from timm's trained weights", action="store_true")
    add("--epochs", "how often each image is seen", type=number(int, 1), default=10)
    add("--batch-size", "images per step and process", type=number(int, 1), default=32)
    add("--lr", "highest learning rate", type=not_negative, default=1e-3)
    add("--position-lr-scale", "times --lr, for positions", type=not_negative, default=5.0)
    add("--smoothing", "of the labels", type=share, default=0.1)
    add("--ema", "decay of averaged weights; 0: no average", type=share, default=0.0)
    add("--repulsive", "weight of the squared repulsive loss", type=not_negative, default=0.0)
    precisions = ["no", "bf16", "fp16"]
    add("--mixed-precision", "default: as set for accelerate, or no", choices=precisions)
    add("--fsdp", "shard the model (FSDP2)", action="store_true")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="finetune.py MODEL --data FOLDER [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=model_name, help="a converted, unfolded folder, or a name of timm's")
    teacher = "learn the outputs of this model of timm's or folder; default: learn the labels"
    add("--teacher", type=model_name, help=teacher)
    add("--output", type=home_path, help="default: runs/MODEL")
    add("--seed", type=number(int, 0, MAX_SEED), default=0, help="default: %(default)s")
    add_training_options(parser)
    options = parser.parse_args()
    options.output = options.output or Path("runs") / Path(options.model).name
    return options


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """Return what must be equal when a run is resumed."""
    settings = {name: str(value) for name, value in vars(options).items()}
    settings["data"] = options.data.resolve().name  # a copy of the folder may lie elsewhere
    for name in settings.keys() & {"model", "teacher"}:
        if Path(settings[name]).is_dir():
            settings[name] = str(Path(settings[name]).resolve())
    for name in ("output", "workers", "fsdp"):
        del settings[name]
    return settings


def check_settings(stored: dict[str, str], settings: dict[str, str], place: Path) -> None:
    for name, value in settings.items():
        if stored.get(name) != value:
            found = stored.get(name)
            message = f"holds a run with {name} {found}, not {value}; use another --output"
            if name == "epochs" and (place / "best").is_dir():
                message += f"; a converted model can go on from {place / 'best'}"
            raise DclsConvertError(f"{place}: {message}")


def read_folder(folder: Path) -> ImageDataset:
    """Return the images in a folder and in the folders below it, which are their classes.

    Names that begin with a dot, and the folders of systems, are no data.
    """
    if not folder.is_dir():
        raise DclsConvertError(f"--data {folder}: is not a folder")
    try:
        dataset = ImageDataset(str(folder))
    except RuntimeError as error:  # no images
        raise DclsConvertError(f"--data {folder}: {error}") from error
    samples = []
    classes: dict[str, int] = {}
    for path, _ in dataset.reader.samples:
        name = Path(path).relative_to(folder)
        if not any(part.lower().startswith(NO_DATA) for part in name.parts):
            label = classes.setdefault(str(name.parent), len(classes))
            samples.append((path, label))
    if not samples:
        raise DclsConvertError(f"--data {folder}: has no images but hidden ones")
    dataset.reader.samples = samples
    dataset.reader.class_to_idx = classes
    return dataset


def read_images(data: Path) -> list[ImageDataset]:
    """Return the images in `train`, in `val` and, if there are class folders in it, in `test`.

    If there is no `train`, every fifth image is held out.
    """
    if (data / "train").is_dir():
        splits = ["train", "val" if (data / "val").is_dir() else "validation"]
        if any((data / "test").glob("*/")):
            splits.append("test")
        images = [read_folder(data / split) for split in splits]
        for split, dataset in zip(splits, images, strict=True):
            if dataset.reader.class_to_idx != images[0].reader.class_to_idx:
                message = f"train and {split} have different class folders"
                raise DclsConvertError(f"--data {data}: {message}")
    else:
        images = [read_folder(data), read_folder(data)]
        samples = images[0].reader.samples
        images[1].reader.samples = samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        del samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return images


def check_classes(train: ImageDataset, data: Path) -> None:
    """Refuse images of one class, from which a network cannot learn anything."""
    if len(train.reader.class_to_idx) < 2:
        raise DclsConvertError(
            f"--data {data}: all images are of one class; put those of each class into a folder of "
            "its own (only --teacher takes images without classes)"
        )


def read_sizes(images: Sequence[ImageDataset], accelerator: Accelerator) -> list[tuple[int, int]]:
    """Return (rows, columns) of all images, from the headers of the files.

    Files that cannot be read are refused, because timm would take the next image instead; and so
    are pixels of 16 or 32 bits, because timm would clip them to 8: nearly all become white.
    """
    sizes: list[tuple[int, int]] = []
    refused: dict[str, list[str]] = {}
    paths = [path for dataset in images for path, _ in dataset.reader.samples]
    for path in watch(paths, "reading headers", accelerator):
        try:
            with Image.open(path) as image:
                image.verify()  # the checksums of a PNG
                sizes.append((image.height, image.width))
                if image.mode.startswith(("I", "F")):
                    reason = "have more than 8 bits per channel (convert them to 8 bits)"
                    refused.setdefault(reason, []).append(path)
        except Exception:  # Pillow raises many kinds
            refused.setdefault("cannot be read as images", []).append(path)
    for reason, files in refused.items():
        names = ", ".join(files[:5])
        raise DclsConvertError(f"--data: {len(files)} files {reason}: {names}")
    return sizes


def check_images(
    images: Sequence[ImageDataset], models: Sequence[nn.Module], options: Any, accelerator: Any
) -> None:
    """Refuse images that do not fit the models, and say how they are resized if it is by much."""
    sizes = read_sizes(images, accelerator)
    config = resolve_data_config({"input_size": options.input_size}, model=models[0])
    channels, *taken = config["input_size"]
    rows, columns = sorted(sizes, key=math.prod)[len(sizes) // 2]
    resized = f"{rows}x{columns} images are resized to {taken[0]}x{taken[1]}"
    times = math.prod(taken) / (rows * columns)
    if times >= MANY_TIMES:
        keep = f"--input-size {channels} {rows} {columns} keeps them"
        accelerator.print(f"{resized}, {times:.0f} times the work ({keep})")
    elif times <= 1 / MANY_TIMES:
        accelerator.print(f"{resized} (--input-size sets another size)")
    try:
        with torch.no_grad():
            outputs = [model.eval()(torch.zeros(1, channels, *taken)) for model in models]
    except (AssertionError, RuntimeError) as error:
        size = "x".join(map(str, config["input_size"]))
        raise DclsConvertError(f"--input-size: {size} does not fit the model: {error}") from error
    classes = len(images[0].reader.class_to_idx)
    if len(models) > 1:
        classes = outputs[1].shape[-1]  # the teacher's
    if outputs[0].shape[-1] != classes:
        found = outputs[0].shape[-1]
        raise DclsConvertError(f"the model has {found} outputs, but there are {classes} classes")


def watch(items: Any, what: str, accelerator: Accelerator) -> Iterable[Any]:
    """Return the items; on a terminal, a bar and the time left are shown on stderr."""
    hidden = not (accelerator.is_main_process and sys.stderr.isatty())
    console = Console(stderr=True)
    bar = {"console": console, "transient": True, "refresh_per_second": 1}
    return track(items, what, disable=hidden, **bar)


def describe_training_(model: nn.Module, classes: list[str] | None, options: Any) -> None:
    """Note on the model what its images are in this training; a folder that is saved says so."""
    used = resolve_data_config({"input_size": options.input_size}, model=model)
    for name in ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode"):
        model.pretrained_cfg[name] = used[name]
    if options.input_size:  # else timm would test at the size of the old weights
        for name in ("test_input_size", "test_crop_pct"):
            model.pretrained_cfg.pop(name, None)
    if classes is not None:
        model.pretrained_cfg["label_names"] = classes


def set_transforms_(images: Sequence[ImageDataset], model: nn.Module, options: Any) -> None:
    """Let images be read as the model takes them. The first ones, to train on, are augmented."""
    config = resolve_data_config({"input_size": options.input_size}, model=model)
    mode = "RGB"
    if config["input_size"][0] == 1:
        mode = "L"
        config |= {"mean": config["mean"][:1], "std": config["std"][:1]}
    elif config["input_size"][0] != 3:
        raise DclsConvertError("--input-size: the first number is that of channels, 1 or 3")
    for dataset in images:
        dataset.input_img_mode = mode
        dataset.transform = create_transform(**config)
    augmentation = {"hflip": options.hflip} | AUGMENTATIONS[options.augmentation]
    images[0].transform = create_transform(**config, is_training=True, **augmentation)


def create_model(name: str, **arguments: Any) -> nn.Module:
    """Return a model of timm, or the one in a folder with its weights."""
    if Path(name).is_dir():
        name = f"local-dir:{name}"
        arguments["pretrained"] = True
    try:
        return timm.create_model(name, **arguments)
    except Exception as error:  # of any kind, for arguments that the model does not take
        if str(error).startswith("Unknown model"):
            raise DclsConvertError(f"{name}: is neither a folder nor a model of timm's") from error
        raise DclsConvertError(f"{name}: {error}") from error


def shares_its_positions(part: nn.Module, model: nn.Module) -> bool:
    """True if layers outside of a part of the model use positions that belong to the part."""
    own = {id(parameter) for parameter in part.parameters()}
    outside = set(model.modules()) - set(part.modules())
    return any(isinstance(layer, DCLS) and id(layer.positions) in own for layer in outside)


def shard_(model: nn.Module) -> None:
    """Shard the model by FSDP2: first its stages and blocks, and then the rest.

    A block whose positions other blocks use belongs to the group of its stage, or of the rest.
    (accelerate's own FSDP2 would round positions to 16 bits in mixed precision.)
    """
    parts: list[nn.Module] = []
    for container in model.modules():
        if isinstance(container, nn.Sequential | nn.ModuleList):
            parts += container.children()
    # Before any part is sharded, which replaces its parameters.
    parts = [part for part in parts if not shares_its_positions(part, model)]
    for part in reversed(parts):  # inner parts first
        if any(part.children()) and not isinstance(part, nn.ModuleList):
            fully_shard(part)
    fully_shard(model)


class Training:
    """A training run: the model, its images and optimizer, and what was measured so far.

    It writes its state into the output folder after each epoch, and continues from a state that is
    there.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Sequence[ImageDataset],  # to train on, held out and, perhaps, to test with
        options: argparse.Namespace,
        accelerator: Accelerator,
        teacher: nn.Module | None = None,
    ) -> None:
        self.options = options
        self.accelerator = accelerator
        self.teacher = None if teacher is None else teacher.to(accelerator.device)
        self.history: list[dict[str, float]] = []  # for each epoch
        self.unsharded = copy.deepcopy(model)  # on the CPU; gets the weights that are saved
        self.model = model.to(accelerator.device)
        self.tested = model
        self.average = None
        if options.ema:
            # Sharded parameters and BatchNorm's buffers, which are not, fit into no one list.
            self.average = ModelEmaV3(model, options.ema, use_warmup=True, foreach=False)
            self.tested = self.average.module
        if options.fsdp:
            self.parallel = model  # called in training
            shard_(model)
            if self.average is not None:
                shard_(self.tested)
        else:
            self.parallel = accelerator.prepare_model(model)
        self._make_loaders(images)
        self._make_optimizer()
        self._resume_()

    def _make_loaders(self, images: Sequence[ImageDataset]) -> None:
        batch_size = self.options.batch_size
        set_transforms_(images, self.model, self.options)
        self.order = torch.Generator()  # of the training images; seeded anew for each epoch
        self.train_loader = self._load(
            images[0], shuffle=True, drop_last=True, generator=self.order
        )
        self.test_loaders = [self._load(dataset) for dataset in images[1:]]
        if len(self.train_loader) == 0 or len(images[1]) == 0:
            raise DclsConvertError(
                f"--data: only {len(images[0])} images to train, {len(images[1])} held out; each "
                f"process takes --batch-size {batch_size} for an update"
            )

    def _load(self, images: ImageDataset, **order: Any) -> DataLoader:
        options = self.options
        common = {"batch_size": options.batch_size, "num_workers": options.workers}
        return self.accelerator.prepare_data_loader(DataLoader(images, **common, **order))

    def _make_optimizer(self) -> None:
        options = self.options
        # As in the paper, positions have five times the learning rate, and no weight decay. Without
        # lr, the groups have an lr_scale, which timm's schedulers apply.
        groups = tuning.param_groups(self.model, position_lr_scale=options.position_lr_scale)
        optimizer = torch.optim.AdamW(groups, lr=options.lr)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.scheduler, _ = create_scheduler_v2(
            optimizer,
            "cosine",
            num_epochs=options.epochs,
            warmup_epochs=min(1, options.epochs - 1),
            warmup_lr=options.lr / 100,
            step_on_epochs=False,
            updates_per_epoch=len(self.train_loader),
        )

    def run_epoch(self) -> None:
        """Train for an epoch, test, and add a line to the history."""
        epoch = len(self.history) + 1
        loss = self._train_epoch()
        if not math.isfinite(loss):
            raise DclsConvertError(f"the loss is {loss} in epoch {epoch}: use a smaller --lr")
        self.tracker.update(epoch)
        accuracy = self.accuracy(self.test_loaders[0])
        self.history.append({"epoch": epoch, "loss": loss, "accuracy": accuracy})
        self.accelerator.print(
            f"{self.options.output}: epoch {epoch}, loss {loss:.4f}, {accuracy:.2f} %", flush=True
        )

    def _train_epoch(self) -> float:
        """Return the mean loss."""
        # All randomness follows from the seed and the epoch, so that a run that was killed
        # continues alike, and networks that are compared see the same images.
        seed = 1000 * self.options.seed + len(self.history)
        self.order.manual_seed(seed)
        set_seed(seed, device_specific=True)
        self.parallel.train()
        losses = []
        update = len(self.history) * len(self.train_loader)
        what = f"epoch {len(self.history) + 1}"
        for images, labels in watch(self.train_loader, what, self.accelerator):
            with self.accelerator.autocast():
                loss = self._loss(images, labels)
            self.accelerator.backward(loss)
            update += 1
            self._update(update)
            losses.append(loss.detach())
        return float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        options = self.options
        outputs = self.parallel(images)
        if self.teacher is None:
            loss = cross_entropy(outputs, labels, label_smoothing=options.smoothing)
        else:
            student = (outputs.float() / TEMPERATURE).log_softmax(1)
            teacher = (self.teacher(images).float() / TEMPERATURE).log_softmax(1)
            loss = kl_div(student, teacher, reduction="batchmean", log_target=True)
            loss = loss * TEMPERATURE**2
        if options.repulsive:
            loss = loss + options.repulsive * tuning.repulsive_loss(self.model) ** 2
        return loss

    def _update(self, number: int) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        # The layers clamp too, but under FSDP2 only their copy for one forward pass.
        tuning.clamp_positions_(self.model)
        self.optimizer.zero_grad()
        self.scheduler.step_update(number)
        if self.average is not None:
            self.average.update(self.model, step=number)

    @torch.no_grad()
    def test(self, loader: DataLoader) -> Tensor:
        """Return for each image whether it is classified as its label, or the teacher, says.

        The averaged weights are tested if there are any. All processes get the whole result.
        """
        for buffer in self.tested.buffers():  # each process has its own statistics of BatchNorm
            broadcast(buffer)
        self.tested.eval()
        correct = []
        for images, labels in watch(loader, "testing", self.accelerator):
            with self.accelerator.autocast():
                predicted = self.tested(images).argmax(1)
                if self.teacher is not None:
                    labels = self.teacher(images).argmax(1)
            correct.append(self.accelerator.gather_for_metrics((predicted == labels).int()))
        return torch.cat(correct).bool().cpu()

    def save_trained(self, plan: Any, folder: Path) -> None:
        """Save the model in a folder, which timm loads; `plan` is None if it is not converted."""
        state = checkpoint.get_model_state_dict(self.tested, options=WHOLE)
        if not self.accelerator.is_main_process:
            return
        self.unsharded.load_state_dict(state)
        if plan is None:
            timm.models.save_for_hf(self.unsharded, str(folder), safe_serialization=True)
        else:
            dcls_convert.save_converted(self.unsharded, plan, folder, force=True)

    def accuracy(self, loader: DataLoader) -> float:
        """Return the percentage of images that are classified right."""
        return 100 * float(self.test(loader).double().mean())

    def test_best_(self) -> float:
        """Load the weights in `best`, and return their accuracy on the last images."""
        self.accelerator.wait_for_everyone()  # until they are saved
        state = load_file(self.options.output / "best" / "model.safetensors")
        checkpoint.set_model_state_dict(self.tested, state, options=WHOLE)
        return self.accuracy(self.test_loaders[-1])

    def save_state(self) -> None:
        model, optimizer = checkpoint.get_state_dict(
            self.model, self.optimizer.optimizer, options=WHOLE
        )
        state = {
            "settings": settings_of(self.options),
            "model": model,
            "optimizer": optimizer,
            "tested": checkpoint.get_model_state_dict(self.tested, options=WHOLE),
            "history": self.history,
        }
        if self.accelerator.is_main_process:
            folder = self.options.output
            torch.save(state, folder / "state.partial")
            (folder / "state.partial").replace(folder / "state.pt")  # a kill leaves one of both
            (folder / "history.json").write_text(json.dumps(self.history) + "\n")

    def _resume_(self) -> None:
        """Load the state of the output folder, if there is one."""
        folder = self.options.output
        folder.mkdir(parents=True, exist_ok=True)
        self.tracker = tuning.PositionTracker(
            self.model, folder / "positions.jsonl", unit="epoch", optimizer=self.optimizer
        )
        if (folder / "state.pt").exists():
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
            check_settings(state["settings"], settings_of(self.options), folder)
            checkpoint.set_state_dict(
                self.model,
                self.optimizer.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=WHOLE,
            )
            if self.average is not None:
                checkpoint.set_model_state_dict(self.tested, state["tested"], options=WHOLE)
            self.history = state["history"]
        self.tracker.update(len(self.history))  # the next speed is measured from here


def make_accelerator(options: argparse.Namespace) -> Accelerator:
    if options.fsdp and "RANK" not in os.environ:
        raise DclsConvertError("--fsdp: shards over processes, so start it with torchrun")
    on_cpu = not torch.accelerator.is_available()  # which several processes must be told
    return Accelerator(mixed_precision=options.mixed_precision, cpu=on_cpu)


def end(accelerator: Accelerator) -> None:
    # Not right behind an operation on tensors: gloo's threads may still hold them, and then abort a
    # process that ends (pytorch/pytorch#179291).
    accelerator.wait_for_everyone()
    accelerator.end_training()


def main() -> None:
    options = parse_arguments()
    accelerator = make_accelerator(options)
    images = read_images(options.data)
    train = images[0]
    roles = ("images to train", "held out", "to test")
    counts = ", ".join(f"{len(part):,} {role}" for part, role in zip(images, roles, strict=False))
    arguments = {}
    classes = teacher = None
    if options.teacher:  # the classes are those of the teacher, and of the model
        teacher = create_model(options.teacher, pretrained=True).eval().requires_grad_(False)
    else:
        check_classes(train, options.data)
        classes = list(train.reader.class_to_idx)
        arguments = {"num_classes": len(classes)}
        counts = f"{len(classes)} classes; {counts}"
    accelerator.print(f"{options.data}: {counts}; results: {options.output}")
    torch.manual_seed(options.seed)  # of random weights, or a new head
    arguments |= options.model_kwargs
    model = create_model(options.model, pretrained=options.pretrained, **arguments)
    plan = None
    if Path(options.model).is_dir():
        if model.pretrained_cfg["architecture"] != "dcls_convert":
            raise DclsConvertError(f"{options.model}: is no converted folder, or is folded")
        plan = options.model  # the folder has it
        # Checked here, not after an epoch.
        dcls_convert.check_output(options.output / "best", force=True)
    models = [network for network in (model, teacher) if network is not None]
    check_images(images, models, options, accelerator)
    describe_training_(model, classes, options)
    training = Training(model, images, options, accelerator, teacher)
    for _ in range(len(training.history), options.epochs):
        training.run_epoch()
        accuracies = [epoch["accuracy"] for epoch in training.history]
        if accuracies[-1] == max(accuracies):  # of equally good epochs, the last
            training.save_trained(plan, options.output / "best")
        training.save_state()
    best = max(training.history, key=lambda epoch: (epoch["accuracy"], epoch["epoch"]))
    result = f"{best['accuracy']:.2f} %; optimistic, because the held-out images chose it"
    if len(images) == 3:
        result = f"{training.test_best_():.2f} % of the images in {options.data / 'test'}"
    accelerator.print(f"{options.output / 'best'}: epoch {best['epoch']}, {result}")
    end(accelerator)


def run(main: Callable[[], None]) -> None:
    """Run a script. Mistakes of the user are one line."""
    try:
        main()
    except (DclsConvertError, OSError, torch.OutOfMemoryError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    run(main)
