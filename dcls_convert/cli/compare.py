"""`dcls-convert compare`: train a network as it is and converted, and say whether it helps."""

import functools
import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..conversion.request import ConversionRequest
from ..errors import DclsConvertError
from ..options import (
    MIRRORED_SHARE,
    POSITION_LR_SCALE,
    POSITIONS,
    WHAT_TO_CONVERT,
    Augmentation,
    Positions,
)
from ..progress import ignore_messages
from ..text import shortened
from . import console
from .network_options import NetworkOptions, changed_options, expand_options, refuse
from .output_name import folder_of_model
from .shared_options import Json
from .sweep import SIZES
from .typer_options import OUTPUT, RUNNING, WHERE, choice, number, option

if TYPE_CHECKING:
    from ..tuning.training_images import ImageData

DATA = "Images"
TRAINING = "Training"
PACKAGES = ("accelerate", "scipy")  # installed by the extra `train`
EPOCHS = 30
IMAGES_PER_UPDATE = 64
SEEDS = 3
# With the paper's start, elements hardly leave the centre in such a short training. A start that
# spreads them over the old kernel improved networks on average, over 12 pairs of runs:
# benchmarks/results.md, "Emoji, compared".
START: Positions = "kernel"
MAX_COUNTED = 10**6  # epochs, minutes, seeds, or images per update
DATA_HELP = (
    "Folder with one folder per class, or with train and validation (or val) folders that have "
    "these; with --dataset, where the data set is stored."
)
DATASET_HELP = "A data set by timm's name: torch/cifar10, hfds/cifar10."
MINUTES_HELP = "Time for all runs together; decides the number of epochs, the same for all runs."
SEEDS_HELP = "Runs per network (at least 3 for an answer). Adding seeds later makes claims harder."
ABLATE_HELP = "Also train with frozen positions, and with dense kernels of the window's size."
STARTS_HELP = (
    "Where elements start from scratch: normal, kernel or uniform, or several: normal,kernel."
)
OUTPUT_HELP = "Folder of the runs; calling again trains the missing ones."
ONLY_HELP = "Part I of N of the runs, for job arrays; the other parts use the same folder."


def _parse_starts(text: str) -> list[Positions]:
    starts = text.split(",")
    if not set(starts) <= set(POSITIONS):
        raise typer.BadParameter(f"'{shortened(text)}' is not some of {', '.join(POSITIONS)}")
    return list(dict.fromkeys(starts))  # type: ignore[arg-type]


def _parse_part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match:
        part = int(match[1])
        parts = int(match[2])
        if 1 <= part <= parts:
            return part, parts
    raise typer.BadParameter(f"'{shortened(text)}' is not a part such as 3/12")


def _count_option(panel: str, help: str, **settings: Any) -> Any:
    return number(int, 1, MAX_COUNTED, panel, help, metavar="N", **settings)


POSITION_RATE = number(
    float, 0, 1000, TRAINING, "Learning rate of positions, times that of weights.", metavar="X"
)
OUTPUT_OPTION = option(
    OUTPUT,
    OUTPUT_HELP,
    "--output",
    "-o",
    metavar="FOLDER",
    show_default="./MODEL-comparison",
)
HFLIP_OPTION = number(
    float,
    0,
    1,
    TRAINING,
    "Share of the images to train on that are mirrored; 0 for text and digits.",
    metavar="P",
    show_default=str(MIRRORED_SHARE),
)
STARTS_OPTION = option(WHERE, STARTS_HELP, metavar="P,P", parser=_parse_starts, show_default=START)


