"""A comparison by training, as tables and sentences, and as a page of curves."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group

from ..compare.answer import LEVEL, ArmResult, Interval
from ..compare.comparison import Comparison
from ..compare.run_plan import RunPlan
from ..compare.settings import Settings
from ..compare.trainer import run_folder
from ..tables import Column, Table, indented, title
from ..text import count_text
from ..tuning.tracker import TRACK_FILE
from .history import read_history
from .number_text import short_count, with_separators
from .page import filled_page

MINUTE = 60  # seconds
HOUR = 3600  # seconds
MAX_NAMED_RUNS = 4  # number of missing runs that are named


def comparison_view(comparison: Comparison) -> Group:
    """Return tables of costs and accuracies, a sentence for each arm, and the missing runs."""
    settings = comparison.settings
    seeds = len({run.seed for run in comparison.runs})
    extent = f"  {count_text(settings.recipe.epochs, 'epoch')}, {count_text(seeds, 'seed')}"
    lines = _sentences(comparison)
    if comparison.missing:
        lines.append(_missing_runs(comparison.missing))
    if comparison.interrupted:
        lines.append("Interrupted: the same command continues with the missing runs.")
    return Group(
        title(settings.model, extent),
        "",
        Table(COST_COLUMNS, comparison.arms),
        "",
        Table(ACCURACY_COLUMNS, comparison.arms),
        "",
        Table(DETAIL_COLUMNS, comparison.arms),
        "",
        *map(indented, lines),
        *map(indented, answer_notes(comparison)),
    )


def _sentences(comparison: Comparison) -> list[str]:
    return [arm.sentence for arm in comparison.arms if arm.sentence is not None]


def answer_notes(comparison: Comparison) -> list[str]:
    """Explain the answer and its statistics; [] if there is no answer."""
    if all(arm.p_value is None for arm in comparison.arms):
        return []
    correction = comparison.correction
    notes = [
        "difference ±: half width of the 95 % confidence interval over seeds and test images, "
        "not corrected for the number of conversions or looks.",
        "detectable: with these images and seeds, a difference of this many points would have "
        "been seen four times in five.",
    ]
    if correction.conversions > 1:
        notes.append(f"Claims are corrected for {correction.conversions} conversions (Holm).")
    if correction.looks > 1:
        notes.append(
            f"The number of seeds was changed after {count_text(correction.looks - 1, 'look')}, "
            f"so claims need a significance level of {100 * correction.level:.3g} %, "
            f"not {100 * LEVEL:g} %."
        )
    return notes


def _missing_runs(missing: Sequence[str]) -> str:
    named = "; ".join(missing[:MAX_NAMED_RUNS])
    if len(missing) > MAX_NAMED_RUNS:
        named += f"; and {len(missing) - MAX_NAMED_RUNS} more"
    return f"{count_text(len(missing), 'run')} missing: {named}"


def _top1(arm: ArmResult) -> str:
    """Return "76.12 ± 0.10", or "76.12" if there is only one seed."""
    if arm.top1_deviation is None:
        return f"{arm.top1:.2f}"
    return f"{arm.top1:.2f} ± {arm.top1_deviation:.2f}"


def _difference(arm: ArmResult) -> str:
    """Return "+1.20 ± 0.50", or "+1.20" if there are too few seeds for a half width."""
    assert arm.over_images is not None
    if arm.half_width is None:
        return f"{arm.over_images.mean:+.2f}"
    return f"{arm.over_images.mean:+.2f} ± {arm.half_width:.2f}"


def _half_width(interval: Interval) -> str:
    return f"± {interval.high - interval.mean:.2f}"


COST_COLUMNS: list[Column[ArmResult]] = [
    Column("network", lambda arm: arm.label),
    Column("parameters", lambda arm: arm.params, with_separators),
    Column("MACs", lambda arm: arm.macs, short_count),
    Column("ms a step", lambda arm: arm.step_ms, "{:.0f}".format),
    Column("images a second", lambda arm: arm.images_per_second, "{:.0f}".format),
    Column("peak MiB", lambda arm: arm.peak_mib, "{:,.0f}".format),
]
ACCURACY_COLUMNS: list[Column[ArmResult]] = [
    Column("network", lambda arm: arm.label),
    Column("before", lambda arm: arm.top1_before, "{:.2f}".format),
    Column("top-1 %", lambda arm: arm, _top1),
    Column("difference", lambda arm: arm if arm.over_images else None, _difference),
    Column("detectable", lambda arm: arm.detectable, "{:.1f}".format),
]
DETAIL_COLUMNS: list[Column[ArmResult]] = [
    Column("network", lambda arm: arm.label),
    Column("over seeds", lambda arm: arm.over_seeds, _half_width),
    Column("over images", lambda arm: arm.over_images, _half_width),
    Column("cells moved", lambda arm: arm.distance, "{:.2f}".format),
    Column("outside", lambda arm: arm.outside, "{:.0%}".format),
]
DIFFERENCES = "Differences are from the network as it is."


def work_lines(plan: RunPlan, settings: Settings, device: str) -> list[str]:
    """Return lines that say what will be trained, how long it will take, and with which recipe."""
    runs = count_text(len(plan.runs), "run")
    epochs = count_text(settings.recipe.epochs, "epoch")
    updates = count_text(plan.updates, "update")
    train = f"{settings.train_images:,} images to train on"
    test = f"{settings.test_images:,} to test with"
    return [
        f"{runs} of {epochs} of {updates} on {device}: about {duration(plan.seconds)}",
        f"{train}, {test}, {settings.classes:,} classes",
        recipe_line(settings),
    ]


def recipe_line(settings: Settings) -> str:
    """Return the recipe of all runs, in one line."""
    recipe = settings.recipe
    weights = f"weights from {settings.weights}"
    if settings.weights == "random":
        weights = "from scratch"
    elif settings.weights == "pretrained":
        weights = "pretrained weights"
    parts = [
        f"{weights}; AdamW",
        f"lr {recipe.lr:g}",
        f"batch size {recipe.batch_size}",
        f"positions at {recipe.position_lr_scale:g}x lr",
        f"weight decay {recipe.weight_decay:g}",
        f"{recipe.sched} after {count_text(recipe.warmup_epochs, 'epoch')} of warm-up",
        f"label smoothing {recipe.smoothing:g}",
        f"gradients clipped at {recipe.clip_grad:g}",
        f"{settings.augmentation} augmentation",
        f"{settings.mixed_precision or 'no'} mixed precision",
    ]
    if settings.augmentation != "none":
        parts.insert(-1, f"{100 * settings.mirrored:g} % of the images mirrored")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return "45 s", "12 min" or "1 h 52 min"."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / MINUTE), HOUR // MINUTE)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min"


def comparison_page(comparison: Comparison, folder: Path) -> str:
    """Return the page of all runs, with the moving positions of one run per converted network.

    Args:
        comparison: What to show.
        folder: The comparison's folder, which holds the records of positions.
    """
    settings = comparison.settings
    runs = comparison.runs
    seeds = sorted({run.seed for run in runs})
    facts = {
        "Epochs": str(settings.recipe.epochs),
        "Seeds": str(len(seeds)),
        "Images to train on": with_separators(settings.train_images),
        "Images to test with": with_separators(settings.test_images),
        "Classes": with_separators(settings.classes),
    }
    labels = [arm.label for arm in comparison.arms]
    run_indices = []  # of each run's network in `labels`, and of its seed in `seeds`
    for run in runs:
        network = labels.index(run.arm.label)
        run_indices.append({"network": network, "seed": seeds.index(run.seed)})
    content = {
        "title": f"{settings.model}: does DCLS help?",
        "subtitle": recipe_line(settings),
        "facts": list(facts.items()),
        "comparison": {
            "sentences": _sentences(comparison),
            "notes": [DIFFERENCES, *answer_notes(comparison)],
            "tables": [
                _page_table(comparison, COST_COLUMNS),
                _page_table(comparison, ACCURACY_COLUMNS),
                _page_table(comparison, DETAIL_COLUMNS),
            ],
            "networks": labels,
            "seeds": seeds,
            "runs": run_indices,
            "epochs": list(range(1, settings.recipe.epochs + 1)),
            "charts": [
                {"title": "Top-1 accuracy", "unit": "%", "lines": [run.top1 for run in runs]},
                {"title": "Training loss", "unit": "nats", "lines": [run.loss for run in runs]},
            ],
        },
        "histories": _histories(comparison, folder),
    }
    return filled_page(content)


def _page_table(comparison: Comparison, columns: list[Column[ArmResult]]) -> dict[str, Any]:
    headings, rows = Table(columns, comparison.arms).cells()
    return {"headings": headings, "rows": rows}


def _histories(comparison: Comparison, folder: Path) -> list[dict[str, Any]]:
    """Return the positions of each converted network's first run, if they were recorded."""
    histories = []
    for arm in comparison.arms:
        run = next(run for run in comparison.runs if run.arm.label == arm.label)
        track = run_folder(folder, run.arm, run.seed) / TRACK_FILE
        if run.moved is not None and track.exists():
            heading = f"Positions of {arm.label}, seed {run.seed}"
            histories.append({"title": heading, **asdict(read_history(track))})
    return histories
