"""Whole processes of the command line beside their floors.

    python benchmarks/cli.py [--repeats N] [--no-largest]

Every command and its floor script run in turn, in fresh processes; outputs go to a temporary folder
and are deleted at once. A floor imports what the command needs, and for the main job builds the
model and saves its state.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import MIB, RESULTS, markdown_table, store, stored_rows, summary

RESULT = RESULTS / "cli.json"
PROGRAM = os.path.join(sysconfig.get_path("scripts"), "dcls-convert")
ANSWER = "import typer, rich"
IMPORTS = "import torch, torchvision, timm"
BUILD = (
    f"import sys; {IMPORTS}; from safetensors.torch import save_file; "
    "save_file(timm.create_model(sys.argv[1]).state_dict(), sys.argv[2])"
)
LOAD = (
    f"import sys; {IMPORTS}; from safetensors.torch import load_file, save_file; "
    "save_file(load_file(sys.argv[1]), sys.argv[2])"
)
LARGEST = "convnext_xxlarge"
SIZE = ("--dilated-size", "17")

# Linux counts the memory of the process that starts another in with that of the other, so this
# stands between.
LAUNCHER = """
import json, os, sys, time
start = time.perf_counter()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - start
exit_code = os.waitstatus_to_exitcode(status)
print(json.dumps([exit_code, seconds, usage.ru_utime, usage.ru_maxrss * 1024]))
"""


def cases(largest: bool, scratch: Path) -> dict[str, tuple[list[str], list[str], str | None]]:
    """Name -> command, floor, model whose weights are counted."""

    def main_job(model: str) -> tuple[list[str], list[str], str | None]:
        floor = [sys.executable, "-c", BUILD, model, str(scratch / "floor.safetensors")]
        return [PROGRAM, model, *SIZE, "--output", str(scratch / "out"), "--quiet"], floor, model

    weights = scratch / "weights" / "convnext_tiny.safetensors"
    from_file = [
        PROGRAM,
        "convnext_tiny",
        *SIZE,
        "--checkpoint",
        str(weights),
        "--init",
        "largest",
        "--quiet",
    ]
    found: dict[str, tuple[list[str], list[str], str | None]] = {
        "--help": ([PROGRAM, "--help"], [sys.executable, "-c", ANSWER], None),
        "convnext_tiny --dry-run": (
            [PROGRAM, "convnext_tiny", *SIZE, "--dry-run"],
            [sys.executable, "-c", IMPORTS],
            None,
        ),
        "convnext_tiny": main_job("convnext_tiny"),
        "convnext_tiny --checkpoint --init largest": (
            [*from_file, "--output", str(scratch / "out")],
            [sys.executable, "-c", LOAD, str(weights), str(scratch / "floor.safetensors")],
            "convnext_tiny",
        ),
    }
    return found | ({LARGEST: main_job(LARGEST)} if largest else {})


def measured(command: list[str], scratch: Path) -> dict[str, float]:
    """Wall seconds, user CPU seconds and peak MiB of one run; what it wrote is deleted."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, *command],
        capture_output=True,
        text=True,
        check=True,
    )
    code, seconds, user, peak = json.loads(done.stdout.splitlines()[-1])
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{done.stderr}")
    shutil.rmtree(scratch / "out", ignore_errors=True)
    (scratch / "floor.safetensors").unlink(missing_ok=True)
    return {"seconds": seconds, "user_seconds": user, "peak_mib": peak / MIB}


def weights_mib(model: str) -> float:
    code = (
        f"import sys, timm, torch\nwith torch.device('meta'): m = timm.create_model('{model}')\n"
        "print(sum(p.nbytes for p in m.state_dict().values()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) / MIB


def row(
    name: str, case: tuple[list[str], list[str], str | None], repeats: int, scratch: Path
) -> dict[str, Any]:
    command, floor, model = case
    ours, floors = [], []
    for _ in range(repeats):
        floors.append(measured(floor, scratch))
        ours.append(measured(command, scratch))
    result: dict[str, Any] = {"case": name}
    for key in ("seconds", "user_seconds", "peak_mib"):
        result[key] = summary([run[key] for run in ours])
        result[f"floor_{key}"] = summary([run[key] for run in floors])
    if model is not None:
        result["weights_mib"] = weights_mib(model)
        result["imports_mib"] = measured([sys.executable, "-c", IMPORTS], scratch)["peak_mib"]
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """Peaks are compared with the floor's, and without the imports' with the weights."""

    def spread(found: dict[str, float], digits: int) -> str:
        low, high = found["first_quartile"], found["third_quartile"]
        return f"{found['median']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

    def line(row: dict[str, Any]) -> list[str]:
        ratios = [
            row[key]["median"] / row[f"floor_{key}"]["median"]
            for key in ("seconds", "user_seconds", "peak_mib")
        ]
        over = ""
        if "weights_mib" in row:
            over = f"{(row['peak_mib']['median'] - row['imports_mib']) / row['weights_mib']:.2f}"
        return [
            f"`{row['case']}`",
            spread(row["seconds"], 2),
            spread(row["floor_seconds"], 2),
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{row['peak_mib']['median']:.0f}",
            over,
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


def save_weights(scratch: Path) -> None:
    (scratch / "weights").mkdir()
    floor = [
        sys.executable,
        "-c",
        BUILD,
        "convnext_tiny",
        str(scratch / "weights" / "convnext_tiny.safetensors"),
    ]
    subprocess.run(floor, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--repeats-largest", type=int, default=1)
    parser.add_argument("--no-largest", action="store_true", help=f"without {LARGEST}")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument(
        "--table",
        action="store_true",
        help="print the table of the stored results, measure nothing",
    )
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.output.read_text(encoding="utf-8"))["rows"]))
        return
    settings = {"repeats": options.repeats, "repeats_largest": options.repeats_largest}
    rows = stored_rows(options.output, settings=settings)
    command = f"python benchmarks/cli.py --repeats {options.repeats}"
    command += f" --repeats-largest {options.repeats_largest}"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        save_weights(scratch)
        for name, case in cases(not options.no_largest, scratch).items():
            if name in {row["case"] for row in rows}:
                continue
            start = time.perf_counter()
            repeats = options.repeats_largest if name == LARGEST else options.repeats
            rows.append(row(name, case, repeats, scratch))
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            store(options.output, command=command, settings=settings, rows=rows)
    print(table(rows))


if __name__ == "__main__":
    main()
