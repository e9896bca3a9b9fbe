"""Verify a checkpoint folder: run every check, and report every problem."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from ..errors import DclsConvertError
from ..input import check_folder
from ..networks.wrappers import inside_wrappers
from ..progress import Notify, ignore_messages
from ..records import Record
from ..text import count_text, one_line, shortened
from ..weights.files import load_safetensors
from ..weights.loading import build_and_load, describe_non_finite, load_weights_
from .fingerprint import TOLERANCES, fingerprint_deviation, take_fingerprint
from .folder import CONFIG, WEIGHTS, Checkpoint, open_checkpoint
from .load import place_stored_plan_
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

    def add_problems(self, name: str, problems: Iterable[str], success: str) -> None:
        """Add a failed check for each problem; without any, a passed check."""
        failed = [Check(name=name, ok=False, detail=problem) for problem in problems]
        self += failed or [Check(name=name, ok=True, detail=success)]

    def attempt(self, path: Path, work: Callable[[], Result], name: str = "") -> Result | None:
        """Return what `work` returns; if it raises, add its message as a problem and return None.

        If the message begins with the path, the problem omits it.
        """
        try:
            return work()
        except DclsConvertError as error:
            self.add(name or path.name, False, one_line(error).removeprefix(f"{path}: "))
            return None


def verify_folder(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    trust_code: bool = False,
    notify: Notify = ignore_messages,
) -> Verification:
    """Check a checkpoint folder: its files, that they belong together, and the model they describe.

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
    checkpoint = checks.attempt(folder / CONFIG, lambda: open_checkpoint(folder))
    content = checks.attempt(weights, lambda: (read_stamp(weights), load_safetensors(weights)))
    if content is not None:
        stamp, state = content
        if checkpoint is not None:
            _check_as_written(checks, checkpoint, stamp, state)
        checks.add_problems("values", _not_finite_values(state), "all are finite")
    if checkpoint is None or content is None:
        checks.add("model", None, f"not checked: {CONFIG} or {WEIGHTS} cannot be read")
    else:
        notify("rebuilding the model")
        model = _check_model(checks, checkpoint, state, model, trust_code)
        if model is not None:
            _check_outputs(checks, model, checkpoint, stamp)
    ok = all(check.ok is not False for check in checks)
    return Verification(folder=str(folder), ok=ok, checks=tuple(checks))


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
        checks.add(WEIGHTS, False, problem)
    if len(checks) == before:
        checks.add(CONFIG, True, "as written")
        checks.add(WEIGHTS, True, f"{count_text(len(state), 'tensor')}, as written")


def _not_finite_values(state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield messages about tensors with NaN or infinite values; masks of -inf are allowed."""
    for name, tensor in state.items():
        problem = describe_non_finite(name, tensor, mask=tensor.dim() > 1)
        if problem is not None:
            yield problem


def _check_model(
    checks: Checks,
    checkpoint: Checkpoint,
    state: Mapping[str, Tensor],
    model: nn.Module | None,
    trust_code: bool,
) -> nn.Module | None:
    """Build the model, or convert the given one, and load the weights; None if that is impossible.

    Weights that do not belong to the config are reported elsewhere, and do not stop this check.
    """
    where = str(checkpoint.weights_path)
    if model is not None:
        model = inside_wrappers(model)
    name = type(model).__name__

    def prepare_(model: nn.Module) -> None:
        if checkpoint.stored_plan is not None:
            place_stored_plan_(model, checkpoint.stored_plan)
        _set_precision_(model, state)

    def load_() -> nn.Module:
        if model is None:
            return build_and_load(source, state, where, prepare_=prepare_)[0]
        prepare_(model)
        load_weights_(model, state, where)
        return model

    if model is None:
        try:
            source = checkpoint.source(trust_code=trust_code)
        except DclsConvertError as error:
            checks.add("model", None, f"not checked: {one_line(error)}")
            return None
        name = shortened(source.name)
    loaded = checks.attempt(checkpoint.weights_path, load_, "model")
    if loaded is not None:
        checks.add("model", True, f"{name} rebuilt; all {len(state)} tensors fit")
    return loaded


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
    if stamp is None or stamp.fingerprint is None:
        checks.add("outputs", None, "not checked: none were stored when it was saved")
        return
    if stamp.config != checkpoint.config_hash:
        checks.add("outputs", None, f"not checked: {WEIGHTS} was not written with this {CONFIG}")
        return
    stored = stamp.fingerprint
    if not stored.outputs:
        reason = f"none were stored when it was saved: {stored.reason}"
        checks.add("outputs", None, f"not checked: {reason}")
        return
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
