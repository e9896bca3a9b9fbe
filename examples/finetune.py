"""Fine-tune a converted checkpoint folder, or any model of timm.

The images are yours, or scikit-learn's digits.

    # Your images: flowers/train/rose/1.jpg, flowers/validation/...
    python examples/finetune.py convnext_tiny-dcls17 --data flowers
    # A first try without data of your own, on digits
    python examples/finetune.py convnext_tiny-dcls17
    # Convert a trained model first (without --dilated-size, train it unconverted)
    python examples/finetune.py resnet18 --dilated-size 7 --pretrained
    # From scratch: positions start at random
    python examples/finetune.py resnet18 --dilated-size 7
    # Without labels: learn the outputs of a teacher
    python examples/finetune.py convnext_tiny-dcls17 --teacher convnext_tiny --data photographs
    accelerate launch --num_processes 8 examples/finetune.py convnext_tiny-dcls17 [--fsdp]
    torchrun --nproc_per_node 2 examples/finetune.py convnext_tiny-dcls17    # also without GPUs

The output folder contains `best`, which is a checkpoint folder, `history.json`, `training.png`,
`positions.jsonl` (for `dcls-convert inspect best --history`), and `state.pt`, from which `--resume`
continues a run that was killed. To find out whether a conversion helps, use `dcls-convert compare`:
it trains both networks with the same loop.
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch import nn

import dcls_convert
from dcls_convert import DclsConvertError, tuning
from dcls_convert.checkpoints.save import save_trained
from dcls_convert.tuning.training_images import ImageData, open_images, set_transforms_

DIGITS_SIZE = 32  # pixels that the 8 x 8 digits are scaled to
DIGITS_HELD_OUT = 360  # images, a fifth of 1797


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="finetune.py MODEL [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="a folder that dcls-convert wrote, or a name of timm's")
    add("--dilated-size", type=int, help="convert the model of this name first")
    add("--pretrained", action="store_true", help="start a model of timm from its trained weights")
    add("--drop-path", type=float, default=0.0)
    add(
        "--teacher",
        help="learn this model's outputs, of images without labels: a name of timm's, or a folder",
    )
    add(
        "--teacher-checkpoint",
        default="",
        help="weights of the teacher; default: those that timm knows, or of the folder",
    )
    add("--data", type=Path, help="folder of images; without it, scikit-learn's digits")
    add(
        "--dataset",
        default="",
        help="timm's name of the data set, such as torch/cifar10; default: a folder of classes",
    )
    add("--splits", nargs=2, default=("train", "validation"), metavar=("TRAIN", "VALIDATION"))
    add("--num-classes", type=int, help="if the data set does not name its classes")
    add("--augmentation", default="light", choices=["none", "light", "strong"])
    add("--img-size", type=int, help=f"default: the model's; {DIGITS_SIZE} for digits")
    add("--output", type=Path, help="default: runs/MODEL")
    add("--resume", action="store_true", help="continue a run that was killed")
    add(
        "--mixed-precision",
        choices=["no", "bf16", "fp16"],
        help="default: what accelerate launch says",
    )
    add("--fsdp", action="store_true", help="shard the model over the processes (FSDP2)")
    add(
        "--workers",
        type=int,
        default=0,
        help="processes that load images, per training process",
    )
    add(
        "--save-every",
        type=int,
        default=0,
        help="updates between two saved states; default: an epoch",
    )
    recipe = parser.add_argument_group(
        "recipe", "dcls_convert.tuning.Recipe says what each of these means"
    )
    for field in fields(tuning.Recipe):
        name = f"--{field.name.replace('_', '-')}"
        default: Any = field.default
        if field.name == "ema":
            default = 0.99  # Recipe's own, 0, keeps no average
        if default is False:
            recipe.add_argument(name, action="store_true")
        else:
            usual = f"default: {default}"
            recipe.add_argument(name, type=type(default), default=default, help=usual)
    args = parser.parse_args()
    if args.teacher_checkpoint and not args.teacher:
        parser.error("--teacher-checkpoint needs --teacher, which names the model")
    if args.teacher and args.num_classes:
        parser.error("--num-classes: with --teacher, the model keeps the classes that it has")
    args.output = args.output or Path("runs") / Path(args.model).name
    return args


class Digits(torch.utils.data.Dataset):
    def __init__(self, training: bool) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        order = order[DIGITS_HELD_OUT:] if training else order[:DIGITS_HELD_OUT]
        self.images, self.labels = digits.images[order], digits.target[order]
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray((self.images[index] * (255 / 16)).astype(np.uint8)).convert("RGB")
        return self.transform(image), int(self.labels[index])


def load_data(args: argparse.Namespace) -> ImageData:
    """Return the images for training and testing, still without transforms."""
    if args.data is None and not args.dataset:
        return ImageData(train=Digits(True), test=Digits(False), classes=tuple("0123456789"))
    labelled = args.teacher is None
    return open_images(
        args.data, args.dataset, splits=args.splits, classes=args.num_classes, labelled=labelled
    )


def set_transforms(data: ImageData, model: nn.Module, args: argparse.Namespace) -> None:
    if not isinstance(data.train, Digits):
        set_transforms_(
            data, model, args.img_size and (3, args.img_size, args.img_size), args.augmentation
        )
        return
    config = resolve_data_config({"img_size": args.img_size or DIGITS_SIZE}, model=model)
    config = {name: config[name] for name in ("input_size", "interpolation", "mean", "std")}
    data.train.transform = create_transform(
        **config, is_training=True, hflip=0.0, scale=(0.7, 1.0), color_jitter=None
    )
    data.test.transform = create_transform(**config, crop_pct=1.0)


def build_model(args: argparse.Namespace, classes: int | None) -> tuple[nn.Module, Any]:
    """Return the model and its plan, or the folder with the plan, or None if it is not converted.

    The model gets a new head for `classes` classes; if that is None, it keeps its own.
    """
    options: dict[str, Any] = {}
    if classes:
        options["num_classes"] = classes
    if args.drop_path:
        options["drop_path_rate"] = args.drop_path
    torch.manual_seed(args.seed)  # for a new head
    if Path(args.model).is_dir():
        return timm.create_model(f"local-dir:{args.model}", pretrained=True, **options), args.model
    if not timm.is_model(args.model):
        raise DclsConvertError(f"{args.model}: neither a folder nor a model of timm")
    model = timm.create_model(args.model, pretrained=args.pretrained, **options)
    if args.dilated_size is None:
        return model, None
    # As on the command line: it makes no sense to fit elements to random kernels.
    init = "fit" if args.pretrained else "random"
    report = dcls_convert.convert_(model, dilated_size=args.dilated_size, init=init, seed=args.seed)
    return model, report.plan


def build_teacher(args: argparse.Namespace, student: nn.Module) -> nn.Module | None:
    """Return the network whose outputs the student learns, or None without --teacher.

    Every process has the whole network.
    """
    if not args.teacher:
        return None
    name = f"local-dir:{args.teacher}" if Path(args.teacher).is_dir() else args.teacher
    path = args.teacher_checkpoint
    classes = {}
    if path:
        classes["num_classes"] = student.num_classes
    try:
        teacher = timm.create_model(name, pretrained=not path, checkpoint_path=path, **classes)
    except Exception as error:  # from timm, the hub or the file
        problem = " ".join(str(error).split())[:200]
        raise DclsConvertError(
            f"--teacher {args.teacher}: cannot load its weights: {problem}"
        ) from error
    if teacher.num_classes != student.num_classes:
        raise DclsConvertError(
            f"--teacher {args.teacher}: has {teacher.num_classes} classes, "
            f"{args.model} has {student.num_classes}"
        )
    mine = resolve_data_config(model=student)
    theirs = resolve_data_config(model=teacher)
    if any(tuple(mine[name]) != tuple(theirs[name]) for name in ("mean", "std")):
        raise DclsConvertError(
            f"--teacher {args.teacher}: takes images with another mean and std than {args.model}"
        )
    return teacher


def draw(output: Path, history: dict[str, list[float]], measure: str) -> None:
    """Draw loss, accuracy or agreement, and the speed of the positions into `training.png`."""
    try:
        import matplotlib
    except ImportError:
        print("for pictures: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    track = tuning.read_track(output / "positions.jsonl")
    epochs = [record.step for record in track]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    axes[0].plot(history["loss"])
    axes[0].set(xlabel="update", ylabel="training loss")
    axes[1].plot(epochs, history[measure], marker=".")
    axes[1].set(xlabel="epoch", ylabel=f"{measure} (%)")
    axes[2].plot(epochs, [[row.speed for row in record.positions] for record in track])
    axes[2].set(xlabel="epoch", ylabel="speed of positions (cells per epoch)")
    axes[2].legend([row.name for row in track[-1].positions], fontsize=6)
    for axis in axes[1:]:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    figure.savefig(output / "training.png")
    pyplot.close(figure)


def main() -> None:
    args = parse_arguments()
    accelerator: Any = None
    try:
        recipe = tuning.Recipe(
            **{field.name: getattr(args, field.name) for field in fields(tuning.Recipe)}
        )
        from dcls_convert.tuning.distributed import accelerator_for
        from dcls_convert.tuning.training import Training
        from dcls_convert.tuning.training_state import STATE_FILE

        accelerator = accelerator_for(mixed_precision=args.mixed_precision)
        if (args.output / STATE_FILE).exists() and not args.resume:
            raise DclsConvertError(
                f"{args.output}: holds a run already; --resume continues it, --output names another"
            )
        data = load_data(args)
        model, plan = build_model(args, None if args.teacher else len(data.classes))
        teacher = build_teacher(args, model)
        set_transforms(data, model, args)
        training = Training(
            model,
            data,
            recipe,
            args.output,
            accelerator=accelerator,
            teacher=teacher,
            fsdp=args.fsdp,
            workers=args.workers,
            save_every=args.save_every,
            settings={
                name: getattr(args, name)
                for name in ("model", "dilated_size", "data", "teacher", "drop_path")
            },
        )
        measure = "agreement" if teacher else "accuracy"
        if teacher and not training.updates_done:
            accelerator.print(
                f"before: agreement {100 * float(training.test().double().mean()):.2f} %",
                flush=True,
            )

        def after_epoch(training: Training) -> None:
            epoch = len(training.top1)
            loss = float(np.mean(training.loss[-training.updates_per_epoch :]))
            seconds = training.epoch_seconds[-1]
            top1 = f"{measure} {training.top1[-1]:.2f} %"
            line = f"epoch {epoch:3d}/{args.epochs}: loss {loss:.4f}, {top1}"
            accelerator.print(f"{line}, {seconds:.0f} s", flush=True)
            # If epochs are equally good, keep the last, which was trained the longest.
            if training.top1[-1] >= max(training.top1):
                trained = training.trained_model()
                if accelerator.is_main_process:
                    save_trained(trained, plan, args.output / "best")

        training.run(after_epoch)
    except DclsConvertError as error:
        if accelerator is None or accelerator.is_main_process:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if accelerator.is_main_process:
        history = {"loss": training.loss, measure: training.top1}
        (args.output / "history.json").write_text(json.dumps(history) + "\n")
        draw(args.output, history, measure)
        print(f"best {measure} {max(training.top1):.2f} %: {args.output / 'best'}")
    accelerator.wait_for_everyone()  # no process may end before the folder is written
    accelerator.end_training()


if __name__ == "__main__":
    main()
