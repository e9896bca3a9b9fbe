"""`dcls-convert compare`: train a network as it is and converted, and say whether it helps."""

import functools
import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DclsConvertError, shown
from ..options import POSITION_LR_SCALE, POSITIONS, Augmentation, Positions
from ..output import new_file
from ..progress import Notify, silent
from . import console
from .arguments import OUTPUT, WHAT, WHERE, Json, Network, number, option, refuse, with_records
from .sweep import SIZES, stated

if TYPE_CHECKING:
    from ..compare.runs import Trainer

DATA = "Images"
TRAINING = "Training"
RUNNING = "How to run"
PACKAGES = ("accelerate", "scipy")  # of the extra `train`
PAGE = "comparison.html"
EPOCHS = 30
BATCH = 64
SEEDS = 3
# From the paper's start, elements hardly leave the centre in trainings as short as these.
START: Positions = "uniform"
MOST = 10**6
SECONDS_A_LINE = 60.0  # of progress, where stderr is no terminal
DATA_HELP = (
    "A folder for each class, or train and validation (or val) with these; "
    "with --dataset, where that lies."
)
DATASET_HELP = "A data set by timm's name: torch/cifar10, hfds/cifar10."
MINUTES_HELP = "For all runs together; decides the epochs, the same for all."
ABLATE_HELP = "Train with frozen positions, and with dense kernels of the window's size, too."
POSITIONS_HELP = (
    "Where they start, from scratch: normal, kernel or uniform, or several: normal,kernel."
)
OUTPUT_HELP = "Where runs lie; a second call goes on with those that are missing."
HTML_HELP = "Add a page with the curves of all runs, and positions moving."
ONLY_HELP = "Every N-th run, from the I-th on, for job arrays; all other calls use the same folder."


def _starts(text: str) -> list[Positions]:
    starts = text.split(",")
    if not set(starts) <= set(POSITIONS):
        raise typer.BadParameter(f"'{shown(text)}' is not some of {', '.join(POSITIONS)}")
    return list(dict.fromkeys(starts))  # type: ignore[arg-type]


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    part = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part[0] <= part[1]:
        raise typer.BadParameter(f"'{shown(text)}' is not a part such as 3/12")
    return part


def _count(help: str, panel: str, **settings: Any) -> Any:
    return number(int, 1, MOST, panel, help, metavar="N", **settings)


POSITION_RATE = number(
    float, 0, 1000, TRAINING, "Learning rate of positions, times that of weights.", metavar="X"
)
STARTS = option(WHERE, POSITIONS_HELP, metavar="P,P", parser=_starts, show_default=START)


