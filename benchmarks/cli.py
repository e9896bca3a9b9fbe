"""Compare whole processes of the command line with their floors.

    python benchmarks/cli.py [--repeats N] [--no-largest]

A floor is a script that does the least that a command must do: it imports what the command needs
and, for a conversion, builds or reads the model's state and saves it. Every command and its floor
run in turn, in fresh processes; outputs go to a temporary folder and are deleted at once.
"""

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import (
    IMPORTS,
    MIB,
    PROGRAM,
    RESULTS,
    SAVE_MODEL,
    Results,
    add_results_options_,
    json_of_fresh,
    markdown_table,
    quartiles_text,
    run_fresh,
    save_model,
    script_parser,
    stored,
    stored_rows,
    summary,
)

HELP_IMPORTS = "import typer, rich"
COPY_WEIGHTS = (
    f"import sys; {IMPORTS}; from safetensors.torch import load_file, save_file; "
    "save_file(load_file(sys.argv[1]), sys.argv[2])"
)
WEIGHTS_BYTES = """
import sys, timm, torch
with torch.device("meta"):
    state = timm.create_model(sys.argv[1]).state_dict()
print(sum(tensor.nbytes for tensor in state.values()))
"""
MODEL = "convnext_tiny"
LARGEST = "convnext_xxlarge"
SIZE = ("--dilated-size", "17")
MEASURES = ("seconds", "user_seconds", "peak_mib")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command, and what it is compared with."""

    name: str
    command: list[str]
    floor: list[str]
    weights_of: str | None = None  # model whose weights the peak memory is compared with


def cases(scratch: Path) -> list[Case]:
    """Return all cases, the largest model last; they write to `out` and `floor.safetensors`."""
    output = ["--output", str(scratch / "out"), "--quiet"]
    floor_file = str(scratch / "floor.safetensors")
    weights = str(weights_file(scratch))

    def main_job(model: str) -> Case:
        return Case(
            name=model,
            command=[PROGRAM, model, *SIZE, *output],
            floor=[sys.executable, "-c", SAVE_MODEL, model, floor_file],
            weights_of=model,
        )

    return [
        Case(
            name="--help",
            command=[PROGRAM, "--help"],
            floor=[sys.executable, "-c", HELP_IMPORTS],
        ),
        Case(
            name=f"{MODEL} --dry-run",
            command=[PROGRAM, MODEL, *SIZE, "--dry-run"],
            floor=[sys.executable, "-c", IMPORTS],
        ),
        main_job(MODEL),
        Case(
            name=f"{MODEL} --checkpoint --init largest",
            command=[PROGRAM, MODEL, *SIZE, "--checkpoint", weights, "--init", "largest", *output],
            floor=[sys.executable, "-c", COPY_WEIGHTS, weights, floor_file],
            weights_of=MODEL,
        ),
        main_job(LARGEST),
    ]


def weights_file(scratch: Path) -> Path:
    return scratch / "weights" / f"{MODEL}.safetensors"


def measure_command(command: list[str], scratch: Path) -> dict[str, float]:
    """Run a command; return its MEASURES, and delete what it wrote."""
    run = run_fresh(command)
    shutil.rmtree(scratch / "out", ignore_errors=True)
    (scratch / "floor.safetensors").unlink(missing_ok=True)
    return {
        "seconds": run.seconds,
        "user_seconds": run.user_seconds,
        "peak_mib": run.peak_bytes / MIB,
    }


def measure_case(case: Case, repeats: int, scratch: Path) -> dict[str, Any]:
    """Run the command and the floor in turn; return summaries of both."""
    ours = []
    floors = []
    for _ in range(repeats):
        floors.append(measure_command(case.floor, scratch))
        ours.append(measure_command(case.command, scratch))
    result: dict[str, Any] = {"case": case.name}
    for key in MEASURES:
        result[key] = summary([run[key] for run in ours])
        result[f"floor_{key}"] = summary([run[key] for run in floors])
    if case.weights_of is not None:
        result["weights_mib"] = json_of_fresh(["-c", WEIGHTS_BYTES, case.weights_of]) / MIB
        imports = measure_command([sys.executable, "-c", IMPORTS], scratch)
        result["imports_mib"] = imports["peak_mib"]
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown; peaks are compared with the floor's and, less the imports, with weights."""

    def line(row: dict[str, Any]) -> list[str]:
        ratios = [row[key]["median"] / row[f"floor_{key}"]["median"] for key in MEASURES]
        times_weights = ""
        if "weights_mib" in row:
            above_imports = row["peak_mib"]["median"] - row["imports_mib"]
            times_weights = f"{above_imports / row['weights_mib']:.2f}"
        return [
            f"`{row['case']}`",
            quartiles_text(row["seconds"], ".2f", between="-"),
            quartiles_text(row["floor_seconds"], ".2f", between="-"),
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{row['peak_mib']['median']:.0f}",
            times_weights,
        ]

    header = [
        "command",
        "s",
        "floor, s",
        "ratio",
        "of user CPU",
        "of peak",
        "peak, MiB",
        "(peak - imports) / weights",
    ]
    return markdown_table(header, [line(row) for row in rows])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--repeats-largest", type=int, default=1)
    parser.add_argument("--no-largest", action="store_true", help=f"omit {LARGEST}")
    add_results_options_(parser, RESULTS / "cli.jsonl")
    options = parser.parse_args()
    if options.table:
        print(table(stored(options.output)["rows"]))
        return
    settings = {"repeats": options.repeats, "repeats_largest": options.repeats_largest}
    command = f"python benchmarks/cli.py --repeats {options.repeats}"
    command += f" --repeats-largest {options.repeats_largest}"
    rows = stored_rows(options.output, settings=settings)
    results = Results(path=options.output, command=command, settings=settings, rows=rows)
    done = {row["case"] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        weights_file(scratch).parent.mkdir()
        save_model(MODEL, weights_file(scratch))
        for case in cases(scratch):
            is_largest = case.name == LARGEST
            if case.name in done or (is_largest and options.no_largest):
                continue
            start = time.perf_counter()
            repeats = options.repeats_largest if is_largest else options.repeats
            row = measure_case(case, repeats, scratch)
            seconds = time.perf_counter() - start
            results.add_(row, message=f"{case.name}: {seconds:.0f} s")
    print(table(results.rows))


if __name__ == "__main__":
    main()
