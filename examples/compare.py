"""Does a conversion help? Train a network and its conversions with several seeds, and compare.

    python examples/compare.py convnext_tiny --data flowers --sizes 13,17 --seeds 5 --epochs 30
    # From trained weights; conversions are calibrated on 64 of the training images
    python examples/compare.py convnext_tiny --data flowers --sizes 17 --seeds 5 --pretrained
    # The names of all runs, and one of them, for job arrays
    python examples/compare.py convnext_tiny --data flowers --sizes 17 --seeds 5 --list
    python examples/compare.py convnext_tiny --data flowers --sizes 17 --seeds 5 --only 17:3

MODEL is a name of timm's, or MODULE:FUNCTION, a function of yours that takes num_classes. For each
seed, all networks start from the same weights (except for the layers that are converted), and see
the same images in the same order. finetune.py, beside this file, trains them; its options of a
training apply to all.

A size may have words behind it: 17-kernel or 17-uniform (where elements start), 17-frozen
(positions are not trained), 17-dense (a plain convolution with kernels as large as the window).

OUTPUT/runs.jsonl gets a line for each finished run. Started again, the script trains what is
missing, and a run that was killed continues after its last full epoch. The answer is printed at
the end, from all runs in the file. It is about the last epoch, on the images that are held out:
they choose no epoch, so it is not optimistic. DATA/test is not used; finetune.py tests with it.

State the number of seeds beforehand. If you add seeds until something shows, you find differences
where there are none.
"""

import argparse
import copy
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
import torch
from timm.data import ImageDataset
from torch import nn

import dcls_convert
from dcls_convert import DclsConvertError

try:
    from scipy import optimize, stats
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; in the clone: pip install '.[train]'") from None

