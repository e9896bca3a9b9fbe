"""Whether a checkpoint folder is whole, and is what it says: every check, and every problem in words."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import nn

from ..errors import DclsConvertError, one_line, shown
from ..files import check_folder
from ..networks.weights import build_with_state, load_file, not_finite
from ..progress import Notify, silent
from ..records import Record, adapter
from ..tables import counted
from .fingerprint import TOLERANCES, deviation, take_fingerprint
from .folder import (
    CONFIG,
    WEIGHTS,
    FolderConfig,
    check_stamp,
    check_tensors,
    read_folder,
    read_stamp,
)
from .inspection import position_sets
from .load import buildable, place_

MOST_SECONDS = 600.0  # for the process that rebuilds the model
FRESH_PROCESS = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dcls_convert.checkpoints.verify import main; main(*sys.argv[2:])"
)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check, or one problem: a check that finds several problems is there several times."""

    name: str
    ok: bool | None  # None: not checked, for the reason in `detail`
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification(Record):
    format: int = 1
    folder: str
    ok: bool
    checks: tuple[Check, ...]


class Checks(list[Check]):
    def add(self, name: str, problems: Iterable[str | None], good: str) -> None:
        """A check for every problem, None apart, or one that says what is good."""
        failed = [Check(name=name, ok=False, detail=problem) for problem in problems if problem]
        self.extend(failed or [Check(name=name, ok=True, detail=good)])

    def skip(self, name: str, reason: str) -> None:
        self.append(Check(name=name, ok=None, detail=f"not checked: {reason}"))

    def attempt(self, path: Path, work: Callable[[], Result], name: str = "") -> Result | None:
        """What the work returns; None and a problem, whose message does not repeat the path, where it fails."""
        try:
            return work()
        except DclsConvertError as error:
            self.add(name or path.name, [one_line(error).removeprefix(f"{path}: ")], "")
            return None


Rebuild = Callable[[Path, bool], list[Check]]  # folder, and whether to trust its code


def verify_folder(
    folder: str | Path,
    *,
    trust_code: bool = False,
    rebuild: Rebuild | None = None,
    notify: Notify = silent,
) -> Verification:
    """Check a checkpoint folder: its files, that they belong together, and the model they describe, by `rebuild`."""
    folder = check_folder(Path(folder))
    checks = Checks()
    notify("checking the files")
    config = checks.attempt(folder / CONFIG, lambda: read_folder(folder))
    if _check_weights(checks, folder / WEIGHTS, config) and config is not None:
        try:
            buildable(config, trust_code=trust_code)
        except DclsConvertError as error:
            checks.skip("model", one_line(error))
        else:
            notify("rebuilding the model in a fresh process")
            checks += (rebuild or rebuild_in_fresh_process)(folder, trust_code)
    else:
        checks.skip("model", f"{CONFIG} or {WEIGHTS} cannot be read")
    return Verification(
        folder=str(folder), ok=all(check.ok is not False for check in checks), checks=tuple(checks)
    )


def _check_weights(checks: Checks, path: Path, config: FolderConfig | None) -> bool:
    """That they belong to the config, are as written, finite, and inside their windows; whether they can be read."""
    content = checks.attempt(path, lambda: (read_stamp(path), load_file(path)))
    if content is None:
        return False
    stamp, state = content
    if config is not None:
        before = len(checks)
        checks.attempt(path, lambda: check_stamp(stamp, config))
        checks.attempt(path, lambda: check_tensors(state, config))
        if stamp is None and config.tensors is None:
            checks.add(
                WEIGHTS,
                ["has no metadata of dcls-convert: nothing says that it belongs to this folder"],
                "",
            )
        if len(checks) == before:
            checks.add(CONFIG, [], "as written")
            checks.add(WEIGHTS, [], f"{counted(len(state), 'tensor')}, as written")
    checks.add(
        "values",
        (not_finite(name, tensor, mask=tensor.dim() > 1) for name, tensor in state.items()),
        "all are finite",
    )
    if config is not None and config.plan is not None:
        sets = position_sets(config.plan)
        problems = (
            problem
            for place in sets
            for problem in list(place.misfits(state)) or place.outside(state)
        )
        checks.add(
            "positions",
            problems,
            f"{counted(len(sets), 'tensor')}, all inside the window" if sets else "none",
        )
    return True


def rebuild_in_fresh_process(
    folder: Path, trust_code: bool, *, seconds: float = MOST_SECONDS
) -> list[Check]:
    """The checks of `rebuild_here`, by a new Python with this process's import path, for models of the user's own."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "checks.json"
        path = json.dumps([str(entry) for entry in sys.path])
        # -P: a json.py in the working directory is not meant
        command = [
            sys.executable,
            "-P",
            "-c",
            FRESH_PROCESS,
            path,
            str(folder),
            str(trust_code),
            str(result),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=seconds
            )
            if done.returncode == 0 and result.is_file():
                checks: list[Check] = adapter(list[Check]).validate_json(result.read_bytes())
                return checks
        except subprocess.TimeoutExpired:
            what = f"took more than {seconds:g} s"
        else:
            code = done.returncode
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            what = f"{f'was ended by signal {-code}' if code < 0 else f'ended with code {code}'}: {shown(last, 300)}"
    return [Check(name="model", ok=False, detail=f"the process that rebuilt it {what}")]


def main(folder: str, trust_code: str, result: str) -> None:
    """Write the checks of `rebuild_here` to a file; whatever the model prints goes to stderr."""
    with redirect_stdout(sys.stderr):
        checks = rebuild_here(Path(folder), trust_code == "True")
    Path(result).write_bytes(adapter(list[Check]).dump_json(checks))


def rebuild_here(folder: Path, trust_code: bool) -> list[Check]:
    """Build the model of a folder that can be read; check names, shapes and outputs."""
    checks = Checks()
    path = folder / WEIGHTS
    config = read_folder(folder)
    state = load_file(path)
    stamp = read_stamp(path)
    source = buildable(config, trust_code=trust_code)

    def prepare_(model: nn.Module) -> None:
        if config.plan is not None:
            place_(model, config.plan)
        for name, tensor in model.state_dict(
            keep_vars=True
        ).items():  # the precision in which the outputs were stored
            if name in state and tensor.is_floating_point() and state[name].is_floating_point():
                tensor.data = tensor.data.to(state[name].dtype)

    built = checks.attempt(
        path, lambda: build_with_state(source, state, str(path), prepare_=prepare_), "model"
    )
    if built is None:
        return checks
    checks.add("model", [], f"{shown(source.name)} rebuilt; all {len(state)} tensors fit")
    stored = stamp.fingerprint if stamp is not None else None
    if stored is None or stored.outputs is None:
        checks.skip(
            "outputs", f"none were stored when it was saved{f': {stored.reason}' if stored else ''}"
        )
        return checks
    outputs = take_fingerprint(built[0].eval(), config.input_size)
    apart = deviation(outputs, stored)
    tolerance = TOLERANCES[stored.dtype]
    detail = f"differ by {apart:.1e} of the stored norm; up to {tolerance:g} is rounding in {stored.dtype}"
    detail = detail if outputs.outputs is not None else f"the model does not run: {outputs.reason}"
    checks.add("outputs", [] if apart <= tolerance else [detail], detail)
    return checks
