"""How often the weights of a large model are in memory at once.

    python benchmarks/memory.py [--model NAME | --survey]

Conversion from random weights and from a file, loading, verification and folding of what was
written, and a fit, each in a fresh process. Peaks are of resident memory, pages of mapped files
included, added up over a command's processes (PSS, since they share some). Needs three times the
model's weights in memory, and four times on disk. `--survey` measures `dcls-convert models` over
both registries instead.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from measuring import MIB, RESULTS, markdown_table, run_fresh, store

RESULT = RESULTS / "memory.json"
PROGRAM = os.path.join(sysconfig.get_path("scripts"), "dcls-convert")
# Of timm's models that have layers to convert, the one with the most parameters.
LARGEST = "davit_giant"
SECONDS_BETWEEN = 0.05  # two looks at a command's processes
IMPORTS = "import torch, torchvision, timm, safetensors.torch; import dcls_convert.checkpoints.save"
SAVE = (
    "import sys, timm, torch; from safetensors.torch import save_file; torch.manual_seed(1); "
    "state = timm.create_model(sys.argv[1]).state_dict(); save_file(state, sys.argv[2]); "
    "print(sum(tensor.nbytes for tensor in state.values()))"
)
LOAD = "import sys, dcls_convert; dcls_convert.load_converted(sys.argv[1])"
LOAD_BY_TIMM = (
    "import sys, timm, dcls_convert; timm.create_model('local-dir:' + sys.argv[1], pretrained=True)"
)


def commands(name: str, scratch: Path) -> dict[str, list[str]]:
    """By name; what converts writes to `scratch / "out"`, the others read what the last of these
    wrote.
    """
    folder, weights = str(scratch / "out"), str(scratch / "weights.safetensors")
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


def peak_of_tree(command: list[str]) -> tuple[float, int]:
    """Seconds, and the most bytes that the command's processes had together."""
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        own = psutil.Process()
        while not over.wait(SECONDS_BETWEEN):
            found = 0
            for process in own.children(recursive=True):
                try:
                    found += process.memory_full_info().pss
                except psutil.Error:
                    continue
            peak = max(peak, found)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    try:
        run = run_fresh(command)
    finally:
        over.set()
        watcher.join()
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
    return time.perf_counter() - start, max(peak, run.peak_bytes)


def measure(name: str, wanted: list[str] | None) -> Any:
    """A row for each command, as they come."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        _, imports = peak_of_tree([sys.executable, "-c", IMPORTS])
        saved = subprocess.run(
            [sys.executable, "-c", SAVE, name, str(scratch / "weights.safetensors")],
            capture_output=True,
            text=True,
            check=True,
        )
        weights = int(saved.stdout.strip().splitlines()[-1])
        for command, arguments in commands(name, scratch).items():
            if wanted and command not in wanted:
                continue
            seconds, peak = peak_of_tree(arguments)
            yield {
                "model": name,
                "command": command,
                "seconds": seconds,
                "peak_mib": peak / MIB,
                "imports_mib": imports / MIB,
                "weights_mib": weights / MIB,
            }
        shutil.rmtree(scratch / "out", ignore_errors=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=LARGEST)
    parser.add_argument("--only", nargs="+", help="these commands, in the words of the table")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--survey", action="store_true", help="of both registries; prints only")
    options = parser.parse_args()
    if options.survey:
        seconds, peak = peak_of_tree([PROGRAM, "models", "--csv"])
        print(f"dcls-convert models: {seconds:.0f} s, {peak / MIB:.0f} MiB in all processes")
        return
    rows: list[dict[str, Any]] = []
    for row in measure(options.model, options.only):
        rows.append(row)
        print(
            f"{row['command']}: {row['peak_mib']:.0f} MiB, {ratio(row):.2f} times the weights",
            file=sys.stderr,
            flush=True,
        )
        store(
            options.output,
            command="python benchmarks/memory.py",
            settings={"model": options.model},
            rows=rows,
        )
    print(table(rows))


if __name__ == "__main__":
    main()
