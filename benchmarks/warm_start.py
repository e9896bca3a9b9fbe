"""What a warm start is worth: python benchmarks/warm_start.py [--seeds N] [--steps N] [--table]

A ConvNeXt of two stages is trained on scikit-learn's digits, scaled to 32 x 32, and converted from
7x7 kernels to windows of 13, as its stages have 16 x 16 and 8 x 8 cells (the fit itself does not
depend on the window, since it keeps elements within the old kernel). Compared at equal parameters
are the starts of `convert_`: random, the largest elements, the fit, and the fit calibrated on 256
training images; the last three also at half the budget, where more is lost. For each: the relative
error of the kernels, accuracy right after conversion, and accuracy over an equal fine-tuning, which
the unconverted network gets too. "Steps to regain" is the first look, one every 10 steps, at which
the accuracy on the test images is that of the network before conversion, or more. Results go to
benchmarks/results/warm_start.json.
"""

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import small
import torch
from sklearn.datasets import load_digits
from torch import nn

import dcls_convert

SIDE = 32  # pixels
WINDOW = 13  # cells
TEST_IMAGES = 450
CALIBRATION_IMAGES = 256
SETTINGS: dict[str, Any] = {
    "depths": [2, 2],
    "dims": [32, 64],
    "batch": 32,
    "steps": 800,
    "lr": 4e-3,
    "fine_tuning_steps": 400,
    "fine_tuning_lr": 5e-4,
    "looks_every": 10,
}
CALIBRATED = ", calibrated"
HALF = ", half the budget"
STARTS = (
    "random",
    "largest",
    "fit",
    "fit" + CALIBRATED,
    "largest" + HALF,
    "fit" + HALF,
    "fit" + CALIBRATED + HALF,
)
FITTED = STARTS[1:4]  # shown layer by layer
CONTROL = "dense, not converted"


def digits(seed: int) -> tuple[small.Data, small.Data]:
    """Training and test images (N, 1, SIDE, SIDE) of about unit size, split by the seed."""
    images, classes = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = (images.float().reshape(-1, 1, 8, 8) - 5) / 6
    images = nn.functional.interpolate(
        images, size=(SIDE, SIDE), mode="bilinear", align_corners=False
    )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], classes[train]), (images[test], classes[test])


def batches(data: small.Data, generator: torch.Generator) -> Iterator[small.Data]:
    """Each image moved by up to 3 pixels, so that there is something left to learn."""
    images, classes = data
    while True:
        for part in torch.randperm(len(images), generator=generator).split(SETTINGS["batch"]):
            rows, columns = torch.randint(-3, 4, (2,), generator=generator).tolist()
            moved = images[part].roll((rows, columns), (2, 3))
            yield moved.contiguous(memory_format=torch.channels_last), classes[part]


