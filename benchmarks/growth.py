"""How time and memory grow with the model.

    python benchmarks/growth.py [--models NAME ...] [--table] [--plot]

Plan (dry run), conversion with random initialisation, warm start from a file, and export (fold) of
ConvNeXts and ResNets from 4 M to 846 M parameters, each in a fresh process. Results are stored
after every row; a new call goes on.
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from measuring import MIB, RESULTS, markdown_table, run_fresh, store, stored_rows

RESULT = RESULTS / "growth.json"
PLOT = Path(__file__).parent / "growth.svg"
PROGRAM = os.path.join(sysconfig.get_path("scripts"), "dcls-convert")
IMPORTS = "import torch, torchvision, timm"
SAVE = (
    f"import sys; {IMPORTS}; from safetensors.torch import save_file; torch.manual_seed(1); "
    "model = timm.create_model(sys.argv[1]); save_file(model.state_dict(), sys.argv[2]); "
    "print(sum(p.numel() for p in model.parameters()))"
)
SIZES = {  # windows: the paper's
    **dict.fromkeys(
        [
            f"convnext_{size}"
            for size in ("atto", "nano", "tiny", "base", "large", "xlarge", "xxlarge")
        ],
        "17",
    ),
    **dict.fromkeys(["resnet18", "resnet50", "resnet152"], "7"),
}
STAGES = ("plan", "random", "fit", "fold")
# The fit costs by kernels, of which dense 3x3 convolutions have a thousand times as many as
# depthwise ones.
FIT_MODELS = tuple(name for name in SIZES if name != "resnet152")


def commands(name: str, weights: Path, scratch: Path) -> dict[str, list[str]]:
    size = ["--dilated-size", SIZES[name]]
    found = {
        "plan": [PROGRAM, name, *size, "--dry-run"],
        "random": [PROGRAM, name, *size, "--quiet", "--output", str(scratch / "random")],
        # Folds what "random" wrote.
        "fold": [PROGRAM, "fold", str(scratch / "random"), "--output", str(scratch / "fold")],
    }
    if name in FIT_MODELS:
        fitted = [
            "--checkpoint",
            str(weights),
            "--init",
            "fit",
            "--quiet",
            "--output",
            str(scratch / "fit"),
        ]
        found["fit"] = [PROGRAM, name, *size, *fitted]
    return found


def measure(name: str, done: set[tuple[str, str]], imports: dict[str, float]) -> Any:
    """Rows of one model, as they come."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        weights = scratch / "weights.safetensors"
        saved = subprocess.run(
            [sys.executable, "-c", SAVE, name, str(weights)],
            capture_output=True,
            text=True,
            check=True,
        )
        params = int(saved.stdout.strip().splitlines()[-1])
        for stage, command in commands(name, weights, scratch).items():
            if (name, stage) in done and stage != "random":  # which fold needs
                continue
            run = run_fresh(command)
            if run.returncode:
                raise RuntimeError(
                    f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}"
                )
            if stage != "random":
                shutil.rmtree(scratch / stage, ignore_errors=True)
            if (name, stage) not in done:
                yield {
                    "model": name,
                    "params": params,
                    "stage": stage,
                    "seconds": run.seconds,
                    "peak_mib": run.peak_bytes / MIB,
                    "imports": imports,
                }


def imports_alone() -> dict[str, float]:
    run = min(
        (run_fresh([sys.executable, "-c", IMPORTS]) for _ in range(3)), key=lambda run: run.seconds
    )
    return {"seconds": run.seconds, "peak_mib": run.peak_bytes / MIB}


def exponent(rows: list[dict[str, Any]], key: str) -> float | None:
    """b of key = a * params ** b by least squares on logarithms, of what lies above the imports."""
    points = [
        (math.log(row["params"]), math.log(row[key] - row["imports"][key]))
        for row in rows
        if row[key] > 1.05 * row["imports"][key]
    ]
    if len(points) < 3:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    return slope


def family(row: dict[str, Any]) -> str:
    return "ConvNeXt" if row["model"].startswith("convnext") else "ResNet"


def table(rows: list[dict[str, Any]]) -> str:
    of = {(row["model"], row["stage"]): row for row in rows}

    def cell(model: str, stage: str) -> str:
        row = of.get((model, stage))
        return "" if row is None else f"{row['seconds']:.1f} s, {row['peak_mib'] / 1024:.2f} GiB"

    models = sorted({(row["params"], row["model"]) for row in rows})
    lines = [
        [name, f"{params / 1e6:.1f}", *(cell(name, stage) for stage in STAGES)]
        for params, name in models
    ]
    for key, what in (("seconds", "time"), ("peak_mib", "memory")):
        found = [
            exponent([r for r in rows if r["stage"] == s and family(r) == "ConvNeXt"], key)
            for s in STAGES
        ]
        exponents = ["" if value is None else f"{value:.2f}" for value in found]
        lines.append([f"ConvNeXt: exponent of {what} above the imports'", "", *exponents])
    return markdown_table(["model", "M parameters", *STAGES], lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "growth"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for stage in STAGES:
        for kind, marker in (("ConvNeXt", "o-"), ("ResNet", "s--")):
            points = sorted(
                (r for r in rows if r["stage"] == stage and family(r) == kind),
                key=lambda r: r["params"],
            )
            if not points:
                continue
            params = [row["params"] for row in points]
            colour = f"C{STAGES.index(stage)}"
            for axis, key, scale in ((axes[0], "seconds", 1), (axes[1], "peak_mib", 1024)):
                axis.plot(
                    params,
                    [r[key] / scale for r in points],
                    marker,
                    color=colour,
                    label=f"{stage}, {kind}",
                )
    for axis, label in zip(axes, ("seconds", "peak memory, GiB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel=label)
    axes[1].plot(
        params := [4e6, 8.5e8], [4 * count / 2**30 for count in params], "k:", label="weights alone"
    )
    axes[1].legend(fontsize="x-small")
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument(
        "--table",
        action="store_true",
        help="print the table of the stored results, measure nothing",
    )
    parser.add_argument(
        "--plot",
        action="store_true",
        help=f"draw {PLOT.name} from the stored results, measure nothing",
    )
    options = parser.parse_args()
    settings = {"sizes": SIZES, "fit": FIT_MODELS}
    rows = stored_rows(options.output, settings=settings)
    if not (options.table or options.plot):
        imports = imports_alone()
        for name in options.models:
            done = {(row["model"], row["stage"]) for row in rows}
            if {(name, stage) for stage in commands(name, Path(), Path())} <= done:
                continue
            for row in measure(name, done, imports):
                rows.append(row)
                print(f"{name} {row['stage']}: {row['seconds']:.1f} s", file=sys.stderr, flush=True)
                store(
                    options.output,
                    command="python benchmarks/growth.py",
                    settings=settings,
                    rows=rows,
                )
    if options.plot:
        plot(rows, PLOT if options.output == RESULT else options.output.with_suffix(".svg"))
    print(table(rows))


if __name__ == "__main__":
    main()
