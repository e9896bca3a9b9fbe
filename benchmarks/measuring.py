"""Shared by the benchmarks: statistics, fresh processes, peak memory, results and their tables.

Nothing here imports torch, so that a script that only starts processes needs little memory.
"""

import argparse
import contextlib
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
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
EXAMPLES = Path(__file__).parents[1] / "examples"
MIB = 2**20
PACKAGES = ("torch", "timm", "dcls-convert")  # whose versions are stored
PROGRAM = os.path.join(sysconfig.get_path("scripts"), "dcls-convert")


# The command line of a script.


def script_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser whose --help shows the script's docstring as it is written."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_results_options_(parser: argparse.ArgumentParser, output: Path) -> None:
    """Add --output, the file of the results, and --table, which prints them without measuring."""
    parser.add_argument("--output", type=Path, default=output, help="file of the results")
    parser.add_argument(
        "--table", action="store_true", help="print the stored results, measure nothing"
    )


# Statistics.


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile, by linear interpolation.

    A single value is returned three times.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return quartiles and number of the repetitions, in the form in which they are stored."""
    low, middle, high = quartiles(values)
    return {
        "median": middle,
        "first_quartile": low,
        "third_quartile": high,
        "repetitions": len(values),
    }


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


# Settings of the package.


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of a module or object another value until the block ends."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


# Processes of their own.


@dataclass(frozen=True, kw_only=True)
class FreshRun:
    """One command in a process of its own."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float  # wall time, from before it was started to its end
    user_seconds: float  # processor time in user mode
    # Peak resident memory of a single process: the command's, or one that it waited for.
    peak_bytes: int


class FreshProcessError(RuntimeError):
    """The process was not started, ended with an error, or did not print the expected JSON."""


# On Linux, the peak memory of a process includes that of the process which started it. This small
# process, started in between, keeps the parent's memory out.
_LAUNCHER = """
import json, os, resource, sys, time
report, *command = sys.argv[1:]
start = time.perf_counter()
pid = os.posix_spawnp(command[0], command, os.environ)
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - start
unit = 1 if sys.platform == "darwin" else 1024
measured = {
    "returncode": os.waitstatus_to_exitcode(status),
    "seconds": seconds,
    "user_seconds": usage.ru_utime,
    "peak_bytes": usage.ru_maxrss * unit,
}
with open(report, "w") as file:
    json.dump(measured, file)
"""


def run_fresh(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, check: bool = True
) -> FreshRun:
    """Run a command in a fresh process and measure it.

    Args:
        env: Changes to the environment of this process.
        check: Raise if the command ends with an error.

    Raises:
        FreshProcessError: The command could not be started, or ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        launched = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(report), *command],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise FreshProcessError(f"{command[0]} could not be started:\n{launched.stderr}")
        measured = json.loads(report.read_text(encoding="utf-8"))
    run = FreshRun(stdout=launched.stdout, stderr=launched.stderr, **measured)
    if check and run.returncode:
        raise FreshProcessError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
    return run


def json_of_fresh(arguments: Sequence[str], *, env: Mapping[str, str] | None = None) -> Any:
    """Run a fresh Python with these arguments; return the JSON in the last line of its stdout.

    Raises:
        FreshProcessError: It ended with an error, or its last line is not JSON.
    """
    run = run_fresh([sys.executable, *arguments], env=env)
    try:
        return json.loads(run.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError) as error:
        called = " ".join(arguments)
        raise FreshProcessError(
            f"{called} printed no JSON, but {run.stdout!r}\n{run.stderr}"
        ) from error


# Imports that a command needs before it looks at a model.
IMPORTS = "import torch, torchvision, timm"
# Builds a timm model, saves its state, and prints the number of parameters and the state's bytes.
SAVE_MODEL = f"""
import json, sys
{IMPORTS}
from safetensors.torch import save_file
torch.manual_seed(1)
model = timm.create_model(sys.argv[1])
state = model.state_dict()
save_file(state, sys.argv[2])
parameters = sum(parameter.numel() for parameter in model.parameters())
print(json.dumps([parameters, sum(tensor.nbytes for tensor in state.values())]))
"""


def save_model(name: str, path: Path) -> tuple[int, int]:
    """Save a timm model with random weights, as a fresh process builds it.

    Returns:
        The number of its parameters, and of bytes of its state.
    """
    parameters, state_bytes = json_of_fresh(["-c", SAVE_MODEL, name, str(path)])
    return parameters, state_bytes


# Memory of this process.


def resident_bytes() -> int:
    """Return the memory of this process now (VmRSS; Linux)."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the peak memory of this process since `reset_peak_bytes` or its start (VmHWM)."""
    return _status_bytes("VmHWM")