def train_dense(train: small.Data, seed: int) -> tuple[nn.Module, float]:
    """The trained network, and how far its kernels have moved from their initial values, over the
    latter's norm.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small.small_convnext(
            in_channels=1, classes=10, depths=SETTINGS["depths"], dims=SETTINGS["dims"]
        )
    before = kernels(model)
    small.train_(
        model,
        batches(train, torch.Generator().manual_seed(seed)),
        steps=SETTINGS["steps"],
        lr=SETTINGS["lr"],
    )
    return model, float((kernels(model) - before).norm() / before.norm())


def kernels(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [
            conv.weight.detach().flatten().clone()
            for conv in model.modules()
            if isinstance(conv, nn.Conv2d) and conv.groups > 1
        ]
    )


def convert(
    dense: nn.Module, start: str, images: torch.Tensor, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    model = copy.deepcopy(dense)
    calibration = None
    budget = 50.0 if start.endswith(HALF) else 100.0
    begun = time.perf_counter()
    if CALIBRATED in start:
        calibration = dcls_convert.Calibration(batches=(images[:CALIBRATION_IMAGES],))
    init = start.partition(",")[0]
    report = dcls_convert.convert_(
        model,
        dilated_size=WINDOW,
        init=init,  # type: ignore[arg-type]
        calibration=calibration,
        budget=budget,
        input_size=(1, SIDE, SIDE),
        seed=seed,
    )
    row: dict[str, Any] = {"kernel_count": report.layers[0].kernel_count}
    row["seconds_to_convert"] = round(time.perf_counter() - begun, 2)
    if init != "random":
        row["kernel_errors"] = {layer.name: layer.fit_error for layer in report.layers}
    return model, row


def fine_tune_(
    model: nn.Module, train: small.Data, test: small.Data, wanted: float, seed: int
) -> dict[str, Any]:
    """Accuracy at every look, and the first step at which it is what was wanted.

    None where it never is.
    """
    curve = {0: small.accuracy(model, test)}

    def look(step: int) -> None:
        if step % SETTINGS["looks_every"] == 0:
            curve[step] = small.accuracy(model, test)

    small.train_(
        model,
        batches(train, torch.Generator().manual_seed(100 + seed)),
        steps=SETTINGS["fine_tuning_steps"],
        lr=SETTINGS["fine_tuning_lr"],
        warm_up=10,
        look=look,
    )
    regained = next((step for step, value in curve.items() if value >= wanted), None)
    return {
        "after_conversion": curve[0],
        "after_fine_tuning": curve[max(curve)],
        "regained": regained,
        "curve": curve,
    }


def measure(seed: int) -> Iterator[dict[str, Any]]:
    train, test = digits(seed)
    dense, moved = train_dense(train, seed)
    before = small.accuracy(dense, test)
    for start in (CONTROL, *STARTS):
        if start == CONTROL:
            model, row = copy.deepcopy(dense), {"kernels_moved": moved}
        else:
            model, row = convert(dense, start, train[0], seed)
        row |= {"start": start, "params": small.parameter_count(model), "before": before}
        yield row | fine_tune_(model, train, test, before, seed)


def mean_error(row: dict[str, Any]) -> float:
    return statistics.fmean(row["kernel_errors"].values())


def table(result: dict[str, Any]) -> Iterator[str]:
    """Markdown, a line a start; then the errors layer by layer, and what was to be shown."""
    rows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in result["rows"]:
        rows[row["start"]].append(row)
    columns = (
        "start",
        "parameters",
        "elements",
        "kernel error",
        "accuracy before, %",
        "after conversion",
    )
    yield f"| {' | '.join(columns)} | after fine-tuning | steps to regain |"
    yield "|" + " --- |" * (len(columns) + 2)
    for start, members in rows.items():
        errors = (
            small.mean_and_spread([mean_error(row) for row in members], 3)
            if "kernel_errors" in members[0]
            else ""
        )
        accuracies = [
            small.mean_and_spread([row[key] for row in members])
            for key in ("before", "after_conversion", "after_fine_tuning")
        ]
        regained = ", ".join(
            "never" if row["regained"] is None else str(row["regained"]) for row in members
        )
        size = f"{members[0]['params']:,} | {members[0].get('kernel_count', 49)}"
        yield f"| {start} | {size} | {errors} | {' | '.join(accuracies)} | {regained} |"
    yield ""
    yield f"| layer | {' | '.join(FITTED)} | fit over largest |"
    yield "| --- |" + " --- |" * (len(FITTED) + 1)
    for layer in rows["fit"][0]["kernel_errors"]:
        of_start = {name: [row["kernel_errors"][layer] for row in rows[name]] for name in FITTED}
        cells = [small.mean_and_spread(values, 3) for values in of_start.values()]
        ratios = [
            fit / kept for fit, kept in zip(of_start["fit"], of_start["largest"], strict=True)
        ]
        yield f"| {layer} | {' | '.join(cells)} | {small.mean_and_spread(ratios, 2)} |"
    yield ""
    for budget in ("", HALF):
        pairs = zip(rows["fit" + budget], rows["largest" + budget], strict=True)
        ratios = [mean_error(fit) / mean_error(kept) for fit, kept in pairs]
        ratio = small.mean_and_spread(ratios, 3)
        yield f"Mean kernel error of the fit over that of keeping the largest{budget}: {ratio}."


if __name__ == "__main__":
    small.main(__doc__, "warm_start", measure, SETTINGS, table)
