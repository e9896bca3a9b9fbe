"""How often the weights of a large model are in memory at once.

    python benchmarks/memory.py [--model NAME | --survey | --table]

Conversion from random weights and from a file, loading, verification and folding of what was
written, and a fit, each in a fresh process. A peak is the larger of two: the most proportional
memory (PSS) of all of a command's processes together, looked at 20 times a second; and the most
resident memory of one of them, which the system notes exactly. Both include pages of mapped files.
Needs three times the model's weights in memory, and four times on disk. `--survey` measures
`dcls-convert models` over both registries instead.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from measuring import (
    MIB,
    PROGRAM,
    RESULTS,
    FreshRun,
    Results,
    add_results_options_,
    markdown_table,
    run_fresh,
    save_model,
    script_parser,
    stored,
)

# Of timm's models that have layers to convert, the one with the most parameters.
LARGEST = "davit_giant"
SECONDS_BETWEEN_LOOKS = 0.05  # at a command's processes
IMPORTS = "import torch, torchvision, timm, safetensors.torch; import dcls_convert.checkpoints.save"
LOAD = "import sys, dcls_convert; dcls_convert.load_converted(sys.argv[1])"
LOAD_BY_TIMM = (
    "import sys, timm, dcls_convert; timm.create_model('local-dir:' + sys.argv[1], pretrained=True)"
)


def commands(name: str, scratch: Path) -> dict[str, list[str]]:
    """Command lines, by name; a conversion writes the folder that the next commands read."""
    folder = str(scratch / "out")
    weights = str(scratch / "weights.safetensors")
    convert = [PROGRAM, name, "--quiet", "--force", "--output", folder]
    return {
        "convert": convert,
        "convert --checkpoint --init largest": [
            *convert,
            "--checkpoint",
            weights,
            "--init",
            "largest",
        ],
        "load_converted": [sys.executable, "-c", LOAD, folder],
        "timm.create_model": [sys.executable, "-c", LOAD_BY_TIMM, folder],
        "inspect": [PROGRAM, "inspect", folder],
        "verify": [PROGRAM, "verify", folder],
        "fold": [PROGRAM, "fold", folder, "--output", str(scratch / "folded"), "--force"],
        "convert --checkpoint --init fit": [*convert, "--checkpoint", weights, "--init", "fit"],
    }


def run_watched(command: list[str]) -> tuple[FreshRun, int]:
    """Run a command; returns what it did, and its peak in bytes as the first lines of this file
    define it.
    """
    largest_pss = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal largest_pss
        own = psutil.Process()
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            together = 0
            for process in own.children(recursive=True):
                try:
                    together += process.memory_full_info().pss
                except psutil.Error:
                    continue
            largest_pss = max(largest_pss, together)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run = run_fresh(command)
    finally:
        ended.set()
        watcher.join()
    return run, max(largest_pss, run.peak_bytes)


def measure(name: str, wanted: list[str] | None) -> Iterator[dict[str, Any]]:
    """A row for each command, as they come."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        _, imports = run_watched([sys.executable, "-c", IMPORTS])
        _, weights = save_model(name, scratch / "weights.safetensors")
        for command, arguments in commands(name, scratch).items():
            if wanted and command not in wanted:
                continue
            run, peak = run_watched(arguments)
            yield {
                "model": name,
                "command": command,
                "seconds": run.seconds,
                "peak_mib": peak / MIB,
                "imports_mib": imports / MIB,
                "weights_mib": weights / MIB,
            }


def ratio(row: dict[str, Any]) -> float:
    """How often the weights are in memory."""
    return (row["peak_mib"] - row["imports_mib"]) / row["weights_mib"]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            f"`{row['command']}`",
            row["model"],
            f"{row['weights_mib']:.0f}",
            f"{row['imports_mib']:.0f}",
            f"{row['peak_mib']:.0f}",
            f"{ratio(row):.2f}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    header = [
        "command",
        "model",
        "weights, MiB",
        "imports, MiB",
        "peak, MiB",
        "(peak - imports) / weights",
        "s",
    ]
    return markdown_table(header, lines)


def measure_and_store(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows; a part of the commands is not stored, since the file has them all."""
    results = Results(
        path=options.output,
        command="python benchmarks/memory.py",
        settings={"model": options.model},
        rows=[],
    )
    rows = []
    for row in measure(options.model, options.only):
        rows.append(row)
        message = f"{row['command']}: {row['peak_mib']:.0f} MiB, {ratio(row):.2f} times the weights"
        if options.only:
            print(message, file=sys.stderr, flush=True)
        else:
            results.add_(row, message=message)
    return rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=LARGEST)
    parser.add_argument(
        "--only",
        nargs="+",
        help="these commands, in the words of the table, of which the first must be a conversion; "
        "their rows are printed and not stored",
    )
    parser.add_argument("--survey", action="store_true", help="of both registries; prints only")
    add_results_options_(parser, RESULTS / "memory.json")
    options = parser.parse_args()
    if options.survey:
        run, peak = run_watched([PROGRAM, "models", "--csv"])
        print(f"dcls-convert models: {run.seconds:.0f} s, {peak / MIB:.0f} MiB in all processes")
    elif options.table:
        print(table(stored(options.output)["rows"]))
    else:
        print(table(measure_and_store(options)))


if __name__ == "__main__":
    main()
