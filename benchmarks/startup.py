"""Measure how long the command line takes to answer, compared with importing typer and rich.

    python benchmarks/startup.py [RUNS]

Each command and the imports run in turn, in fresh processes. Prints medians, and the median and
range of the ratios of the pairs.
"""

import os
import statistics
import subprocess
import sys
import time

from measuring import PROGRAM

FLOOR = [sys.executable, "-c", "import typer, rich"]
COMMANDS = {
    "--help": [PROGRAM, "--help"],
    "--version": [PROGRAM, "--version"],
    "a bad option": [PROGRAM, "convnext_tiny", "--dilated-sise", "17"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=False)
    return time.perf_counter() - start


def main(runs: int = 15) -> None:
    print(
        f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, "
        f"{runs} runs each after one to warm up"
    )
    for command in [FLOOR, *COMMANDS.values()]:
        seconds(command)
    for name, command in COMMANDS.items():
        pairs = [(seconds(command), seconds(FLOOR)) for _ in range(runs)]
        ratios = sorted(ours / floor for ours, floor in pairs)
        ours, floor = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{name:13} {ours * 1e3:6.0f} ms, import typer, rich {floor * 1e3:6.0f} ms, "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
