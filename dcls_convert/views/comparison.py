"""A comparison by training: tables and a sentence for each arm, its recipe, and a page with its curves."""

from dataclasses import asdict
from pathlib import Path

from rich.console import Group

from ..compare.answer import ArmResult, Interval
from ..compare.comparison import Comparison, Work
from ..compare.runs import RUNS, Settings
from ..tables import Column, Table, counted, indented, title
from ..tuning.tracker import TRACK
from .counts import exact, short_count
from .history import read_history
from .page import filled_page

MINUTE, HOUR = 60, 3600
SOME = 4  # of the missing runs are named


def comparison_view(comparison: Comparison) -> Group:
    settings = comparison.settings
    seeds = len({run.seed for run in comparison.runs})
    more = f"  {counted(settings.recipe.epochs, 'epoch')}, {counted(seeds, 'seed')}"
    lines = [one.sentence for one in comparison.arms if one.sentence is not None]
    if comparison.missing:
        more = f"; and {len(comparison.missing) - SOME} more" * (len(comparison.missing) > SOME)
        some = "; ".join(comparison.missing[:SOME]) + more
        lines.append(f"{counted(len(comparison.missing), 'run')} missing: {some}")
    if comparison.interrupted:
        lines.append("Interrupted: the same command goes on with what is missing.")
    tables = (Table(COSTS, comparison.arms), "", Table(ACCURACIES, comparison.arms))
    return Group(title(settings.model, more), "", *tables, "", *map(indented, lines))


def _top1(arm: ArmResult) -> str:
    return f"{arm.top1:.2f}" + (
        "" if arm.top1_deviation is None else f" ± {arm.top1_deviation:.2f}"
    )


def _bounds(interval: Interval) -> str:
    return f"[{interval.low:+.2f}, {interval.high:+.2f}]"


COSTS: list[Column[ArmResult]] = [
    Column("network", lambda arm: arm.label),
    Column("parameters", lambda arm: arm.params, exact),
    Column("MACs", lambda arm: arm.macs, short_count),
    Column("ms a step", lambda arm: arm.step_ms, "{:.0f}".format),
    Column("images a second", lambda arm: arm.images_per_second, "{:.0f}".format),
    Column("peak MiB", lambda arm: arm.peak_mib, "{:,.0f}".format),
]
ACCURACIES: list[Column[ArmResult]] = [
    Column("network", lambda arm: arm.label),
    Column("top-1 %", lambda arm: arm, _top1),
    Column("difference", lambda arm: arm.over_images and arm.over_images.mean, "{:+.2f}".format),
    Column("over seeds", lambda arm: arm.over_seeds, _bounds),
    Column("over images", lambda arm: arm.over_images, _bounds),
    Column("cells moved", lambda arm: arm.distance, "{:.2f}".format),
    Column("outside", lambda arm: arm.outside, "{:.0%}".format),
]
DIFFERENCES = "Differences are to the network as it is, with 95 % intervals over seeds and over the images to test."


def work_lines(work: Work, settings: Settings, device: str) -> list[str]:
    """What will be done, how long it will take, and by which recipe."""
    per_run = f"{counted(settings.recipe.epochs, 'epoch')} of {counted(work.updates, 'update')}"
    what = (
        f"{counted(len(work.runs), 'run')} of {per_run} on {device}: about {duration(work.seconds)}"
    )
    data = f"{settings.train_images:,} images to train on, {settings.test_images:,} to test with"
    return [what, f"{data}, {settings.classes:,} classes", recipe_line(settings)]


def recipe_line(settings: Settings) -> str:
    recipe = settings.recipe
    weights = "from scratch" if settings.weights == "random" else f"from {settings.weights} weights"
    return (
        f"{weights}; AdamW, lr {recipe.lr:g} for batches of {recipe.batch_size}, positions "
        f"{recipe.position_lr_scale:g} times, weight decay {recipe.weight_decay:g}, {recipe.sched} after "
        f"{counted(recipe.warmup_epochs, 'epoch')} of warm-up, label smoothing {recipe.smoothing:g}, "
        f"gradients clipped at {recipe.clip_grad:g}, "
        f"{settings.augmentation} augmentation, {settings.mixed_precision or 'no'} mixed precision"
    )


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "1 h 52 min"."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / MINUTE), HOUR // MINUTE)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def comparison_page(comparison: Comparison, folder: Path) -> str:
    """The page of all runs; of each converted network, its first run's positions move in it."""
    settings, runs = comparison.settings, comparison.runs
    labels, seeds = [arm.label for arm in comparison.arms], sorted({run.seed for run in runs})
    inks = [
        labels.index(run.arm.label) + 8 * seeds.index(run.seed) for run in runs
    ]  # colours and dashes
    charts = [
        {"title": "Top-1 accuracy", "unit": "%", "lines": [run.top1 for run in runs]},
        {"title": "Training loss", "unit": "nats", "lines": [run.loss for run in runs]},
    ]
    tables = [Table(columns, comparison.arms).cells() for columns in (COSTS, ACCURACIES)]
    histories = []
    for arm in comparison.arms:
        run = next(run for run in runs if run.arm.label == arm.label)
        track = folder / RUNS / f"{run.arm.file_name}-seed{run.seed}" / TRACK
        if run.moved is not None and track.exists():
            histories.append(
                {
                    "title": f"Positions of {arm.label}, seed {run.seed}",
                    **asdict(read_history(track)),
                }
            )
    facts = {
        "Epochs": settings.recipe.epochs,
        "Seeds": len(seeds),
        "Images to train on": exact(settings.train_images),
    }
    facts |= {
        "Images to test with": exact(settings.test_images),
        "Classes": exact(settings.classes),
    }
    content = {
        "title": f"{settings.model}: does DCLS help?",
        "subtitle": recipe_line(settings),
        "facts": [[name, str(value)] for name, value in facts.items()],
        "comparison": {
            "sentences": [arm.sentence for arm in comparison.arms if arm.sentence is not None],
            "notes": [DIFFERENCES],
            "tables": [{"headings": headings, "rows": rows} for headings, rows in tables],
            "legend": labels,
            "names": [f"{run.arm.label}, seed {run.seed}" for run in runs],
            "inks": inks,
            "epochs": list(range(1, settings.recipe.epochs + 1)),
            "charts": charts,
        },
        "histories": histories,
    }
    return filled_page(content)
