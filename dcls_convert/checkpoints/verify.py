"""Verify a checkpoint folder: load it, run it, and compare its outputs with those stored in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from ..errors import DclsConvertError
from ..input import check_folder
from ..progress import Notify, ignore_messages
from ..records import Record
from ..text import one_line, shortened
from ..weights.files import load_safetensors
from ..weights.loading import describe_non_finite
from .fingerprint import TOLERANCES, fingerprint_deviation, set_precision_, take_fingerprint
from .folder import CONFIG, WEIGHTS, Checkpoint, open_checkpoint
from .load import load_state
from .stamp import Stamp, read_stamp

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

    def add(self, name: str, ok: bool | None, detail: str) -> None:
        self.append(Check(name=name, ok=ok, detail=detail))

    def attempt(
        self, name: str, path: Path, work: Callable[[], Result], success: str | None = None
    ) -> Result | None:
        """Return what `work` returns; if it raises, add its message as a problem and return None.

        Args:
            name: Name of the check.
            path: If the message begins with it, the problem omits it.
            work: What to do.
            success: What to say if it succeeds; None to say nothing.
        """
        try:
            result = work()
        except DclsConvertError as error:
            self.add(name, False, one_line(error).removeprefix(f"{path}: "))
            return None
        if success is not None:
            self.add(name, True, success)
        return result


def verify_folder(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    trust_code: bool = False,
    notify: Notify = ignore_messages,
) -> Verification:
    """Check a checkpoint folder: its weights, and the model that it loads.

    Args:
        folder: The folder to check.
        model: The unconverted model, if only its user can build it; converted in place.
        trust_code: Whether to run the user's own code if the folder names it as its model.
        notify: Called with what is being done.

    Raises:
        CheckpointError: There is no folder. Problems inside a folder are reported as checks.
    """
    folder = check_folder(Path(folder))
    weights = folder / WEIGHTS
    checks = Checks()
    notify("checking the files")
    checkpoint = checks.attempt(CONFIG, folder / CONFIG, lambda: open_checkpoint(folder))
    content = checks.attempt(
        WEIGHTS, weights, lambda: (read_stamp(weights), load_safetensors(weights))
    )
    if checkpoint is None or content is None:
        checks.add("model", None, f"not checked: {CONFIG} or {WEIGHTS} cannot be read")
    else:
        stamp, state = content
        _check_values(checks, checkpoint, stamp, state)
        notify("rebuilding the model")
        loaded = _load(checks, checkpoint, state, model, trust_code)
        if loaded is not None:
            _check_outputs(checks, loaded, checkpoint, state, stamp)
    ok = all(check.ok is not False for check in checks)
    return Verification(folder=str(folder), ok=ok, checks=tuple(checks))


def _check_values(
    checks: Checks, checkpoint: Checkpoint, stamp: Stamp | None, state: Mapping[str, Tensor]
) -> None:
    """Check that tensors are those that were written, and finite; masks of -inf are allowed."""
    if stamp is None:
        checks.add(WEIGHTS, None, "not checked: another program wrote it, without a hash")
    else:
        path = checkpoint.weights_path
        checks.attempt(WEIGHTS, path, lambda: checkpoint.check_tensors(state), "as written")
    all_finite = True
    for name, tensor in state.items():
        problem = describe_non_finite(name, tensor, mask=tensor.dim() > 1)
        if problem is not None:
            all_finite = False
            checks.add("values", False, problem)
    if all_finite:
        checks.add("values", True, "all are finite")


def _load(
    checks: Checks,
    checkpoint: Checkpoint,
    state: Mapping[str, Tensor],
    model: nn.Module | None,
    trust_code: bool,
) -> nn.Module | None:
    """Return the folder's model with its weights; None if it cannot be loaded."""
    source = None
    if model is None:
        try:
            source = checkpoint.source(trust_code=trust_code)
        except DclsConvertError as error:
            checks.add("model", None, f"not checked: {one_line(error)}")
            return None
    name = "the given model" if source is None else shortened(source.name)
    return checks.attempt(
        "model",
        checkpoint.weights_path,
        lambda: load_state(checkpoint, state, checkpoint.stored_plan, source, model),
        f"{name} rebuilt; all {len(state)} tensors fit",
    )


def _check_outputs(
    checks: Checks,
    model: nn.Module,
    checkpoint: Checkpoint,
    state: Mapping[str, Tensor],
    stamp: Stamp | None,
) -> None:
    """Compare the model's outputs with those stored beside the weights."""
    if stamp is None:
        checks.add("outputs", None, "not checked: none are stored")
        return
    stored = stamp.fingerprint
    if stored.outputs is None:
        checks.add("outputs", None, f"not checked: none are stored ({stored.reason})")
        return
    set_precision_(model, stored, state)
    current = take_fingerprint(model, checkpoint.inputs)
    if current.outputs is None:
        checks.add("outputs", False, f"the model does not run: {current.reason}")
        return
    difference = fingerprint_deviation(current, stored)
    tolerance = TOLERANCES[stored.dtype]
    comparison = f"difference {difference:.1e}, tolerance {tolerance:g} in {stored.dtype}"
    if difference > tolerance:
        checks.add("outputs", False, f"do not match the stored ones ({comparison})")
    else:
        checks.add("outputs", True, f"match the stored ones ({comparison})")
