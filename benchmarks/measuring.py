"""What the benchmarks of time and memory share.

Fresh processes, peak memory, statistics, stored results.

Nothing here imports torch, so that a script that only starts processes stays small.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MIB = 2**20


# Statistics.


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, by linear interpolation.

    Of one value, itself three times.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def summary(values: Sequence[float]) -> dict[str, float]:
    """Quartiles and number of the repetitions, as they are stored."""
    low, middle, high = quartiles(values)
    return {
        "median": middle,
        "first_quartile": low,
        "third_quartile": high,
        "repetitions": len(values),
    }


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


# Processes of their own.


@dataclass(frozen=True, kw_only=True)
class FreshRun:
    """One command in a process of its own."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float  # from before it was started to its end
    peak_bytes: (
        int  # most resident memory at any time, of the process and of those that it waited for
    )


class FreshProcessError(RuntimeError):
    """The process ended with an error, or without the JSON that was expected of it."""


# Linux counts the memory of the process that starts another in with the other's, so this small one
# stands between.
_LAUNCHER = """
import json, os, resource, sys, time
report, *command = sys.argv[1:]
start = time.perf_counter()
pid = os.posix_spawnp(command[0], command, os.environ)
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - start
unit = 1 if sys.platform == "darwin" else 1024
with open(report, "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss * unit], file)
"""


def run_fresh(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> FreshRun:
    """Runs a command in a fresh process and measures it; never raises because of what the command
    did.

    Args:
        env: Changes to the environment that this process has.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        launched = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(report), *command],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise FreshProcessError(f"{command[0]} could not be started:\n{launched.stderr}")
        returncode, seconds, peak = json.loads(report.read_text(encoding="utf-8"))
    return FreshRun(
        returncode=returncode,
        stdout=launched.stdout,
        stderr=launched.stderr,
        seconds=seconds,
        peak_bytes=peak,
    )


def fresh_process(
    script: str | Path, *arguments: str, env: Mapping[str, str] | None = None
) -> tuple[Any, float, int]:
    """Runs a Python script that prints one JSON value as the last line of its stdout.

    Returns:
        That value, the wall time in seconds, the peak resident memory in bytes.

    Raises:
        FreshProcessError: It ended with an error, or its last line is no JSON.
    """
    run = run_fresh([sys.executable, str(script), *arguments], env=env)
    called = " ".join([str(script), *arguments])
    if run.returncode:
        raise FreshProcessError(f"{called} ended with {run.returncode}:\n{run.stderr}")
    try:
        return json.loads(run.stdout.strip().splitlines()[-1]), run.seconds, run.peak_bytes
    except (IndexError, json.JSONDecodeError) as error:
        raise FreshProcessError(
            f"{called} printed no JSON, but {run.stdout!r}\n{run.stderr}"
        ) from error


# Memory of this process.


def resident_bytes() -> int:
    """Memory of this process now (VmRSS; Linux)."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Most memory of this process since it started, or since `reset_peak_bytes` (VmHWM; Linux)."""
    return _status_bytes("VmHWM")


def reset_peak_bytes() -> None:
    """Makes `peak_bytes` start again from the memory of now (5 into /proc/self/clear_refs; Linux).

    Raises:
        OSError: The system does not allow it.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024


# Stored results.


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of installed packages, by the names they are installed under.

    "missing" where there is none.
    """
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def hardware() -> dict[str, Any]:
    """Processor's name, cores that this process may use, memory.

    The GPU's name where torch is loaded and sees one.
    """
    found: dict[str, Any] = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(
            r"^model name\s*:\s*(.+)$", information.read_text(encoding="utf-8"), re.MULTILINE
        )
        if found is not None:
            return found[1].strip()
    return platform.processor() or "unknown"


def store(
    path: Path,
    *,
    command: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    packages: Sequence[str] = ("torch", "timm", "dcls-convert"),
) -> None:
    """Writes what was measured so far.

    To be called after every row, so that an interrupted run keeps its rows.
    """
    result = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "versions": versions(*packages),
        "hardware": hardware(),
        "settings": dict(settings),
        "rows": list(rows),
    }
    path.parent.mkdir(exist_ok=True, parents=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def stored_rows(path: Path, *, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run with the same settings, to go on from.

    An empty list if there is no such run.
    """
    if not path.exists():
        return []
    result = json.loads(path.read_text(encoding="utf-8"))
    same = result["settings"] == json.loads(json.dumps(dict(settings)))
    rows: list[dict[str, Any]] = result["rows"] if same else []
    return rows


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    rules = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rules, *rows])
