"""Verify a checkpoint folder: run every check, and report every problem."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from ..errors import DclsConvertError
from ..input_files import check_folder
from ..networks.weights import build_with_state, describe_non_finite
from ..networks.weights_files import load_safetensors
from ..planning.plan import ConversionPlan
from ..progress import Notify, silent
from ..records import Record, adapter
from ..text import counted, one_line, shown
from .fingerprint import TOLERANCES, deviation, take_fingerprint
from .folder import CONFIG, WEIGHTS, Checkpoint, open_checkpoint
from .inspection import position_sets
from .load import place_stored_plan_
from .stamp import Stamp, read_stamp

REBUILD_SECONDS = 600.0  # the process that rebuilds the model may take
# -P keeps the working directory out of the import path: a json.py there would hide Python's.
FRESH_PROCESS = (
    "-P",
    "-c",
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dcls_convert.checkpoints.verify import main; main(*sys.argv[2:])",
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
    """All checks of a folder, and whether none of them failed."""

    format: int = 1
    folder: str
    ok: bool
    checks: tuple[Check, ...]


class Checks(list[Check]):
    """Checks in the order in which they were made."""

    def add(self, name: str, problems: Iterable[str], good: str) -> None:
        """Add a check for every problem, or one that says what is good."""
        before = len(self)
        for problem in problems:
            self.fail(name, problem)
        if len(self) == before:
            self.succeed(name, good)

    def succeed(self, name: str, good: str) -> None:
        """Add a check that found no problem."""
        self.append(Check(name=name, ok=True, detail=good))

    def fail(self, name: str, problem: str) -> None:
        """Add a problem."""
        self.append(Check(name=name, ok=False, detail=problem))

    def skip(self, name: str, reason: str) -> None:
        """Add a check that was not made."""
        self.append(Check(name=name, ok=None, detail=f"not checked: {reason}"))

    def attempt(self, path: Path, work: Callable[[], Result], name: str = "") -> Result | None:
        """What the work returns; if it fails, None, and its message is added as a problem.

        The problem does not repeat the path with which the message may begin.
        """
        try:
            return work()
        except DclsConvertError as error:
            problem = one_line(error).removeprefix(f"{path}: ")
            self.fail(name or path.name, problem)
            return None


CheckModel = Callable[[Path, bool], list[Check]]  # folder, and whether to trust its code


def verify_folder(
    folder: str | Path,
    *,
    trust_code: bool = False,
    check_model: CheckModel | None = None,
    notify: Notify = silent,
) -> Verification:
    """Check a checkpoint folder: its files, that they belong together, and the model they describe.

    Args:
        folder: To check.
        trust_code: Whether to run the code of the user's own that the folder names as its model.
        check_model: Checks the model; without it, `check_model_in_fresh_process`.
        notify: Is told what is being done.

    Raises:
        CheckpointError: There is no folder. What is wrong with one is among the checks.
    """
    folder = check_folder(Path(folder))
    checks = Checks()
    notify("checking the files")
    checkpoint = checks.attempt(folder / CONFIG, lambda: open_checkpoint(folder))
    readable = _check_weights(checks, folder / WEIGHTS, checkpoint)
    if not readable or checkpoint is None:
        checks.skip("model", f"{CONFIG} or {WEIGHTS} cannot be read")
    else:
        reason = _reason_not_to_build(checkpoint, trust_code=trust_code)
        if reason is not None:
            checks.skip("model", reason)
        else:
            notify("rebuilding the model in a fresh process")
            checks += (check_model or check_model_in_fresh_process)(folder, trust_code)
    ok = all(check.ok is not False for check in checks)
    return Verification(folder=str(folder), ok=ok, checks=tuple(checks))


def _reason_not_to_build(checkpoint: Checkpoint, *, trust_code: bool) -> str | None:
    """Why the checkpoint's model may not or cannot be built; None if it may."""
    try:
        checkpoint.source(trust_code=trust_code)
    except DclsConvertError as error:
        return one_line(error)
    return None


def _check_weights(checks: Checks, path: Path, checkpoint: Checkpoint | None) -> bool:
    """Check a weights file, also without a config; whether it can be read."""
    content = checks.attempt(path, lambda: (read_stamp(path), load_safetensors(path)))
    if content is None:
        return False
    stamp, state = content
    if checkpoint is not None:
        _check_as_written(checks, checkpoint, stamp, state)
    checks.add("values", _not_finite_values(state), "all are finite")
    if checkpoint is not None and checkpoint.stored_plan is not None:
        _check_positions(checks, checkpoint.stored_plan, state)
    return True


def _check_as_written(
    checks: Checks, checkpoint: Checkpoint, stamp: Stamp | None, state: Mapping[str, Tensor]
) -> None:
    """Check that config and weights are those that were written together."""
    path = checkpoint.weights_path
    before = len(checks)
    checks.attempt(path, lambda: checkpoint.check_stamp(stamp))
    checks.attempt(path, lambda: checkpoint.check_tensors(state))
    if stamp is None and checkpoint.tensors_hash is None:
        problem = "has no metadata of dcls-convert: nothing says that it belongs to this folder"
        checks.fail(WEIGHTS, problem)
    if len(checks) == before:
        checks.succeed(CONFIG, "as written")
        checks.succeed(WEIGHTS, f"{counted(len(state), 'tensor')}, as written")


