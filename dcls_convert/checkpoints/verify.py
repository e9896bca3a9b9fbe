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
from ..networks.weights import build_and_load, describe_non_finite
from ..networks.weights_files import load_safetensors
from ..planning.plan import ConversionPlan
from ..progress import Notify, ignore_messages
from ..records import Record, adapter
from ..text import count_text, one_line, shortened
from .fingerprint import TOLERANCES, fingerprint_deviation, take_fingerprint
from .folder import CONFIG, WEIGHTS, Checkpoint, open_checkpoint
from .inspection import position_sets
from .load import place_stored_plan_
from .stamp import Stamp, read_stamp

REBUILD_SECONDS = 600.0  # time limit of the process that rebuilds the model
# -P keeps the working directory off the import path, where a json.py would hide Python's own.
FRESH_PROCESS = (
    "-P",
    "-c",
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dcls_convert.checkpoints.verify import main; main(*sys.argv[2:])",
)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check. A check that finds several problems has one entry for each."""

    name: str
    ok: bool | None  # None if not checked; `detail` says why
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification(Record):
    """All checks of a folder."""

    format: int = 1
    folder: str
    ok: bool  # no check failed
    checks: tuple[Check, ...]


class Checks(list[Check]):
    """Results of checks, in the order in which the checks were made."""

    def add(self, name: str, problems: Iterable[str], success: str) -> None:
        """Add a failed check for each problem; without any, a passed check."""
        before = len(self)
        for problem in problems:
            self.fail(name, problem)
        if len(self) == before:
            self.succeed(name, success)

    def succeed(self, name: str, detail: str) -> None:
        """Add a check that passed."""
        self.append(Check(name=name, ok=True, detail=detail))

    def fail(self, name: str, problem: str) -> None:
        """Add a check that failed."""
        self.append(Check(name=name, ok=False, detail=problem))

    def skip(self, name: str, reason: str) -> None:
        """Add a check that was not made."""
        self.append(Check(name=name, ok=None, detail=f"not checked: {reason}"))

    def attempt(self, path: Path, work: Callable[[], Result], name: str = "") -> Result | None:
        """Return what `work` returns; if it raises, add its message as a problem and return None.

        If the message begins with the path, the problem omits it.
        """
        try:
            return work()
        except DclsConvertError as error:
            problem = one_line(error).removeprefix(f"{path}: ")
            self.fail(name or path.name, problem)
            return None


CheckModel = Callable[[Path, bool], list[Check]]  # (folder, whether to trust its code) -> checks


def verify_folder(
    folder: str | Path,
    *,
    trust_code: bool = False,
    check_model: CheckModel | None = None,
    notify: Notify = ignore_messages,
) -> Verification:
    """Check a checkpoint folder: its files, that they belong together, and the model they describe.

    Args:
        folder: The folder to check.
        trust_code: Whether to run the user's own code if the folder names it as its model.
        check_model: Function that checks the model; None for `check_model_in_fresh_process`.
        notify: Called with what is being done.

    Raises:
        CheckpointError: There is no folder. Problems inside a folder are reported as checks.
    """
    folder = check_folder(Path(folder))
    checks = Checks()
    notify("checking the files")
    checkpoint = checks.attempt(folder / CONFIG, lambda: open_checkpoint(folder))
    weights_are_readable = _check_weights(checks, folder / WEIGHTS, checkpoint)
    if not weights_are_readable or checkpoint is None:
        checks.skip("model", f"{CONFIG} or {WEIGHTS} cannot be read")
    else:
        reason = _reason_not_to_build(checkpoint, trust_code=trust_code)
        if reason is not None:
            checks.skip("model", reason)
        else:
            notify("rebuilding the model in a fresh process")
            check = check_model or check_model_in_fresh_process
            checks += check(folder, trust_code)
    ok = all(result.ok is not False for result in checks)
    return Verification(folder=str(folder), ok=ok, checks=tuple(checks))


def _reason_not_to_build(checkpoint: Checkpoint, *, trust_code: bool) -> str | None:
    """Return why the checkpoint's model may not or cannot be built; None if it may."""
    try:
        checkpoint.source(trust_code=trust_code)
    except DclsConvertError as error:
        return one_line(error)
    return None


def _check_weights(checks: Checks, path: Path, checkpoint: Checkpoint | None) -> bool:
    """Check a weights file, even without a config, and return whether it can be read."""
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
    """Check that config and weights were written together and not changed since."""
    path = checkpoint.weights_path
    before = len(checks)
    checks.attempt(path, lambda: checkpoint.check_stamp(stamp))
    checks.attempt(path, lambda: checkpoint.check_tensors(state))
    if stamp is None and checkpoint.tensors_hash is None:
        problem = "has no metadata of dcls-convert: nothing says that it belongs to this folder"
        checks.fail(WEIGHTS, problem)
    if len(checks) == before:
        checks.succeed(CONFIG, "as written")
        checks.succeed(WEIGHTS, f"{count_text(len(state), 'tensor')}, as written")