@functools.partial(with_records, but=("dilated_size",))
def compare(
    network: Network,
    data: Annotated[Path | None, option(DATA, DATA_HELP, metavar="FOLDER")] = None,
    dataset: Annotated[str, option(DATA, DATASET_HELP, metavar="NAME", show_default=False)] = "",
    sizes: Annotated[Any, SIZES] = None,
    positions: Annotated[Any, STARTS] = None,
    ablate: Annotated[bool, option(WHAT, ABLATE_HELP, "--ablate")] = False,
    epochs: Annotated[
        int | None, _count("Of each run.", TRAINING, show_default=str(EPOCHS))
    ] = None,
    minutes: Annotated[int | None, _count(MINUTES_HELP, TRAINING)] = None,
    seeds: Annotated[
        int, _count("Runs of each network; three are the least that answer.", TRAINING)
    ] = SEEDS,
    batch_size: Annotated[int, _count("Images of an update, in each process.", TRAINING)] = BATCH,
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
    augmentation: Annotated[Augmentation, option(TRAINING, "Of images to train on.")] = "light",
    amp: Annotated[bool, option(RUNNING, "In bfloat16 autocast.", "--amp")] = False,
    device: Annotated[
        str | None,
        option(RUNNING, "As torch names it.", metavar="NAME", show_default="the first accelerator"),
    ] = None,
    workers: Annotated[
        int, number(int, 0, 1024, RUNNING, "Processes that load images.", metavar="N")
    ] = 0,
    fsdp: Annotated[
        bool, option(RUNNING, "Shard over the processes of accelerate launch (FSDP2).", "--fsdp")
    ] = False,
    only: Annotated[Any, option(RUNNING, ONLY_HELP, metavar="I/N", parser=_part)] = None,
    output: Annotated[Path, option(OUTPUT, OUTPUT_HELP, "--output", "-o", metavar="FOLDER")] = Path(
        "comparison"
    ),
    html: Annotated[bool, option(OUTPUT, HTML_HELP, "--html")] = False,
    json_: Json = False,
) -> None:
    """Train a network as it is and converted, side by side, and say whether it helps.

    All share weights that are not converted, images and their order, by seed. The answer has intervals over seeds.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    two_lengths = epochs is not None and minutes is not None
    refuse(
        (missing, f"compare needs packages: pip install {' '.join(missing)}"),
        (data is None and not dataset, "--data FOLDER or --dataset NAME says what to learn"),
        (two_lengths, "--epochs and --minutes exclude each other"),
        (
            positions and network.trained,
            "--positions is for random starts; trained kernels state their own",
        ),
        (output.exists() and not output.is_dir(), f"output {output}: is not a folder"),
    )
    network.check()
    first = os.environ.get("RANK", "0") == "0"  # of the processes of accelerate launch or torchrun
    with console.steps(
        network.model, "reading the images", quiet=not first, every=SECONDS_A_LINE
    ) as notify:
        from ..compare.arms import make_arms
        from ..compare.comparison import plan_runs, train_pending, usual_lr, with_epochs
        from ..tuning.recipe import Recipe
        from ..tuning.training import accelerator_for
        from ..views.comparison import comparison_page, comparison_view, work_lines

        accelerator = accelerator_for(device=device, mixed_precision="bf16" if amp else None)
        usual = usual_lr(batch_size * accelerator.num_processes, trained=network.trained)
        recipe = Recipe(
            batch_size=batch_size,
            lr=usual if lr is None else lr,
            position_lr_scale=position_lr_scale,
        )
        note = console.note if first else silent
        trainer = _trainer(network, data, dataset, recipe, augmentation, output, accelerator, note)
        trainer.settings = with_epochs(trainer.settings, epochs or EPOCHS)
        trainer.workers = workers
        trainer.fsdp = fsdp
        trainer.job.notify = notify
        starts = positions or ["normal" if network.trained else START]
        arms = make_arms(sizes or [None], starts, ablate=ablate)
        all_seeds = range(seeds)
        part = only or (1, 1)
        run_plan = plan_runs(trainer, arms, all_seeds, minutes=minutes, only=part, notify=notify)
        if first and run_plan.runs:
            for line in work_lines(run_plan, trainer.settings, str(accelerator.device)):
                console.note(line)
        comparison = train_pending(trainer, run_plan, arms, all_seeds, notify)
        if html and first:
            with new_file(output / PAGE, force=True) as partial:
                partial.write_text(comparison_page(comparison, output))
    if first and json_:
        console.write(comparison.to_json())
    elif first and html:
        console.show(comparison_view(comparison), f" Wrote {output / PAGE}.")
    elif first:
        console.show(comparison_view(comparison))
    if comparison.interrupted:
        raise KeyboardInterrupt


def _trainer(
    network: Network,
    data: Path | None,
    dataset: str,
    recipe: Any,
    augmentation: Augmentation,
    output: Path,
    accelerator: Any,
    note: Notify,
) -> "Trainer":
    """With the images opened, and the network's head made for their classes."""
    from ..compare.runs import Settings, Trainer
    from ..tuning.images import open_images

    images = open_images(data, dataset, classes=network.num_classes, note=note)
    if network.num_classes not in (None, len(images.classes)):
        raise DclsConvertError(
            f"--num-classes {network.num_classes}: the images have {len(images.classes)} classes"
        )
    network = replace(network, num_classes=len(images.classes))
    weights = "random"
    if network.pretrained:
        weights = "pretrained"
    elif network.checkpoint is not None:
        weights = network.checkpoint.name
    planning = {
        name: str(getattr(value, "source", value))
        for name, value in stated(network.options).items()
    }
    mixed_precision = accelerator.mixed_precision
    if mixed_precision == "no":
        mixed_precision = None
    job = network.job(note=note)
    assert job.source is not None
    settings = Settings(
        model=job.source.name,
        model_args=dict(job.source.args),
        weights=weights,
        planning=planning,
        data=dataset or str(data),
        classes=len(images.classes),
        train_images=len(images.train),
        test_images=len(images.test),
        input_size=None if network.input_size is None else tuple(network.input_size),
        augmentation=augmentation,
        recipe=recipe,
        mixed_precision=mixed_precision,
    )
    return Trainer(job=job, data=images, settings=settings, folder=output, accelerator=accelerator)
