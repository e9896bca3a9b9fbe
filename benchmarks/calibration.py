"""Measure what a calibration costs, and how close it keeps outputs, with many and with few images.

    python benchmarks/calibration.py [MODEL] [--dilated-size N] [--scope SCOPE] [--images N]
                                     [--threads N] [--label LABEL]
    python benchmarks/calibration.py --many [--images N] [--threads N]
    python benchmarks/calibration.py --few [--label LABEL] [--only NETWORK ...]
    python benchmarks/calibration.py --table

The first command prints the processor time of `convert_` with images, its ratio to the time of one
forward pass of the same images through the original, and the peak memory above the memory before
(`more_mib`), with the mean errors of the kernels and of the layers' outputs. With --images 0, the
kernels are fitted without images. Images are smooth noise. Weights are random, except for
EfficientNet-Lite0, which has its ImageNet weights. To compare two checkouts, run them in turn.

With --many, EfficientNet-Lite0 is calibrated on a folder of photographs and compared with the
original on other photographs. This prints the processor time and `more_mib` of reading and
converting together.

With --few, three small networks of timm are trained on digits of 32 pixels, and EfficientNet-Lite1
has its ImageNet weights and photographs of 160 pixels. They are calibrated on few images, tiny
images and useless images, and compared with the original on images that nothing was fitted to.
To measure the calibration of another checkout, point PYTHONPATH at it, and name its rows with
--label. If a calibration fails, the row has its error. Results go to
benchmarks/results/calibration.jsonl.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from measuring import (
    MIB,
    RESULTS,
    Results,
    add_results_options_,
    markdown_table,
    peak_bytes,
    reset_peak_bytes,
    script_parser,
    stored,
    stored_rows,
)

if TYPE_CHECKING:  # these import torch, which --table does not need
    from torch import Tensor, nn

BATCH = 8  # images, as when a calibration reads a folder
LITE0 = "tf_efficientnet_lite0"

# With --few.
DIGITS_NETWORKS = ("test_efficientnet", "test_resnet", "test_convnext")
LITE1 = "tf_efficientnet_lite1"
NETWORKS = (*DIGITS_NETWORKS, LITE1)
SOURCES = ("1", "2", "3", "5", "20", "80", "5 of 16 pixels", "10 constants", "black", "noise")
BUDGETS = (60, 100, 150)  # percent
DIGITS_SIDE = 32  # pixels
TRAIN_DIGITS = 1200  # of 1797; the others are test images
PHOTOGRAPHS_SIDE = 160  # pixels
TEST_CROPS = 80
SETTINGS = {"seed": 0, "dilated_size": 9, "scope": "model"}
THIS_CHECKOUT = "now"  # label


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of all threads."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def seconds_and_more_mib(work: Callable[[], object]) -> tuple[float, int]:
    """Return the processor time, and the peak memory above the memory at the start."""
    reset_peak_bytes()
    before = peak_bytes()
    processor_seconds = seconds(work)
    return processor_seconds, round((peak_bytes() - before) / MIB)


def measure_cost(options: argparse.Namespace) -> dict[str, Any]:
    """Measure time and memory of one calibration."""
    import timm
    import torch
    from trained import trained_network

    import dcls_convert

    if options.model == LITE0:
        network = trained_network(LITE0)
    else:
        network = timm.create_model(options.model).eval()
    noise = torch.randn(options.images, 3, 236, 236)
    images = 3 * torch.nn.functional.avg_pool2d(noise, 13, stride=1)
    batches = images.split(BATCH) if options.images else ()

    @torch.no_grad()
    def forward() -> None:
        for batch in batches:
            network(batch.contiguous(memory_format=torch.channels_last))

    seconds(forward)
    forward_seconds = min(seconds(forward) for _ in range(3))
    calibration = dcls_convert.Calibration(batches=batches) if batches else None
    converted = copy.deepcopy(network)
    reports = []

    def convert() -> None:
        reports.append(
            dcls_convert.convert_(
                converted,
                dilated_size=options.dilated_size,
                scope=options.scope,
                init="fit",
                calibration=calibration,
            )
        )

    convert_seconds, more_mib = seconds_and_more_mib(convert)
    layers = reports[0].layers
    kernel_errors = [layer.fit_error for layer in layers if layer.fit_error is not None]
    output_errors = [layer.output_error for layer in layers if layer.output_error is not None]
    return {
        "label": options.label,
        "model": options.model,
        "scope": options.scope,
        "images": options.images,
        "threads": options.threads,
        "forward_s": round(forward_seconds, 2),
        "convert_s": round(convert_seconds, 2),
        "ratio": round(convert_seconds / forward_seconds, 2) if batches else None,
        "more_mib": more_mib,
        "kernel_error": round(statistics.fmean(kernel_errors), 5),
        "output_error": round(statistics.fmean(output_errors), 5) if output_errors else None,
    }


# Many images.


def measure_many(options: argparse.Namespace) -> dict[str, Any]:
    """Calibrate EfficientNet-Lite0 on photographs; measure the cost, and how close outputs stay."""
    from photographs import compare_logits, crops, logits, pixels
    from trained import trained_network

    import dcls_convert

    network = trained_network(LITE0)
    to_test = pixels(crops(1, TEST_CROPS, seed=1))
    expected = logits(network, to_test)
    plan_options = {"dilated_size": options.dilated_size, "scope": options.scope}
    with TemporaryDirectory() as folder:
        for number, crop in enumerate(crops(0, options.images, seed=0)):
            crop.save(Path(folder) / f"{number:05}.png")

        def convert() -> None:
            plan = dcls_convert.plan_conversion(dcls_convert.find_convs(network), **plan_options)
            images = dcls_convert.read_calibration_images(
                network, plan, folder, most_images=options.images
            )
            dcls_convert.convert_(network, calibration=images, **plan_options)

        convert_seconds, more_mib = seconds_and_more_mib(convert)
    return {
        "images": options.images,
        "threads": options.threads,
        "convert_s": round(convert_seconds, 1),
        "more_mib": more_mib,
        **compare_logits(expected, logits(network, to_test)),
    }


# Few images.


@dataclass(frozen=True, kw_only=True)
class Task:
    """A trained network, and images (N, 3, rows, columns), normalised for it."""

    name: str
    network: "nn.Module"
    to_calibrate: "Tensor"  # 80 images
    to_test: "Tensor"
    black: float  # value of a black pixel

    def images(self, source: str) -> "Tensor":
        """Return the images to calibrate on, for one of SOURCES."""
        import torch
        from torch.nn.functional import interpolate

        side = self.to_test.shape[-1]
        if source == "5 of 16 pixels":
            return interpolate(self.to_calibrate[:5], (16, 16), mode="bilinear", antialias=True)
        if source == "10 constants":
            shades = torch.linspace(self.black, -self.black, 10).view(-1, 1, 1, 1)
            return shades.expand(-1, 3, side, side)
        if source == "black":
            return torch.full((1, 3, side, side), self.black)
        if source == "noise":
            return torch.randn(8, 3, side, side, generator=torch.Generator().manual_seed(0))
        return self.to_calibrate[: int(source)]


def digits_task(name: str) -> Task:
    """Train a small network of timm on digits, for some seconds."""
    import timm
    import torch
    from small import digits, train_

    images, classes = digits(DIGITS_SIDE)
    images = images.expand(-1, 3, -1, -1)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    to_train = order[:TRAIN_DIGITS]
    torch.manual_seed(0)
    options = {"ls_init_value": 0.1} if name == "test_convnext" else {}
    network = timm.create_model(name, num_classes=10, **options)

    def batches() -> Any:
        while True:
            picked = to_train[torch.randint(TRAIN_DIGITS, (64,), generator=generator)]
            yield images[picked], classes[picked]

    train_(network, batches(), steps=300, lr=3e-3)
    return Task(
        name=name,
        network=network.eval(),
        to_calibrate=images[to_train[:80]],
        to_test=images[order[TRAIN_DIGITS:]],
        black=-1.0,
    )


def photographs_task() -> Task:
    from photographs import crops, pixels
    from torch.nn.functional import interpolate
    from trained import trained_network

    def shrunk(half: int, count: int, seed: int) -> "Tensor":
        side = (PHOTOGRAPHS_SIDE, PHOTOGRAPHS_SIDE)
        images = pixels(crops(half, count, seed=seed))
        return interpolate(images, side, mode="bilinear", antialias=True)

    return Task(
        name=LITE1,
        network=trained_network(LITE1),
        to_calibrate=shrunk(0, 80, seed=0),
        to_test=shrunk(1, TEST_CROPS, seed=1),
        black=-1.0,
    )


def measure_few(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and store what is not stored yet; return all rows."""
    results = Results(
        path=options.output,
        command="python benchmarks/calibration.py --few",
        settings=SETTINGS,
        rows=stored_rows(options.output, settings=SETTINGS),
    )
    done = {(row["label"], row["network"], row["budget"], row["source"]) for row in results.rows}
    for name in options.only or NETWORKS:
        task = photographs_task() if name == LITE1 else digits_task(name)
        for budget in BUDGETS:
            for source in ("fit", *SOURCES):
                if (options.label, name, budget, source) in done:
                    continue
                try:
                    measured = few_row(task, budget, source)
                except Exception as error:
                    measured = {"error": type(error).__name__}
                row = {"label": options.label, "network": name, "budget": budget, "source": source}
                results.add_(row | measured)
    return results.rows


