"""Measure how time and memory grow with the size of the model.

    python benchmarks/growth.py [--models NAME ...] [--table] [--plot]

The commands are plan (dry run), conversion with random initialisation, warm start from a file, and
export (fold), for ConvNeXts and ResNets from 4 M to 846 M parameters, each in a fresh process.
Results are stored after every row, and a new call measures the missing rows.
"""

import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import (
    IMPORTS,
    MIB,
    PROGRAM,
    RESULTS,
    Results,
    add_results_options_,
    markdown_table,
    run_fresh,
    save_model,
    script_parser,
    stored,
    stored_rows,
)

RESULT = RESULTS / "growth.json"
PLOT = Path(__file__).parent / "growth.svg"
SIZES = {  # the paper's windows
    **dict.fromkeys(
        [
            f"convnext_{size}"
            for size in ("atto", "nano", "tiny", "base", "large", "xlarge", "xxlarge")
        ],
        "17",
    ),
    **dict.fromkeys(["resnet18", "resnet50", "resnet152"], "7"),
}
COMMANDS = ("plan", "random", "fit", "fold")  # each is the "stage" of a stored row
# The cost of a fit grows with the number of kernels. Dense 3x3 convolutions have a thousand times
# as many as depthwise ones.
FIT_MODELS = tuple(name for name in SIZES if name != "resnet152")


def command_line(name: str, command: str, scratch: Path) -> list[str]:
    """Return the command line of one of COMMANDS; it writes to the folder of that name."""
    output = ["--output", str(scratch / command)]
    if command == "fold":
        return [PROGRAM, "fold", str(scratch / "random"), *output]
    convert = [PROGRAM, name, "--dilated-size", SIZES[name]]
    if command == "plan":
        return [*convert, "--dry-run"]
    if command == "fit":
        fitted = ["--checkpoint", str(weights_file(scratch)), "--init", "fit"]
        return [*convert, *fitted, "--quiet", *output]
    return [*convert, "--quiet", *output]


def weights_file(scratch: Path) -> Path:
    return scratch / "weights.safetensors"


def commands_of(name: str) -> list[str]:
    return [command for command in COMMANDS if command != "fit" or name in FIT_MODELS]


def measure(name: str, missing: set[str], imports: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Measure the missing commands for one model; yield a row for each."""
    to_run = set(missing)
    if "fold" in missing:
        to_run.add("random")  # it writes the folder that is folded
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        params, _ = save_model(name, weights_file(scratch))
        for command in COMMANDS:
            if command not in to_run:
                continue
            run = run_fresh(command_line(name, command, scratch))
            if command != "random":
                shutil.rmtree(scratch / command, ignore_errors=True)
            if command in missing:
                yield {
                    "model": name,
                    "params": params,
                    "stage": command,
                    "seconds": run.seconds,
                    "peak_mib": run.peak_bytes / MIB,
                    "imports": imports,
                }


def imports_alone() -> dict[str, float]:
    """Return time and memory of the imports, in the fastest of three runs."""
    runs = [run_fresh([sys.executable, "-c", IMPORTS]) for _ in range(3)]
    run = min(runs, key=lambda run: run.seconds)
    return {"seconds": run.seconds, "peak_mib": run.peak_bytes / MIB}


def exponent(rows: list[dict[str, Any]], key: str) -> float | None:
    """Fit b in key = a * params ** b to what is above the imports, on a log scale."""
    log_params = []
    log_values = []
    for row in rows:
        if row[key] > 1.05 * row["imports"][key]:
            log_params.append(math.log(row["params"]))
            log_values.append(math.log(row[key] - row["imports"][key]))
    if len(log_params) < 3:
        return None
    return statistics.linear_regression(log_params, log_values).slope


def family(row: dict[str, Any]) -> str:
    return "ConvNeXt" if row["model"].startswith("convnext") else "ResNet"


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown: a row for each model, and how time and memory of the ConvNeXts grow."""
    row_of = {(row["model"], row["stage"]): row for row in rows}
    lines = []
    for params, model in sorted({(row["params"], row["model"]) for row in rows}):
        cells = [cell(row_of.get((model, command))) for command in COMMANDS]
        lines.append([model, f"{params / 1e6:.1f}", *cells])
    for key, quantity in (("seconds", "time"), ("peak_mib", "memory")):
        cells = []
        for command in COMMANDS:
            members = [row for row in rows if row["stage"] == command and family(row) == "ConvNeXt"]
            value = exponent(members, key)
            cells.append("" if value is None else f"{value:.2f}")
        lines.append([f"ConvNeXt: exponent of {quantity} above the imports'", "", *cells])
    return markdown_table(["model", "M parameters", *COMMANDS], lines)


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['seconds']:.1f} s, {row['peak_mib'] / 1024:.2f} GiB"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "growth"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for number, command in enumerate(COMMANDS):
        for kind, marker in (("ConvNeXt", "o-"), ("ResNet", "s--")):
            points = [row for row in rows if row["stage"] == command and family(row) == kind]
            if not points:
                continue
            points.sort(key=lambda row: row["params"])
            params = [row["params"] for row in points]
            for axis, key, scale in ((axes[0], "seconds", 1), (axes[1], "peak_mib", 1024)):
                axis.plot(
                    params,
                    [row[key] / scale for row in points],
                    marker,
                    color=f"C{number}",
                    label=f"{command}, {kind}",
                )
    for axis, label in zip(axes, ("seconds", "peak memory, GiB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel=label)
    params = [4e6, 8.5e8]
    weights_gib = [4 * count / 2**30 for count in params]
    axes[1].plot(params, weights_gib, "k:", label="weights alone")
    axes[1].legend(fontsize="x-small")
    figure.savefig(path, format="svg", metadata={"Date": None})


def run(models: list[str], output: Path) -> list[dict[str, Any]]:
    """Measure and store what is not stored yet; return all rows."""
    settings = {"sizes": SIZES, "fit": FIT_MODELS}
    results = Results(
        path=output,
        command="python benchmarks/growth.py",
        settings=settings,
        rows=stored_rows(output, settings=settings),
    )
    imports = imports_alone()
    for name in models:
        done = {row["stage"] for row in results.rows if row["model"] == name}
        missing = set(commands_of(name)) - done
        if not missing:
            continue
        for row in measure(name, missing, imports):
            results.add_(row, message=f"{name} {row['stage']}: {row['seconds']:.1f} s")
    return results.rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    add_results_options_(parser, RESULT)
    parser.add_argument(
        "--plot",
        action="store_true",
        help=f"draw {PLOT.name} from the stored results, measure nothing",
    )
    options = parser.parse_args()
    if options.table or options.plot:
        rows = stored(options.output)["rows"]
    else:
        rows = run(options.models, options.output)
    if options.plot:
        plot(rows, PLOT if options.output == RESULT else options.output.with_suffix(".svg"))
    print(table(rows))


if __name__ == "__main__":
    main()
