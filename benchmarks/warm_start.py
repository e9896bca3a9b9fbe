"""Measure what a warm start is worth.

    python benchmarks/warm_start.py [--seeds N] [--steps N] [--table]

A ConvNeXt of two stages is trained on scikit-learn's digits, scaled to 32 x 32, and converted from
7x7 kernels to windows of 13, as its stages have 16 x 16 and 8 x 8 cells (the fit itself does not
depend on the window, since it keeps elements within the old kernel). The starts of `convert_` are
compared at equal parameters: random, the largest elements, the fit, and the fit calibrated on 256
training images; the last three also at half the budget, where more is lost. For each start, the
measures are the relative error of the kernels, accuracy right after conversion, and accuracy during
the same fine-tuning, which the unconverted network gets, too. Accuracy on the test images is
measured every 10 steps; "steps to regain" is the first time that it is at least that of the network
before conversion. Results go to benchmarks/results/warm_start.json.
"""

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import small
import torch
from measuring import markdown_table
from sklearn.datasets import load_digits
from small import Settings
from torch import nn

import dcls_convert

SIDE = 32  # pixels
WINDOW = 13  # cells
TEST_IMAGES = 450
CALIBRATION_IMAGES = 256
SETTINGS: Settings = {
    "depths": [2, 2],
    "dims": [32, 64],
    "batch": 32,
    "steps": 800,
    "lr": 4e-3,
    "fine_tuning_steps": 400,
    "fine_tuning_lr": 5e-4,
    "looks_every": 10,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How the trained network is converted."""

    init: str  # of `convert_`
    calibrated: bool = False
    halved: bool = False  # half the budget

    @property
    def name(self) -> str:
        parts = [self.init]
        if self.calibrated:
            parts.append("calibrated")
        if self.halved:
            parts.append("half the budget")
        return ", ".join(parts)


RANDOM = Start(init="random")
LARGEST = Start(init="largest")
FIT = Start(init="fit")
CALIBRATED_FIT = Start(init="fit", calibrated=True)
HALVED_LARGEST = Start(init="largest", halved=True)
HALVED_FIT = Start(init="fit", halved=True)
HALVED_CALIBRATED_FIT = Start(init="fit", calibrated=True, halved=True)
STARTS = (
    RANDOM,
    LARGEST,
    FIT,
    CALIBRATED_FIT,
    HALVED_LARGEST,
    HALVED_FIT,
    HALVED_CALIBRATED_FIT,
)
SHOWN_BY_LAYER = (LARGEST, FIT, CALIBRATED_FIT)
CONTROL = "dense, not converted"  # in place of a start's name


def digits(seed: int) -> tuple[small.Data, small.Data]:
    """Return training and test images (N, 1, SIDE, SIDE), roughly normalised, split by the seed."""
    images, classes = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = (images.float().reshape(-1, 1, 8, 8) - 5) / 6
    images = nn.functional.interpolate(
        images, size=(SIDE, SIDE), mode="bilinear", align_corners=False
    )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test = order[:TEST_IMAGES]
    train = order[TEST_IMAGES:]
    return (images[train], classes[train]), (images[test], classes[test])


def batches(data: small.Data, size: int, generator: torch.Generator) -> Iterator[small.Data]:
    """Yield batches moved by up to 3 pixels, so that there is something left to learn."""
    images, classes = data
    while True:
        for part in torch.randperm(len(images), generator=generator).split(size):
            rows, columns = torch.randint(-3, 4, (2,), generator=generator).tolist()
            moved = images[part].roll((rows, columns), (2, 3))
            yield moved.contiguous(memory_format=torch.channels_last), classes[part]


def train_dense(train: small.Data, seed: int, settings: Settings) -> tuple[nn.Module, float]:
    """Train a network; return it, and how far its kernels moved, relative to their first norm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small.small_convnext(
            in_channels=1, classes=10, depths=settings["depths"], dims=settings["dims"]
        )
    before = kernels(model)
    small.train_(
        model,
        batches(train, settings["batch"], torch.Generator().manual_seed(seed)),
        steps=settings["steps"],
        lr=settings["lr"],
    )
    return model, float((kernels(model) - before).norm() / before.norm())


def kernels(model: nn.Module) -> torch.Tensor:
    """Return all values of the depthwise kernels in one vector."""
    return torch.cat(
        [
            conv.weight.detach().flatten().clone()
            for conv in model.modules()
            if isinstance(conv, nn.Conv2d) and conv.groups > 1
        ]
    )


def convert(
    dense: nn.Module, start: Start, images: torch.Tensor, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the converted network, and the entries of its row about the conversion."""
    model = copy.deepcopy(dense)
    begun = time.perf_counter()
    calibration = None
    if start.calibrated:
        calibration = dcls_convert.Calibration(batches=(images[:CALIBRATION_IMAGES],))
    report = dcls_convert.convert_(
        model,
        dilated_size=WINDOW,
        init=start.init,  # type: ignore[arg-type]
        calibration=calibration,
        budget=50.0 if start.halved else 100.0,
        input_size=(1, SIDE, SIDE),
        seed=seed,
    )
    row: dict[str, Any] = {"kernel_count": report.layers[0].kernel_count}
    row["seconds_to_convert"] = round(time.perf_counter() - begun, 2)
    if start.init != "random":
        row["kernel_errors"] = {layer.name: layer.fit_error for layer in report.layers}
    return model, row


def fine_tune_(
    model: nn.Module,
    train: small.Data,
    test: small.Data,
    accuracy_before: float,
    seed: int,
    settings: Settings,
) -> dict[str, Any]:
    """Fine-tune; return the accuracy over steps, and the first step that regains the one before.

    The step is None if the accuracy is never regained.
    """
    curve = {0: small.accuracy(model, test)}

    def measure_accuracy(step: int) -> None:
        if step % settings["looks_every"] == 0:
            curve[step] = small.accuracy(model, test)

    small.train_(
        model,
        batches(train, settings["batch"], torch.Generator().manual_seed(100 + seed)),
        steps=settings["fine_tuning_steps"],
        lr=settings["fine_tuning_lr"],
        warm_up=10,
        after_step=measure_accuracy,
    )
    regained = next((step for step, value in curve.items() if value >= accuracy_before), None)
    return {
        "after_conversion": curve[0],
        "after_fine_tuning": curve[max(curve)],
        "regained": regained,
        "curve": curve,
    }


def measure(seed: int, settings: Settings) -> Iterator[dict[str, Any]]:
    train, test = digits(seed)
    dense, moved = train_dense(train, seed, settings)
    before = small.accuracy(dense, test)

    def fine_tuned(name: str, model: nn.Module, row: dict[str, Any]) -> dict[str, Any]:
        row |= {"start": name, "params": small.parameter_count(model), "before": before}
        return row | fine_tune_(model, train, test, before, seed, settings)

    yield fine_tuned(CONTROL, copy.deepcopy(dense), {"kernels_moved": moved})
    for start in STARTS:
        model, row = convert(dense, start, train[0], seed)
        yield fine_tuned(start.name, model, row)


def mean_error(row: dict[str, Any]) -> float:
    return statistics.fmean(row["kernel_errors"].values())


Rows = dict[str, list[dict[str, Any]]]  # by the name of the start


def table(result: dict[str, Any]) -> Iterator[str]:
    """Yield Markdown: a line for each start, the errors layer by layer, and ratios of errors."""
    rows: Rows = defaultdict(list)
    for row in result["rows"]:
        rows[row["start"]].append(row)
    yield table_of_starts(rows)
    yield ""
    yield table_of_layers(rows)
    yield ""
    for fit, largest, budget in (
        (FIT, LARGEST, ""),
        (HALVED_FIT, HALVED_LARGEST, ", half the budget"),
    ):
        pairs = zip(rows[fit.name], rows[largest.name], strict=True)
        ratios = [mean_error(fit_row) / mean_error(largest_row) for fit_row, largest_row in pairs]
        ratio = small.mean_and_spread(ratios, 3)
        yield f"Mean kernel error of the fit over that of keeping the largest{budget}: {ratio}."


def table_of_starts(rows: Rows) -> str:
    header = [
        "start",
        "parameters",
        "elements",
        "kernel error",
        "accuracy before, %",
        "after conversion",
        "after fine-tuning",
        "steps to regain",
    ]
    lines = []
    for start, members in rows.items():
        errors = ""
        if "kernel_errors" in members[0]:
            errors = small.mean_and_spread([mean_error(row) for row in members], 3)
        accuracies = [
            small.mean_and_spread([row[key] for row in members])
            for key in ("before", "after_conversion", "after_fine_tuning")
        ]
        regained = ["never" if row["regained"] is None else row["regained"] for row in members]
        lines.append(
            [
                start,
                f"{members[0]['params']:,}",
                str(members[0].get("kernel_count", 49)),
                errors,
                *accuracies,
                ", ".join(map(str, regained)),
            ]
        )
    return markdown_table(header, lines, align_right=False)


def table_of_layers(rows: Rows) -> str:
    lines = []
    for layer in rows[FIT.name][0]["kernel_errors"]:
        errors = {}
        for start in SHOWN_BY_LAYER:
            errors[start] = [row["kernel_errors"][layer] for row in rows[start.name]]
        cells = [small.mean_and_spread(values, 3) for values in errors.values()]
        pairs = zip(errors[FIT], errors[LARGEST], strict=True)
        ratios = [fit / largest for fit, largest in pairs]
        lines.append([layer, *cells, small.mean_and_spread(ratios, 2)])
    names = [start.name for start in SHOWN_BY_LAYER]
    header = ["layer", *names, "fit over largest"]
    return markdown_table(header, lines, align_right=False)


if __name__ == "__main__":
    small.main(__doc__, "warm_start.json", measure, SETTINGS, table)
