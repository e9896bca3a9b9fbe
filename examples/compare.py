"""Does a conversion help? Train a network and its conversions with several seeds, and compare.

    python examples/compare.py convnext_tiny --data flowers --sizes 13,17 --seeds 5 --epochs 30
    # From trained weights; conversions are calibrated on 64 of the training images
    python examples/compare.py convnext_tiny --data flowers --sizes 17 --seeds 5 --pretrained
    # The whole list of runs, and one of them, for job arrays
    python examples/compare.py convnext_tiny --data flowers --sizes 17 --seeds 5 --list
    python examples/compare.py convnext_tiny --data flowers --sizes 17 --seeds 5 --only 17:3

MODEL is a name of timm's, or MODULE:FUNCTION, a function of yours that takes num_classes. For each
seed, all networks start from the same weights (except for the layers that are converted), and see
the same images in the same order. finetune.py, beside this file, trains them; its options of a
training apply to all.

OUTPUT/runs.jsonl gets a line for each finished run. Started again, the script trains what is
missing, and a run that was killed continues after its last full epoch. The answer is printed at
the end, from all runs in the file.

State the number of seeds beforehand. If you add seeds until something shows, you find differences
where there are none.
"""

import argparse
import importlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import finetune
import numpy as np
import timm
import torch
from scipy import optimize, stats
from torch import nn

import dcls_convert
from dcls_convert import DclsConvertError

ORIGINAL = "original"
LEVEL = 0.05  # chance that a comparison claims a difference where there is none
POWER = 0.8  # chance of finding a difference of the size that "would be seen"
MIN_SEEDS = 3  # for a statement about a difference
WIDEST = 2.0  # points; if a difference may be larger than this, there is no answer
MIN_P_VALUE = 1e-9
CALIBRATION_IMAGES = 64
RUNS = "runs.jsonl"
# Options that say which runs there are; all others must be equal in all runs.
OPTIONS_OF_RUNS = ("sizes", "positions", "ablate", "seeds", "only", "list")
SAME_ANSWERS = (
    "WARNING: {first} and {second} are right on exactly the same images (seeds {seeds}), so this "
    "comparison cannot tell them apart. Perhaps their convolutions hardly matter: timm's ConvNeXt "
    "multiplies its blocks by a layer scale of 1e-6, which a short training does not raise. "
    "Try --model-kwargs ls_init_value=0.1"
)
Array = np.ndarray[Any, np.dtype[np.float64]]
Runs = Mapping[tuple[str, int], Mapping[str, Any]]  # (network, seed) -> its line in the file


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="compare.py MODEL --data FOLDER --sizes 13,17 --seeds 5 [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="a name of timm's, or MODULE:FUNCTION")
    add("--sizes", default="17", help="windows, such as 13,17 or +4 or auto")
    add("--positions", default="normal", help="starts of the elements: normal,kernel,uniform")
    add("--ablate", action="store_true", help="add frozen positions, and dense kernels as large")
    add("--seeds", type=int, default=5)
    add("--only", metavar="NETWORK:SEED", help="train one run, as --list names it")
    add("--list", action="store_true", help="print NETWORK:SEED of all runs")
    add("--output", type=Path, help="folder; default: MODEL-compared")
    finetune.add_training_options(parser)
    options = parser.parse_args()
    options.output = options.output or Path(f"{options.model.replace(':', '-')}-compared")
    return options


# Networks.


@dataclass(frozen=True)
class Network:
    """One of the networks that are compared."""

    name: str
    size: int | str | None = None  # of the window; None: not converted
    positions: Any = "normal"  # or "kernel" or "uniform": where elements start from scratch
    frozen: bool = False  # positions are not trained
    dense: bool = False  # a plain convolution with a kernel as large as the window


def networks_of(options: argparse.Namespace) -> dict[str, Network]:
    networks = [Network(ORIGINAL)]
    for text in options.sizes.split(","):
        size: int | str = text
        if text.isdigit():
            size = int(text)
        for positions in options.positions.split(","):
            name = text
            if positions != "normal":
                name += f"-{positions}"
            networks.append(Network(name, size, positions))
            if options.ablate:
                networks.append(Network(f"{name}-frozen", size, positions, frozen=True))
        if options.ablate:
            networks.append(Network(f"{text}-dense", size, dense=True))
    return {network.name: network for network in networks}


