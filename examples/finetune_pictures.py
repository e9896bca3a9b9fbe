"""The pictures of finetune.py."""

import sys
from pathlib import Path
from typing import Any

from torch import nn


def draw(output: Path, history: dict[str, list[float]], track: list[Any], model: nn.Module) -> None:
    """Loss, accuracy or agreement, the speed of the positions, and where they are at the end.

    Args:
        output: Folder that gets `training.png` and `positions.png`.
        history: "loss" by update, and a second curve by epoch, in percent.
        track: Records of `PositionTracker`, one an epoch.
        model: As it is at the end.
    """
    try:
        import matplotlib
    except ImportError:
        print("for pictures: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    names, steps = [row.name for row in track[-1].positions], [record.step for record in track]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    axes[0].plot(history["loss"])
    axes[0].set(xlabel="update", ylabel="training loss")
    (measure,) = history.keys() - {"loss"}
    axes[1].plot(steps, history[measure], marker=".")
    axes[1].set(xlabel="epoch", ylabel=f"{measure} (%)")
    axes[2].plot(steps, [[row.speed for row in record.positions] for record in track])
    axes[2].set(xlabel="epoch", ylabel="speed of positions (cells per epoch)")
    axes[2].legend(names, fontsize=6)
    for axis in axes[1:]:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    figure.savefig(output / "training.png")
    pyplot.close(figure)
    rows = [row for row in track[-1].positions if len(row.histograms) == 2]
    if not rows:
        return
    figure, axes = pyplot.subplots(1, len(rows), figsize=(3.3 * len(rows), 3.3), squeeze=False, layout="constrained")
    for axis, row in zip(axes[0], rows, strict=True):
        window = [(side.low, side.low + side.width * len(side.counts)) for side in row.histograms]  # rows, columns
        y, x = model.get_parameter(row.name).detach().flatten(1).numpy()
        axis.hist2d(x, y, bins=[4 * len(side.counts) for side in reversed(row.histograms)], range=window[::-1])
        axis.set_title(row.name, fontsize=6)
        axis.set(aspect="equal", xlabel="column", ylabel="row")
        axis.invert_yaxis()  # rows as in tensors, from the top
    figure.savefig(output / "positions.png", dpi=150)
    pyplot.close(figure)
