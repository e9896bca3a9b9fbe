"""A comparison by training, as tables and sentences, and as a page of curves."""

from collections.abc import Sequence

from rich.console import Group

from ..compare.answer import LEVEL, ArmResult, Interval
from ..compare.comparison import Comparison
from ..compare.run_plan import RunPlan
from ..compare.settings import Settings
from ..tables import Column, Table, indented, title
from ..text import count_text
from .number_text import short_count, with_separators

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