def build_original(options: argparse.Namespace, classes: int) -> nn.Module:
    torch.manual_seed(options.seed)
    module, colon, function = options.model.partition(":")
    if colon:
        sys.path.insert(0, os.getcwd())
        build = getattr(importlib.import_module(module), function)
        model: nn.Module = build(num_classes=classes, **options.model_kwargs)
        return model
    return timm.create_model(
        options.model, pretrained=options.pretrained, num_classes=classes, **options.model_kwargs
    )


def build_network(
    network: Network, samples: finetune.Samples, options: argparse.Namespace
) -> tuple[nn.Module, Any]:
    """Return the network, and its plan if it has DCLS layers."""
    model = build_original(options, samples.classes)
    if network.size is None:
        return model, None
    arguments: dict[str, Any] = {
        "dilated_size": network.size,
        "input_size": finetune.input_size(options),
        "seed": options.seed,
    }
    if network.dense:  # as many elements as the old kernel has cells, in a kernel with a window
        dcls_convert.convert_(model, kernel_count="exact", init="exact", **arguments)
        dcls_convert.fold_to_dense_(model)
        return model, None
    if options.pretrained:
        calibration = calibration_images(samples, model, options)
        report = dcls_convert.convert_(model, calibration=calibration, **arguments)
    else:
        report = dcls_convert.convert_(
            model, init="random", positions=network.positions, **arguments
        )
    if network.frozen:
        for name, parameter in model.named_parameters():
            if name.endswith("positions"):
                parameter.requires_grad_(False)
    return model, report.plan


