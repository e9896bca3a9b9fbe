"""Train a converted, unfolded folder, or any model of timm, on images of your own.

    # Your images: flowers/train/rose/1.jpg, flowers/val/rose/2.jpg, ... or flowers/rose/1.jpg, ...
    python examples/finetune.py convnext_tiny-dcls17 --data flowers
    # Without labels: learn the outputs of a teacher
    python examples/finetune.py convnext_tiny-dcls17 --teacher convnext_tiny --data photographs
    # In several processes; --fsdp shards the model
    torchrun --nproc_per_node 8 examples/finetune.py convnext_tiny-dcls17 --data flowers

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
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
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

DCLS = (DclsConv1d, DclsConv2d, DclsConv3d)
# Prefixes of hidden files and of folders that operating systems create; in lower case.
NO_DATA = (".", "#recycle", "$recycle.bin", "@eadir", "__macosx", "lost+found", "system volume")
HELD_OUT_EVERY = 5  # one of so many images is a test image if there are no train and val
LARGEST_GRADIENT = 1.0  # gradients are clipped to this norm
TEMPERATURE = 4.0  # divides the outputs of model and teacher (Hinton et al., arXiv:1503.02531)
WHOLE = checkpoint.StateDictOptions(
    full_state_dict=True, cpu_offload=True
)  # gathered from all processes
AUGMENTATIONS: dict[str, dict[str, Any]] = {  # arguments of timm's create_transform
    "none": {"no_aug": True},
    "light": {"scale": (0.35, 1.0)},
    "strong": {"auto_augment": "rand-m9-mstd0.5-mmax9-inc1", "re_prob": 0.25},
}


def positive(text: str) -> int:
    """Read a positive integer."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training, which compare.py has too."""
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with a folder of images for each class")
    add("--input-size", type=positive, nargs=3, metavar=("CHANNELS", "ROWS", "COLUMNS"))
    add("--augmentation", default="light", choices=list(AUGMENTATIONS))
    add("--hflip", type=float, default=0.5, help="share of the images that are mirrored")
    add("--workers", type=int, default=0, help="processes that load images")
    add("--model-kwargs", nargs="*", default={}, action=ParseKwargs, metavar="KEY=VALUE")
    add("--pretrained", action="store_true", help="start from timm's trained weights")
    add("--epochs", type=positive, default=10)
    add("--batch-size", type=positive, default=32, help="images per step and process")
    add("--lr", type=float, default=1e-3)
    add("--position-lr-scale", type=float, default=5.0, help="times --lr, for positions")
    add("--smoothing", type=float, default=0.1, help="of the labels")
    add("--ema", type=float, default=0.0, help="decay of averaged weights; 0: no average")
    add("--repulsive", type=float, default=0.0, help="weight of the squared repulsive loss")
    add("--mixed-precision", choices=["no", "bf16", "fp16"])
    add("--fsdp", action="store_true", help="shard the model (FSDP2)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="finetune.py MODEL --data FOLDER [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a converted, unfolded folder, or a name of timm's")
    parser.add_argument("--teacher", help="learn the outputs of this model of timm's or folder")
    parser.add_argument("--output", type=Path, help="default: runs/MODEL")
    parser.add_argument("--seed", type=int, default=0)
    add_training_options(parser)
    options = parser.parse_args()
    options.output = options.output or Path("runs") / Path(options.model).name
    return options


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """Return what must be equal when a run is resumed."""
    settings = {name: str(value) for name, value in vars(options).items()}
    settings["data"] = options.data.resolve().name  # a copy of the folder may lie elsewhere
    for name in ("output", "workers", "fsdp"):
        del settings[name]
    return settings


def check_settings(stored: dict[str, str], settings: dict[str, str], place: Path) -> None:
    for name, value in settings.items():
        if stored[name] != value:
            message = f"holds a run with {name} {stored[name]}, not {value}; use another --output"
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
            number = classes.setdefault(str(name.parent), len(classes))
            samples.append((path, number))
    dataset.reader.samples = samples
    dataset.reader.class_to_idx = classes
    return dataset


def read_images(data: Path) -> tuple[ImageDataset, ImageDataset]:
    """Return the images to train on and to test with: `train` and `val`, if there are any.

    Otherwise, every fifth image is held out for testing.
    """
    if (data / "train").is_dir():
        train = read_folder(data / "train")
        test = read_folder(data / ("val" if (data / "val").is_dir() else "validation"))
        if train.reader.class_to_idx != test.reader.class_to_idx:
            raise DclsConvertError(f"--data {data}: train and val have different class folders")
    else:
        train = read_folder(data)
        test = read_folder(data)
        test.reader.samples = train.reader.samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        del train.reader.samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return train, test


def check_classes(train: ImageDataset, data: Path) -> None:
    """Refuse images of one class, from which a network cannot learn anything."""
    if len(train.reader.class_to_idx) < 2:
        raise DclsConvertError(
            f"--data {data}: all images are of one class; put those of each class into a folder of "
            "its own (only --teacher takes images without classes)"
        )


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


def set_transforms_(
    train: ImageDataset, test: ImageDataset, model: nn.Module, options: argparse.Namespace
) -> None:
    """Let the images be read as the model takes them, and those to train on be augmented."""
    config = resolve_data_config({"input_size": options.input_size}, model=model)
    if config["input_size"][0] == 1:
        train.input_img_mode = test.input_img_mode = "L"
        config |= {"mean": config["mean"][:1], "std": config["std"][:1]}
    elif config["input_size"][0] != 3:
        raise DclsConvertError("--input-size: the first number is that of channels, 1 or 3")
    augmentation = {"hflip": options.hflip} | AUGMENTATIONS[options.augmentation]
    train.transform = create_transform(**config, is_training=True, **augmentation)
    test.transform = create_transform(**config)


def create_model(name: str, **arguments: Any) -> nn.Module:
    """Return a model of timm, or the one in a folder with its weights."""
    if Path(name).is_dir():
        name = f"local-dir:{name}"
        arguments["pretrained"] = True
    try:
        return timm.create_model(name, **arguments)
    except (OSError, RuntimeError, ValueError) as error:
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
        images: tuple[ImageDataset, ImageDataset],  # to train on, and to test with
        options: argparse.Namespace,
        accelerator: Accelerator,
        teacher: nn.Module | None = None,
    ) -> None:
        self.options = options
        self.accelerator = accelerator
        self.teacher = teacher
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
        self._make_loaders(*images)
        self._make_optimizer()
        self._resume_()

    def _make_loaders(self, train: ImageDataset, test: ImageDataset) -> None:
        options = self.options
        set_transforms_(train, test, self.model, options)
        common = {"batch_size": options.batch_size, "num_workers": options.workers}
        self.order = torch.Generator()  # of the training images; seeded anew for each epoch
        loader = DataLoader(train, shuffle=True, drop_last=True, generator=self.order, **common)
        self.train_loader = self.accelerator.prepare_data_loader(loader)
        self.test_loader = self.accelerator.prepare_data_loader(DataLoader(test, **common))
        if len(self.train_loader) == 0 or len(test) == 0:
            raise DclsConvertError(
                f"--data: only {len(train)} images to train, {len(test)} to test; each process "
                f"takes --batch-size {options.batch_size} for an update"
            )

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
        accuracy = 100 * float(self.test().double().mean())
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
        for images, labels in self.train_loader:
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
    train, test = read_images(options.data)
    counts = f"{len(train):,} images to train, {len(test):,} to test; results: {options.output}"
    arguments = {}
    classes = teacher = None
    if options.teacher:  # the classes are those of the teacher, and of the model
        teacher = create_model(options.teacher, pretrained=True).eval().requires_grad_(False)
        teacher.to(accelerator.device)
        accelerator.print(f"{options.data}: {counts}")
    else:
        check_classes(train, options.data)
        classes = list(train.reader.class_to_idx)
        arguments = {"num_classes": len(classes)}
        accelerator.print(f"{options.data}: {len(classes)} classes, {counts}")
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
    describe_training_(model, classes, options)
    training = Training(model, (train, test), options, accelerator, teacher)
    for _ in range(len(training.history), options.epochs):
        training.run_epoch()
        accuracies = [epoch["accuracy"] for epoch in training.history]
        if accuracies[-1] == max(accuracies):  # of equally good epochs, the last
            training.save_trained(plan, options.output / "best")
        training.save_state()
    end(accelerator)


if __name__ == "__main__":
    try:
        main()
    except DclsConvertError as error:
        raise SystemExit(f"error: {error}") from None