def _not_finite_values(state: Mapping[str, Tensor]) -> Iterator[str]:
    """Messages about tensors with NaN or infinite values; masks of -inf are allowed."""
    for name, tensor in state.items():
        problem = describe_non_finite(name, tensor, mask=tensor.dim() > 1)
        if problem is not None:
            yield problem


def _check_positions(checks: Checks, plan: ConversionPlan, state: Mapping[str, Tensor]) -> None:
    """Check that the plan's positions are there, and inside their windows."""
    sets = position_sets(plan)
    problems: list[str] = []
    for positions in sets:
        misfits = list(positions.misfits(state))
        if misfits:
            problems += misfits
        else:
            problems += positions.outside(state)
    good = "none"
    if sets:
        good = f"{counted(len(sets), 'tensor')}, all inside the window"
    checks.add("positions", problems, good)


def check_model_in_fresh_process(
    folder: Path, trust_code: bool, *, seconds: float = REBUILD_SECONDS
) -> list[Check]:
    """The checks of `check_model_here`, by a new Python, which may run a model of the user's own.

    It has this process's import path.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "checks.json"
        path = json.dumps([str(entry) for entry in sys.path])
        arguments = [path, str(folder), str(trust_code), str(result)]
        try:
            done = subprocess.run(
                [sys.executable, *FRESH_PROCESS, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return [_failed_process(f"took more than {seconds:g} s")]
        if done.returncode != 0 or not result.is_file():
            return [_failed_process(_end_of_process(done.returncode, done.stderr))]
        checks: list[Check] = adapter(list[Check]).validate_json(result.read_bytes())
        return checks


def _failed_process(what: str) -> Check:
    return Check(name="model", ok=False, detail=f"the process that rebuilt it {what}")


def _end_of_process(code: int, stderr: str) -> str:
    """How a process ended, and the last line that it wrote."""
    end = f"ended with code {code}"
    if code < 0:
        end = f"was ended by signal {-code}"
    lines = stderr.strip().splitlines()
    last = lines[-1] if lines else "it said nothing"
    return f"{end}: {shown(last, 300)}"


def main(folder: str, trust_code: str, result: str) -> None:
    """Write the checks of the model to a file; whatever it prints goes to stderr."""
    with redirect_stdout(sys.stderr):
        checks = check_model_here(Path(folder), trust_code == "True")
    Path(result).write_bytes(adapter(list[Check]).dump_json(checks))


def check_model_here(folder: Path, trust_code: bool) -> list[Check]:
    """Build the model of a folder that can be read; check names, shapes and outputs.

    Whether the weights belong to the config is not checked here: `verify_folder` has done so, and a
    mismatch is no reason not to build.
    """
    checks = Checks()
    checkpoint = open_checkpoint(folder)
    path = checkpoint.weights_path
    stamp = read_stamp(path)
    state = load_safetensors(path)
    source = checkpoint.source(trust_code=trust_code)

    def prepare_(model: nn.Module) -> None:
        if checkpoint.stored_plan is not None:
            place_stored_plan_(model, checkpoint.stored_plan)
        _take_precision_(model, state)

    built = checks.attempt(
        path, lambda: build_with_state(source, state, str(path), prepare_=prepare_), "model"
    )
    if built is None:
        return checks
    model, _ = built
    checks.succeed("model", f"{shown(source.name)} rebuilt; all {len(state)} tensors fit")
    _check_outputs(checks, model, checkpoint, stamp)
    return checks


def _take_precision_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give the model the precision of the stored tensors, in which its outputs were computed."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        stored = state.get(name)
        if stored is None:
            continue
        if tensor.is_floating_point() and stored.is_floating_point():
            tensor.data = tensor.data.to(stored.dtype)


def _check_outputs(
    checks: Checks, model: nn.Module, checkpoint: Checkpoint, stamp: Stamp | None
) -> None:
    """Compare the model's outputs with those that were stored with the weights."""
    stored = None
    reason = ""
    if stamp is not None and stamp.fingerprint is not None:
        stored = stamp.fingerprint
        reason = f": {stored.reason}"
    if stored is None or stored.outputs is None:
        checks.skip("outputs", f"none were stored when it was saved{reason}")
        return
    taken = take_fingerprint(model.eval(), checkpoint.input_size)
    if taken.outputs is None:
        checks.fail("outputs", f"the model does not run: {taken.reason}")
        return
    difference = deviation(taken, stored)
    tolerance = TOLERANCES[stored.dtype]
    sizes = f"difference {difference:.1e}, tolerance {tolerance:g} in {stored.dtype}"
    if difference > tolerance:
        checks.fail("outputs", f"do not match the stored ones ({sizes})")
    else:
        checks.succeed("outputs", f"match the stored ones ({sizes})")