def reset_peak_bytes() -> None:
    """Reset `peak_bytes` to the memory of now (writes 5 to /proc/self/clear_refs; Linux).

    Raises:
        OSError: The system does not allow it.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(match[1]) * 1024


# Stored results.


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of packages, by the names they are installed under.

    The version is "missing" if a package is not installed.
    """
    version_of = {"python": platform.python_version()}
    for package in packages:
        try:
            version_of[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version_of[package] = "missing"
    return version_of


def hardware() -> dict[str, Any]:
    """Return the processor's name, the cores that this process may use, and the memory.

    If torch is loaded and sees a GPU, its name is included.
    """
    description: dict[str, Any] = {
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
        description["gpu"] = torch.cuda.get_device_name()
    return description


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        match = re.search(
            r"^model name\s*:\s*(.+)$", information.read_text(encoding="utf-8"), re.MULTILINE
        )
        if match is not None:
            return match[1].strip()
    return platform.processor() or "unknown"


def store(
    path: Path,
    *,
    command: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    packages: Sequence[str] = PACKAGES,
    **more: Any,
) -> None:
    """Write all results so far, as JSON lines.

    This is called after every row, so that an interrupted run keeps its rows. The first line has
    the command, the settings, and more entries if there are any; then there is a line for each row.
    """
    first = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "versions": versions(*packages),
        "hardware": hardware(),
        "settings": dict(settings),
        **more,
    }
    text = "\n".join(json.dumps(line) for line in [first, *rows])
    path.parent.mkdir(exist_ok=True, parents=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def stored(path: Path) -> dict[str, Any]:
    """Return what `store` wrote: the entries of its first line, and its rows."""
    first, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return first | {"rows": rows}


def machine_of(result: Mapping[str, Any]) -> str:
    """Describe the machine of stored results; some early ones have a text instead."""
    if "machine" in result:
        return str(result["machine"])
    machine = result["hardware"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']} {machine['architecture']}"
    )


def stored_rows(path: Path, *, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run with the same settings, to continue from.

    The list is empty if there is no file. If the file has other settings, end the program, since
    the next `store` would replace its rows.
    """
    if not path.exists():
        return []
    result = stored(path)
    new = json.loads(json.dumps(dict(settings)))
    differing = []
    for name in dict.fromkeys([*result["settings"], *new]):
        old_value = result["settings"].get(name)
        new_value = new.get(name)
        if old_value != new_value:
            differing.append(f"{name}: {old_value}, not {new_value}")
    if differing:
        sys.exit(
            f"error: {path} holds results with other settings ({'; '.join(differing)}); "
            "give --output or delete it"
        )
    rows: list[dict[str, Any]] = result["rows"]
    return rows


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a script while it measures."""

    path: Path
    command: str
    settings: Mapping[str, Any]
    rows: list[dict[str, Any]]  # at first, the rows that are stored already
    packages: Sequence[str] = PACKAGES

    def add_(self, row: Mapping[str, Any], *, message: str | None = None) -> None:
        """Store one more row, and print the message, or else the row's JSON, to stderr."""
        self.rows.append(dict(row))
        store(
            self.path,
            command=self.command,
            settings=self.settings,
            rows=self.rows,
            packages=self.packages,
        )
        print(message or json.dumps(row), file=sys.stderr, flush=True)


def run_trainings(
    docstring: str | None,
    name: str,
    train: Callable[[int, int], Iterable[Mapping[str, Any]]],
    table: Callable[[Sequence[dict[str, Any]]], str],
    *,
    seeds: int,
    steps: int,
    settings: Mapping[str, Any],
) -> None:
    """Run a script that trains networks: store its results and print their table.

    Args:
        docstring: The script's.
        name: Of the script and of its results, without a suffix.
        train: `train(seeds, steps)` yields a row for each training.
        table: Returns the table of rows.
        seeds, steps: The defaults of the options of these names.
        settings: Other settings, which are stored.
    """
    parser = script_parser(docstring)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--steps", type=int, default=steps, help="of each training")
    add_results_options_(parser, RESULTS / f"{name}.jsonl")
    options = parser.parse_args()
    if options.table:
        print(table(stored(options.output)["rows"]))
        return
    import torch

    torch.set_num_threads(1)
    results = Results(
        path=options.output,
        command=f"python benchmarks/{name}.py --seeds {options.seeds} --steps {options.steps}",
        settings={"steps": options.steps, **settings},
        rows=[],
    )
    for row in train(options.seeds, options.steps):
        results.add_(row)
    print(table(results.rows))


# Tables.


def quartiles_text(
    values: Mapping[str, float], form: str, *, scale: float = 1.0, between: str = " to "
) -> str:
    """Format median and quartiles of a `summary`: "2.1 (2.0 to 2.3)".

    Args:
        form: Format specification of each number, as in `format`.
        scale: Factor that each number is multiplied by first.
        between: Text between the quartiles.
    """
    low, middle, high = (
        format(scale * values[key], form) for key in ("first_quartile", "median", "third_quartile")
    )
    return f"{middle} ({low}{between}{high})"


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, align_right: bool = True
) -> str:
    """Return a table with the first column aligned left, and the others right by default."""
    others = "---:" if align_right else "---"
    rules = ["---", *[others] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rules, *rows])
