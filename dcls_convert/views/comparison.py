"""A comparison by training as a table, a sentence for each arm, and what it was made by."""

from rich.console import Group

from ..compare.answer import ArmResult, Interval
from ..compare.comparison import Comparison, Work
from ..compare.runs import Settings
from ..tables import Column, Table, counted, indented, title
from .counts import exact, short_count

MINUTE, HOUR = 60, 3600


def comparison_view(comparison: Comparison) -> Group:
    settings = comparison.settings
    seeds = len({run.seed for run in comparison.runs})
    more = f"  {counted(settings.recipe.epochs, 'epoch')}, {counted(seeds, 'seed')}"
    lines = [one.sentence for one in comparison.arms if one.sentence is not None]
    if comparison.missing:
        lines.append(f"{counted(len(comparison.missing), 'run')} missing: {'; '.join(comparison.missing[:4])}")
    tables = (cost_table(comparison.arms), "", accuracy_table(comparison.arms))
    return Group(title(settings.model, more), "", *tables, "", *map(indented, lines))


def cost_table(arms: tuple[ArmResult, ...]) -> Table[ArmResult]:
    columns: list[Column[ArmResult]] = [
        Column("network", lambda arm: arm.label),
        Column("parameters", lambda arm: arm.params, exact),
        Column("MACs", lambda arm: arm.macs, short_count),
        Column("ms a step", lambda arm: arm.step_ms, "{:.0f}".format),
        Column("images a second", lambda arm: arm.images_per_second, "{:.0f}".format),
        Column("peak MiB", lambda arm: arm.peak_mib, "{:,.0f}".format),
    ]
    return Table(columns=columns, rows=arms)


def accuracy_table(arms: tuple[ArmResult, ...]) -> Table[ArmResult]:
    """Differences are to the network as it is, with 95 % intervals over seeds and over the images to test."""
    columns: list[Column[ArmResult]] = [
        Column("network", lambda arm: arm.label),
        Column("top-1 %", lambda arm: arm, _top1),
        Column("difference", lambda arm: arm.over_images and arm.over_images.mean, "{:+.2f}".format),
        Column("over seeds", lambda arm: arm.over_seeds, _bounds),
        Column("over images", lambda arm: arm.over_images, _bounds),
        Column("cells moved", lambda arm: arm.distance, "{:.2f}".format),
        Column("outside", lambda arm: arm.outside, "{:.0%}".format),
    ]
    return Table(columns=columns, rows=arms)


def _top1(arm: ArmResult) -> str:
    return f"{arm.top1:.2f}" + ("" if arm.top1_deviation is None else f" ± {arm.top1_deviation:.2f}")


def _bounds(interval: Interval) -> str:
    return f"[{interval.low:+.2f}, {interval.high:+.2f}]"


def work_lines(work: Work, settings: Settings, device: str) -> list[str]:
    """What will be done, how long it will take, and by which recipe."""
    recipe = settings.recipe
    per_run = f"{counted(work.epochs, 'epoch')} of {counted(work.updates, 'update')}"
    what = f"{counted(len(work.runs), 'run')} of {per_run} on {device}: about {duration(work.seconds)}"
    data = f"{settings.train_images:,} images to train on, {settings.test_images:,} to test with"
    weights = "from scratch" if settings.weights == "random" else f"from {settings.weights} weights"
    how = (
        f"AdamW, lr {recipe.lr:g} for batches of {recipe.batch_size}, positions {recipe.position_lr_scale:g} times, "
        f"weight decay {recipe.weight_decay:g}, {recipe.sched} after {counted(recipe.warmup_epochs, 'epoch')} of "
        f"warm-up, label smoothing {recipe.smoothing:g}, gradients clipped at {recipe.clip_grad:g}, "
        f"{settings.augmentation} augmentation, {settings.mixed_precision or 'no'} mixed precision"
    )
    return [what, f"{data}", f"{weights}; {how}"]


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "1 h 52 min"."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / MINUTE), HOUR // MINUTE)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