def calibration_images(
    samples: finetune.Samples, model: nn.Module, options: argparse.Namespace
) -> torch.Tensor:
    """Return training images without augmentation, evenly spread over the classes."""
    step = max(1, len(samples.train) // CALIBRATION_IMAGES)
    chosen = finetune.Samples(train=[], test=samples.train[::step], classes=samples.classes)
    images = finetune.open_images(chosen, model, options)[1]
    return torch.stack([images[index][0] for index in range(len(images))][:CALIBRATION_IMAGES])


# Runs.


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings that all runs in a file must share."""
    settings = finetune.settings_of(options)
    return {key: value for key, value in settings.items() if key not in OPTIONS_OF_RUNS}


def read_runs(path: Path, settings: Mapping[str, str]) -> dict[tuple[str, int], dict[str, Any]]:
    """Read the finished runs of a file. All must have these settings."""
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    if not path.exists():
        return runs
    for line in path.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        for name, value in settings.items():
            stored = run["settings"].get(name)
            if stored != value:
                raise DclsConvertError(
                    f"{path}: holds runs with {name} {stored}, not {value}; use another --output"
                )
        runs[run["network"], run["seed"]] = run
    return runs


def train(
    network: Network,
    samples: finetune.Samples,
    options: argparse.Namespace,
    settings: Mapping[str, str],
    accelerator: Any,
) -> dict[str, Any]:
    """Train a network with the seed in the options; return the line for the file of runs."""
    accelerator.free_memory()  # of the last run
    model, plan = build_network(network, samples, options)
    folder = options.output / f"{network.name}-{options.seed}"
    training = finetune.Training(
        model,
        finetune.open_images(samples, model, options),
        samples.classes,
        options,
        accelerator,
        folder=folder,
        settings=settings,
    )

    def after_epoch(training: finetune.Training) -> None:
        last = training.history[-1]
        line = "epoch {epoch}: loss {loss:.4f}, {accuracy:.2f} %".format(**last)
        accelerator.print(f"{network.name}:{options.seed} {line}", flush=True)

    began = time.monotonic()
    training.run(after_epoch)
    seconds = time.monotonic() - began
    trained = training.trained_model()
    if accelerator.is_main_process and hasattr(model, "pretrained_cfg"):
        finetune.save_trained(trained, plan, folder / "trained")
    return {
        "network": network.name,
        "seed": options.seed,
        "params": sum(parameter.numel() for parameter in trained.parameters()),
        "seconds": round(seconds, 1),  # of this call: less if the run was resumed
        "epochs": training.history,
        "right": "".join(str(int(correct)) for correct in training.correct),
    }


def named(text: str, wanted: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Return the run that is called NETWORK:SEED."""
    for name, seed in wanted:
        if text == f"{name}:{seed}":
            return name, seed
    raise DclsConvertError(f"--only {text}: is not one of the runs that --list names")


def train_missing(
    options: argparse.Namespace,
    networks: Mapping[str, Network],
    wanted: Sequence[tuple[str, int]],
) -> None:
    """Train the runs that are not in the file yet, and append them to it."""
    settings = settings_of(options)
    path = options.output / RUNS
    finished = read_runs(path, settings)
    missing = [run for run in wanted if run not in finished]
    if not missing:
        return
    samples = finetune.read_samples(options.data)
    accelerator = finetune.make_accelerator(options)
    for name, seed in missing:
        seeded = argparse.Namespace(**vars(options), seed=seed)
        run = train(networks[name], samples, seeded, settings, accelerator)
        if accelerator.is_main_process:
            line = json.dumps(run | {"settings": settings}) + "\n"
            with path.open("ab", buffering=0) as file:  # one write, as jobs may share the file
                file.write(line.encode())
    accelerator.end_training()


# The answer.


@dataclass(frozen=True)
class Difference:
    """A difference of accuracies, in percentage points."""

    by_seed: Array  # (seeds,)
    by_image: Array  # (images,); mean over the seeds

    @property
    def mean(self) -> float:
        return float(self.by_seed.mean())

    def half_width(self, level: float) -> float:
        """Return the half width of the interval over seeds and test images.

        The two parts are independent, so they are added in quadrature. If hardly any image differs,
        Student's interval over images is too narrow: at least, it is -ln(level) / images, the share
        of differing images that would show none with this probability (Hanley and Lippman-Hand).
        """
        over_images = max(
            student(self.by_image, level), -100 * math.log(level) / len(self.by_image)
        )
        return math.hypot(student(self.by_seed, level), over_images)

    def p_value(self) -> float:
        """Return the level at which the interval just reaches 0."""
        distance = abs(self.mean)
        if self.half_width(MIN_P_VALUE) <= distance:
            return MIN_P_VALUE
        return float(
            optimize.brentq(lambda level: self.half_width(level) - distance, MIN_P_VALUE, 1)
        )

    def detectable(self, level: float) -> float:
        """Return the true difference that would be found with a chance of POWER."""
        # It is missed if the measured one is too far below it: one tail, with chance 1 - POWER.
        return self.half_width(level) + self.half_width(2 * (1 - POWER))


def student(values: Array, level: float) -> float:
    """Return the half width of Student's t interval for the mean of at least two values."""
    quantile = float(stats.t.ppf(1 - level / 2, len(values) - 1))
    return quantile * float(values.std(ddof=1)) / math.sqrt(len(values))


def difference_of(differences: Array) -> Difference:
    """Return the difference; (seeds, images): 1 if only this network is right, -1 if the other."""
    return Difference(100 * differences.mean(axis=1), 100 * differences.mean(axis=0))


def holm(p_values: Mapping[str, float], tests: int) -> dict[str, float]:
    """Correct p-values for the number of tests (Holm 1979)."""
    corrected = {}
    largest = 0.0
    ascending = sorted(p_values.items(), key=lambda item: item[1])
    for rank, (name, p_value) in enumerate(ascending):
        largest = max(largest, (tests - rank) * p_value)
        corrected[name] = min(1.0, largest)
    return corrected


def right(runs: Runs, network: str, seeds: Sequence[int]) -> Array:
    """Return (seeds, images): 1.0 if the image was classified right, else 0.0."""
    rows = [[digit == "1" for digit in runs[network, seed]["right"]] for seed in seeds]
    return np.array(rows, dtype=np.float64)


def shared_seeds(runs: Runs, first: str, second: str) -> list[int]:
    seeds = {seed for name, seed in runs if name == first}
    return sorted(seed for name, seed in runs if name == second and seed in seeds)


def sentence(difference: Difference, p_corrected: float | None, conversions: int) -> str:
    """State what the differences show; claims hold for all conversions together."""
    by_seed = ", ".join(f"{points:+.1f}" for points in difference.by_seed)
    if p_corrected is None:
        return f"too few seeds to tell: differences of {by_seed} points"
    if not difference.by_image.any():
        return "nothing to tell: right on the same images as the original"
    mean = difference.mean
    half_width = difference.half_width(LEVEL)
    if p_corrected <= LEVEL:
        effect = "harms"
        if mean > 0:
            effect = "helps"
        return f"{effect} by {abs(mean):.1f} ± {half_width:.1f} points"
    if abs(mean) >= half_width:
        return f"{mean:+.1f} ± {half_width:.1f} points: significant alone, but not after correction"
    largest = abs(mean) + difference.half_width(LEVEL / conversions)
    if largest <= WIDEST:
        return f"no difference larger than {math.ceil(10 * largest) / 10:.1f} points"
    few = "test images"
    if student(difference.by_seed, LEVEL) > student(difference.by_image, LEVEL):
        few = "seeds"
    return f"too few {few} to tell: differences of {by_seed} points"


def answer(runs: Runs, networks: Sequence[str]) -> str:
    """Return the table, the sentences, and the warnings."""
    differences = {}
    for name in networks[1:]:
        seeds = shared_seeds(runs, name, ORIGINAL)
        if seeds:
            paired = right(runs, name, seeds) - right(runs, ORIGINAL, seeds)
            differences[name] = difference_of(paired)
    conversions = len(networks) - 1
    p_values = {}
    for name, difference in differences.items():
        if len(difference.by_seed) >= MIN_SEEDS:
            p_values[name] = difference.p_value()
    corrected = holm(p_values, conversions)
    rows = [["network", "parameters", "seconds", "top-1, %", "difference", "p", "would be seen"]]
    for name in networks:
        finished = [run for (network, _), run in runs.items() if network == name]
        if finished:
            rows.append(row(name, finished, differences.get(name), corrected, conversions))
    lines = [markdown(rows), ""]
    for name, difference in differences.items():
        lines.append(f"{name}: {sentence(difference, corrected.get(name), conversions)}")
    return "\n".join([*lines, *warnings(runs, networks)])


def row(
    name: str,
    finished: Sequence[Mapping[str, Any]],
    difference: Difference | None,
    corrected: Mapping[str, float],
    conversions: int,
) -> list[str]:
    accuracies = [run["epochs"][-1]["accuracy"] for run in finished]
    seconds = np.mean([run["seconds"] for run in finished])
    cells = [name, f"{finished[0]['params']:,}", f"{seconds:.0f}", f"{np.mean(accuracies):.2f}"]
    if difference is None:
        return [*cells, "", "", ""]
    if name not in corrected:
        return [*cells, f"{difference.mean:+.2f}", "", ""]
    return [
        *cells,
        f"{difference.mean:+.2f} ± {difference.half_width(LEVEL):.2f}",
        f"{corrected[name]:.3f}",
        f"{difference.detectable(LEVEL / conversions):.1f}",
    ]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def warnings(runs: Runs, networks: Sequence[str]) -> list[str]:
    """Return a warning for each pair of networks that are right on exactly the same images."""
    lines = []
    for first, second in itertools.combinations(networks, 2):
        same = []
        for seed in shared_seeds(runs, first, second):
            if runs[first, seed]["right"] == runs[second, seed]["right"]:
                same.append(str(seed))
        if same:
            lines.append(SAME_ANSWERS.format(first=first, second=second, seeds=", ".join(same)))
    return lines


def main() -> None:
    options = parse_arguments()
    networks = networks_of(options)
    wanted = [(name, seed) for seed in range(options.seeds) for name in networks]
    if options.list:
        print("\n".join(f"{name}:{seed}" for name, seed in wanted))
        return
    try:
        to_train = wanted
        if options.only:
            to_train = [named(options.only, wanted)]
        train_missing(options, networks, to_train)
        runs = read_runs(options.output / RUNS, settings_of(options))
    except DclsConvertError as error:
        raise SystemExit(f"error: {error}") from None
    if int(os.environ.get("RANK", 0)) == 0:
        shown = {run: runs[run] for run in wanted if run in runs}
        print(answer(shown, list(networks)))
        missing = [f"{name}:{seed}" for name, seed in wanted if (name, seed) not in runs]
        if missing:
            print(f"Provisional; missing: {', '.join(missing)}")


if __name__ == "__main__":
    main()