ORIGINAL = "original"
LEVEL = 0.05  # chance that a comparison claims a difference where there is none
POWER = 0.8  # chance of finding a difference of the size that "would be seen"
MIN_SEEDS = 3  # for a statement about a difference
WIDEST = 2.0  # points; if a difference may be larger than this, there is no answer
MIN_P_VALUE = 1e-9
CALIBRATION_IMAGES = 64
STARTS = ("kernel", "uniform")  # places of random elements besides those near the centre
# Options that say which runs there are; all others must be equal in all runs.
OPTIONS_OF_RUNS = ("sizes", "seeds", "only", "list")
ROW = "| {:<20} | {:>11} | {:>8} | {:>14} | {:>5} | {:>13} |"
WHY_THE_SAME = (
    "This comparison cannot tell them apart. Perhaps their convolutions hardly matter: timm's "
    "ConvNeXt multiplies its blocks by a layer scale of 1e-6, which a short training does not "
    "raise. Try --model-kwargs ls_init_value=0.1"
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
    add("model", type=finetune.model_name, help="a name of timm's, or MODULE:FUNCTION")
    sizes = "windows, such as 13,17,17-kernel or +4; default: %(default)s"
    add("--sizes", default="17", help=sizes)
    seeds = "how often each network is trained; default: %(default)s"
    add("--seeds", type=finetune.number(int, 1, 1000), default=5, help=seeds)
    add("--only", metavar="NETWORK:SEED", help="train one run, as --list names it; default: all")
    add("--list", action="store_true", help="print NETWORK:SEED of all runs")
    add("--output", type=finetune.home_path, help="folder; default: MODEL-compared")
    finetune.add_training_options(parser)
    options = parser.parse_args()
    options.output = options.output or Path(f"{options.model.replace(':', '-')}-compared")
    return options


def check_network(name: str, convs: Any, options: argparse.Namespace) -> None:
    """Refuse a name such as "17-kernel" that these convolutions cannot take."""
    size, *rest = name.split("-")
    words = {*rest}
    unknown = words - {*STARTS, "frozen", "dense"}
    if unknown:
        raise DclsConvertError(f"--sizes {name}: {unknown.pop()!r} is not a word for a network")
    if words >= {*STARTS} or ("dense" in words and len(words) > 1):
        raise DclsConvertError(f"--sizes {name}: these words exclude each other")
    if options.pretrained and words & {*STARTS}:
        raise DclsConvertError(f"--sizes {name}: with --pretrained, trained kernels set the start")
    plan = dcls_convert.plan_conversion(convs, dilated_size=dilated_size(size))
    if all(layer.dilated_size == layer.kernel_size for layer in plan.layers):
        raise DclsConvertError(f"--sizes {name}: no window is larger than its kernel")


def check_networks(names: Sequence[str], options: argparse.Namespace, accelerator: Any) -> None:
    """Refuse names of networks, and images, before anything is trained."""
    if Path(options.model).is_dir():
        raise DclsConvertError(f"{options.model}: is a folder; give a name of timm's or a function")
    images = finetune.read_images(options.data)[:2]
    finetune.check_classes(images[0], options.data)
    first = argparse.Namespace(**vars(options) | {"seed": 0})
    original = build_original(first, len(images[0].reader.class_to_idx))
    convs = dcls_convert.find_convs(original, options.input_size)
    for name in names:
        check_network(name, convs, options)
    finetune.check_images(images, [original], options, accelerator)


def dilated_size(text: str) -> int | str:
    """Return 17 for "17", and "+4", a growth, as it is."""
    return int(text) if text.isdigit() else text


def build_original(options: argparse.Namespace, classes: int) -> nn.Module:
    torch.manual_seed(options.seed)
    arguments = {"num_classes": classes} | options.model_kwargs
    module, colon, function = options.model.partition(":")
    if colon:
        sys.path.insert(0, os.getcwd())
        try:
            build = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise DclsConvertError(f"{options.model}: {error}") from error
        model: nn.Module = build(**arguments)
        return model
    return finetune.create_model(options.model, pretrained=options.pretrained, **arguments)


def build_network(
    name: str, classes: int, train: ImageDataset, options: argparse.Namespace
) -> nn.Module:
    """Return the original or, if the name is that of a window such as "17-kernel", a conversion."""
    model = build_original(options, classes)
    if name == ORIGINAL:
        return model
    size, *words = name.split("-")
    arguments: dict[str, Any] = {"seed": options.seed, "input_size": options.input_size}
    arguments["dilated_size"] = dilated_size(size)
    if "dense" in words:  # one element on each cell of the old kernel
        arguments |= {"kernel_count": "exact", "init": "exact"}
    elif options.pretrained:
        arguments["calibration"] = calibration_images(train, model, options)
    else:
        arguments["init"] = "random"
    for start in STARTS:
        if start in words:
            arguments["positions"] = start
    dcls_convert.convert_(model, **arguments)
    if "dense" in words:
        dcls_convert.fold_to_dense_(model)
    if "frozen" in words:
        for position_name in dcls_convert.tuning.no_weight_decay(model):
            model.get_parameter(position_name).requires_grad_(False)
    return model


def calibration_images(
    train: ImageDataset, model: nn.Module, options: argparse.Namespace
) -> torch.Tensor:
    """Return training images without augmentation, evenly spread over the classes."""
    plain = copy.copy(train)
    finetune.set_transforms_([train, plain], model, options)
    step = math.ceil(len(train) / CALIBRATION_IMAGES)
    return torch.stack([plain[index][0] for index in range(0, len(train), step)])


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings that all runs in a file must share."""
    settings = finetune.settings_of(options)
    return {name: value for name, value in settings.items() if name not in OPTIONS_OF_RUNS}


def read_runs(options: argparse.Namespace) -> dict[tuple[str, int], dict[str, Any]]:
    """Read the finished runs. All must have these options."""
    path = options.output / "runs.jsonl"
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            finetune.check_settings(run["settings"], settings_of(options), path)
            runs[run["network"], run["seed"]] = run
    return runs


def train(name: str, seed: int, options: argparse.Namespace, accelerator: Any) -> None:
    """Train a network, and append a line to the file of runs."""
    accelerator.free_memory()  # of the last run
    run_options = argparse.Namespace(**vars(options) | {"seed": seed})
    run_options.output = options.output / f"{name}-{seed}"
    for option in OPTIONS_OF_RUNS:
        delattr(run_options, option)
    images = finetune.read_images(options.data)[:2]
    classes = len(images[0].reader.class_to_idx)
    model = build_network(name, classes, images[0], run_options)
    training = finetune.Training(model, images, run_options, accelerator)
    began = time.monotonic()
    for _ in range(len(training.history), options.epochs):
        training.run_epoch()
        training.save_state()
    (held_out,) = training.test_loaders
    run = {
        "network": name,
        "seed": seed,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.monotonic() - began, 1),  # less if the run was resumed
        "epochs": training.history,
        "right": "".join(str(int(correct)) for correct in training.test(held_out)),
        "settings": settings_of(options),
    }
    if accelerator.is_main_process:
        line = json.dumps(run) + "\n"
        with (options.output / "runs.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())  # in one piece, as jobs may share the file


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
    conversions = len(networks) - 1
    differences = {}
    p_values = {}
    for name in networks[1:]:
        seeds = shared_seeds(runs, name, ORIGINAL)
        if seeds:
            paired = right(runs, name, seeds) - right(runs, ORIGINAL, seeds)
            differences[name] = difference_of(paired)
        if len(seeds) >= MIN_SEEDS:
            p_values[name] = differences[name].p_value()
    corrected = holm(p_values, conversions)
    lines = [
        ROW.format("network", "parameters", "top-1, %", "difference", "p", "would be seen"),
        ROW.format("---", "---", "---", "---", "---", "---"),
    ]
    for name in networks:
        finished = [run for (network, _), run in runs.items() if network == name]
        if finished:
            accuracy = np.mean([run["epochs"][-1]["accuracy"] for run in finished])
            cells = ["", "", ""]
            if name in corrected:
                cells = numbers(differences[name], corrected[name], conversions)
            lines.append(ROW.format(name, f"{finished[0]['params']:,}", f"{accuracy:.2f}", *cells))
    lines.append("")
    for name, difference in differences.items():
        lines.append(f"{name}: {sentence(difference, corrected.get(name), conversions)}")
    return "\n".join(lines + warnings(runs, networks))


def numbers(difference: Difference, p_corrected: float, conversions: int) -> list[str]:
    """Return the cells of the table that compare a network with the original."""
    half_width = difference.half_width(LEVEL)
    would_be_seen = difference.detectable(LEVEL / conversions)
    return [
        f"{difference.mean:+.2f} ± {half_width:.2f}",
        f"{p_corrected:.3f}",
        f"{would_be_seen:.1f}",
    ]


def warnings(runs: Runs, networks: Sequence[str]) -> list[str]:
    """Return a warning for each pair of networks that are right on exactly the same images."""
    lines = []
    advice = []
    for first, second in itertools.combinations(networks, 2):
        seeds = shared_seeds(runs, first, second)
        same = []
        for seed in seeds:
            run = runs[first, seed]
            if run["right"] == runs[second, seed]["right"]:
                same.append(str(seed))
        if same:
            images = f"the same ones of {len(run['right'])} test images"
            names = ", ".join(same)
            lines.append(f"WARNING: {first} and {second} are right on {images} (seeds {names})")
            settings = run.get("settings", {"model": ""})
            if len(same) == len(seeds) and "convnext" in settings["model"]:
                if "ls_init_value" not in settings["model_kwargs"]:
                    advice = [WHY_THE_SAME]
    return lines + advice


def main() -> None:
    options = parse_arguments()
    networks = [ORIGINAL, *dict.fromkeys(options.sizes.split(","))]
    wanted = {f"{name}:{seed}": (name, seed) for seed in range(options.seeds) for name in networks}
    if options.list:
        print("\n".join(wanted))
        return
    if options.only and options.only not in wanted:
        raise DclsConvertError(f"--only {options.only}: is not one of the runs that --list names")
    accelerator = finetune.make_accelerator(options)
    check_networks(networks[1:], options, accelerator)
    finished = read_runs(options)
    for label, (name, seed) in wanted.items():
        if (name, seed) not in finished and options.only in (None, label):
            train(name, seed, options, accelerator)
    runs = read_runs(options)
    shown = {run: runs[run] for run in wanted.values() if run in runs}
    accelerator.print(answer(shown, networks))
    missing = [label for label, run in wanted.items() if run not in runs]
    if missing:
        accelerator.print(f"Provisional; missing: {', '.join(missing)}")
    finetune.end(accelerator)


if __name__ == "__main__":
    finetune.run(main)