@functools.partial(expand_options, omit=("dilated_size",))
def compare(
    network_options: NetworkOptions,
    data: Annotated[Path | None, option(DATA, DATA_HELP, metavar="FOLDER")] = None,
    dataset: Annotated[str, option(DATA, DATASET_HELP, metavar="NAME", show_default=False)] = "",
    sizes: Annotated[Any, SIZES] = None,
    positions: Annotated[Any, STARTS_OPTION] = None,
    ablate: Annotated[bool, option(WHAT_TO_CONVERT, ABLATE_HELP, "--ablate")] = False,
    epochs: Annotated[
        int | None, _count_option(TRAINING, "Epochs per run.", show_default=str(EPOCHS))
    ] = None,
    minutes: Annotated[int | None, _count_option(TRAINING, MINUTES_HELP)] = None,
    seeds: Annotated[int, _count_option(TRAINING, SEEDS_HELP)] = SEEDS,
    batch_size: Annotated[
        int, _count_option(TRAINING, "Images per update and process.")
    ] = IMAGES_PER_UPDATE,
    lr: Annotated[
        float | None,
        number(
            float,
            0,
            1000,
            TRAINING,
            "Learning rate.",
            metavar="X",
            show_default="by batch size and weights",
        ),
    ] = None,
    position_lr_scale: Annotated[float, POSITION_RATE] = POSITION_LR_SCALE,
    augmentation: Annotated[
        Augmentation, choice(Augmentation, TRAINING, "Augmentation of the images to train on.")
    ] = "light",
    hflip: Annotated[float | None, HFLIP_OPTION] = None,
    amp: Annotated[bool, option(RUNNING, "Use bfloat16 autocast.", "--amp")] = False,
    device: Annotated[
        str | None,
        option(
            RUNNING, "Device, e.g. cuda:0.", metavar="NAME", show_default="the first accelerator"
        ),
    ] = None,
    workers: Annotated[
        int, number(int, 0, 1024, RUNNING, "Processes that load images.", metavar="N")
    ] = 0,
    fsdp: Annotated[
        bool, option(RUNNING, "Shard over the processes of accelerate launch (FSDP2).", "--fsdp")
    ] = False,
    only: Annotated[Any, option(RUNNING, ONLY_HELP, metavar="I/N", parser=_parse_part)] = None,
    output: Annotated[Path | None, OUTPUT_OPTION] = None,
    json_: Json = False,
) -> None:
    """Train a network and its conversions side by side, and say whether converting helps.

    Networks with the same seed share all weights that are not converted, and see the same images
    in the same order. The answer has intervals over seeds.
    """
    if output is None:
        output = folder_of_model(network_options.model, "-comparison")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    two_lengths = epochs is not None and minutes is not None
    refuse(
        (missing, f"compare needs packages: pip install {' '.join(missing)}"),
        (data is None and not dataset, "give --data FOLDER or --dataset NAME"),
        (two_lengths, "--epochs and --minutes exclude each other"),
        (
            positions and network_options.trained,
            "--positions is for random starts; trained kernels state their own",
        ),
        (
            hflip is not None and augmentation == "none",
            "--hflip has no effect with --augmentation none",
        ),
        (output.exists() and not output.is_dir(), f"output {output}: is not a folder"),
    )
    request = network_options.request()
    # RANK is set by accelerate launch and torchrun: the number of the process.
    first_process = os.environ.get("RANK", "0") == "0"
    with console.steps(network_options.model, "planning", quiet=not first_process) as notify:
        from ..compare.arms import check_arms, make_arms
        from ..compare.comparison import train_pending
        from ..compare.run_plan import plan_runs_
        from ..compare.settings import recipe_for, settings_for
        from ..compare.trainer import Trainer
        from ..tuning.distributed import accelerator_for
        from ..tuning.training_images import open_images
        from ..views.comparison import comparison_view, work_lines

        note = console.note if first_process else ignore_messages
        accelerator = accelerator_for(device=device, mixed_precision="bf16" if amp else None)
        starts = positions or ["normal" if network_options.trained else START]
        arms = make_arms(sizes or [None], starts, ablate=ablate)
        check_arms(request, arms)
        notify("reading the images")
        images = open_images(data, dataset, classes=network_options.num_classes, note=note)
        request = _with_classes_of(images, request)
        recipe = recipe_for(
            epochs=epochs or EPOCHS,
            batch_size=batch_size,
            lr=lr,
            position_lr_scale=position_lr_scale,
            processes=accelerator.num_processes,
            trained=network_options.trained,
        )
        settings = settings_for(
            request,
            images,
            data=data,
            dataset=dataset,
            planning=changed_options(request.options),
            augmentation=augmentation,
            mirrored=MIRRORED_SHARE if hflip is None else hflip,
            recipe=recipe,
            mixed_precision=accelerator.mixed_precision,
            seeds=seeds,
        )
        trainer = Trainer(
            request=request,
            data=images,
            settings=settings,
            folder=output,
            accelerator=accelerator,
            workers=workers,
            fsdp=fsdp,
            note=note,
        )
        all_seeds = range(seeds)
        part = only or (1, 1)
        run_plan = plan_runs_(trainer, arms, all_seeds, minutes=minutes, only=part, notify=notify)
        if first_process and run_plan.runs:
            for line in work_lines(run_plan, trainer.settings, str(accelerator.device)):
                console.note(line)
        comparison = train_pending(trainer, run_plan, arms, all_seeds, notify)
    if first_process and json_:
        console.write(comparison.to_json())
    elif first_process:
        console.show(comparison_view(comparison))
    if comparison.interrupted:
        raise KeyboardInterrupt


def _with_classes_of(images: "ImageData", request: ConversionRequest) -> ConversionRequest:
    """Return the request for a network whose head has the images' classes."""
    classes = len(images.classes)
    if request.num_classes not in (None, classes):
        raise DclsConvertError(
            f"--num-classes {request.num_classes}: the images have {classes} classes"
        )
    return replace(request, num_classes=classes)