def few_row(task: Task, budget: int, source: str) -> dict[str, Any]:
    """Measure how far the converted network is from the original, on the test images."""
    from photographs import compare_logits, logits

    import dcls_convert

    model = copy.deepcopy(task.network)
    calibration = None
    if source != "fit":
        calibration = dcls_convert.Calibration(batches=task.images(source).split(BATCH))
    dcls_convert.convert_(
        model,
        dilated_size=SETTINGS["dilated_size"],
        scope=SETTINGS["scope"],
        budget=budget,
        input_size=tuple(task.to_test.shape[1:]),
        init="fit",
        calibration=calibration,
    )
    return compare_logits(logits(task.network, task.to_test), logits(model, task.to_test))


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown: a row for each network, budget and label, a column for each source."""
    cells: dict[tuple[str, int, str], dict[str, str]] = {}
    for row in rows:
        key = (row["network"], row["budget"], row["label"])
        cells.setdefault(key, {})[row["source"]] = cell(row)
    lines = []
    for key in sorted(cells, key=lambda key: (NETWORKS.index(key[0]), key[1])):
        network, budget, label = key
        by_source = [cells[key].get(source, "") for source in ("fit", *SOURCES)]
        lines.append([network, str(budget), label, *by_source])
    return markdown_table(["network", "budget", "version", "fit", *SOURCES], lines)


def cell(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    return f"{100 * row['same_top1']:.1f} ({row['kl']:.3f})"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("model", nargs="?", default=LITE0)
    parser.add_argument("--scope", default="model")
    parser.add_argument("--dilated-size", type=int, default=9)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--many", action="store_true", help="read a folder of photographs")
    parser.add_argument("--few", action="store_true", help="compare outputs after few images")
    parser.add_argument("--label", default=THIS_CHECKOUT, help="of the rows")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, help="networks of --few")
    add_results_options_(parser, RESULTS / "calibration.jsonl")
    options = parser.parse_args()
    if options.table:
        print(table(stored(options.output)["rows"]))
        return
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.many:
        print(json.dumps(measure_many(options)))
    elif options.few:
        print(table(measure_few(options)))
    else:
        print(json.dumps(measure_cost(options)))


if __name__ == "__main__":
    main()
