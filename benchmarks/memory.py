"""Measure how many copies of a large model's weights are in memory at once.

    python benchmarks/memory.py [--model NAME] [--table]

The commands are conversion from random weights and from a file, loading, verification and folding
of the checkpoint, and a fit, each in a fresh process. A peak is the larger of two numbers: the
largest proportional memory (PSS) of all processes of a command together, sampled 20 times a second;
and the peak resident memory of one of them, which the system records exactly. Both include pages of
mapped files. The script needs three times the model's weights in memory, and four times on disk.
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

# The largest of timm's models that have layers to convert.
LARGEST = "davit_giant"
SECONDS_BETWEEN_SAMPLES = 0.05
IMPORTS = "import torch, torchvision, timm, safetensors.torch; import dcls_convert.checkpoints.save"
LOAD = "import sys, dcls_convert; dcls_convert.load_converted(sys.argv[1])"
LOAD_BY_TIMM = (
    "import sys, timm, dcls_convert; timm.create_model('local-dir:' + sys.argv[1], pretrained=True)"
)


def commands(name: str, scratch: Path) -> dict[str, list[str]]:
    """Return command lines by name; a conversion writes the folder that the next ones read."""
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
    """Run a command; return its run, and its peak in bytes, as defined at the top of this file."""
    largest_pss = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal largest_pss
        own = psutil.Process()
        while not ended.wait(SECONDS_BETWEEN_SAMPLES):
            total_pss = 0
            for process in own.children(recursive=True):
                try:
                    total_pss += process.memory_full_info().pss
                except psutil.Error:
                    continue
            largest_pss = max(largest_pss, total_pss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run = run_fresh(command)
    finally:
        ended.set()
        watcher.join()
    return run, max(largest_pss, run.peak_bytes)


def measure(name: str, only: list[str] | None) -> Iterator[dict[str, Any]]:
    """Measure all commands, or `only` these; yield a row for each."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        _, imports = run_watched([sys.executable, "-c", IMPORTS])
        _, weights = save_model(name, scratch / "weights.safetensors")
        for command, arguments in commands(name, scratch).items():
            if only and command not in only:
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
    """Return how many copies of the weights are in memory."""
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
    """Return all rows. They are not stored if only some commands run: the file must have all."""
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
        help="run these commands, named as in the table; the first must be a conversion; "
        "their rows are printed and not stored",
    )
    add_results_options_(parser, RESULTS / "memory.jsonl")
    options = parser.parse_args()
    if options.table:
        print(table(stored(options.output)["rows"]))
    else:
        print(table(measure_and_store(options)))


if __name__ == "__main__":
    main()