def _not_finite_values(state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield messages about tensors with NaN or infinite values; masks of -inf are allowed."""
    for name, tensor in state.items():
        problem = describe_non_finite(name, tensor, mask=tensor.dim() > 1)
        if problem is not None:
            yield problem


def _check_positions(checks: Checks, plan: ConversionPlan, state: Mapping[str, Tensor]) -> None:
    """Check that the plan's positions are present and inside their windows."""
    sets = position_sets(plan)
    problems: list[str] = []
    for position_set in sets:
        misfits = list(position_set.misfits(state))
        if misfits:
            problems += misfits
        else:
            problems += position_set.out_of_range(state)
    success = "none"
    if sets:
        success = f"{count_text(len(sets), 'tensor')}, all inside the window"
    checks.add("positions", problems, success)


def check_model_in_fresh_process(
    folder: Path, trust_code: bool, *, seconds: float = REBUILD_SECONDS
) -> list[Check]:
    """Run `check_model_in_this_process` in a new Python process, which may run the user's own code.

    The process has the import path of this one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "checks.json"
        path = json.dumps([str(entry) for entry in sys.path])
        arguments = [path, str(folder), str(trust_code), str(result)]
        try:
            process = subprocess.run(
                [sys.executable, *FRESH_PROCESS, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return [_failed_process(f"took more than {seconds:g} s")]
        if process.returncode != 0 or not result.is_file():
            return [_failed_process(_describe_end(process.returncode, process.stderr))]
        checks: list[Check] = adapter(list[Check]).validate_json(result.read_bytes())
        return checks


def _failed_process(failure: str) -> Check:
    return Check(name="model", ok=False, detail=f"the process that rebuilt it {failure}")


def _describe_end(code: int, stderr: str) -> str:
    """Describe how a process ended, with the last line that it wrote to stderr."""
    end = f"ended with code {code}"
    if code < 0:
        end = f"was ended by signal {-code}"
    lines = stderr.strip().splitlines()
    last_line = lines[-1] if lines else "it printed no error"
    return f"{end}: {shortened(last_line, 300)}"


def main(folder: str, trust_code: str, result: str) -> None:
    """Check the model and write the checks to a file; what the model prints goes to stderr."""
    with redirect_stdout(sys.stderr):
        checks = check_model_in_this_process(Path(folder), trust_code == "True")
    Path(result).write_bytes(adapter(list[Check]).dump_json(checks))


def check_model_in_this_process(folder: Path, trust_code: bool) -> list[Check]:
    """Build the model of a readable folder, and check names, shapes and outputs.

    It is not checked here whether the weights belong to the config: `verify_folder` has done so,
    and a mismatch does not keep the model from being built.
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
        _set_precision_(model, state)

    built = checks.attempt(
        path, lambda: build_and_load(source, state, str(path), prepare_=prepare_), "model"
    )
    if built is None:
        return checks
    model, _ = built
    checks.succeed("model", f"{shortened(source.name)} rebuilt; all {len(state)} tensors fit")
    _check_outputs(checks, model, checkpoint, stamp)
    return checks


def _set_precision_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give the model the dtypes of the stored tensors, with which its outputs were computed."""
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())  # also buffers that are not stored
    for name, tensor in model.state_dict(keep_vars=True).items():
        stored = state.get(name)
        if stored is None:
            continue
        if tensor.is_floating_point() and stored.is_floating_point():
            tensor.data = tensor.data.to(stored.dtype)


def _check_outputs(
    checks: Checks, model: nn.Module, checkpoint: Checkpoint, stamp: Stamp | None
) -> None:
    """Compare the model's outputs with those stored beside the weights."""
    stored = None
    reason = ""
    if stamp is not None and stamp.fingerprint is not None:
        stored = stamp.fingerprint
        reason = f": {stored.reason}"
    if stored is None or stored.outputs is None:
        checks.skip("outputs", f"none were stored when it was saved{reason}")
        return
    current = take_fingerprint(model.eval(), checkpoint.input_size)
    if current.outputs is None:
        checks.fail("outputs", f"the model does not run: {current.reason}")
        return
    difference = fingerprint_deviation(current, stored)
    tolerance = TOLERANCES[stored.dtype]
    comparison = f"difference {difference:.1e}, tolerance {tolerance:g} in {stored.dtype}"
    if difference > tolerance:
        checks.fail("outputs", f"do not match the stored ones ({comparison})")
    else:
        checks.succeed("outputs", f"match the stored ones ({comparison})")
