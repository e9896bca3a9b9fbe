"""Verify a folder: load and run its model, and compare outputs with the stored outputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..errors import DclsConvertError
from ..file_checks import check_folder
from ..progress import Notify, ignore_messages
from ..records import Record
from ..text import shortened
from ..weights.files import load_safetensors
from .fingerprint import TOLERANCES, fingerprint_deviation, set_precision_, take_fingerprint
from .folder import CONFIG, WEIGHTS, OpenedFolder, open_folder
from .load import load_state
from .stored_weights import Stamp, check_tensors, read_stamp

MODEL = "model"  # name of the check that rebuilds the model


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool | None  # None if not checked; `detail` says why
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification(Record):
    """All checks of a folder."""

    format: int = 1
    folder: str
    # True if all checks passed; False if one failed; None if the others passed, but the model was
    # not rebuilt.
    ok: bool | None
    checks: tuple[Check, ...]


def verify_folder(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    trust_code: bool = False,
    notify: Notify = ignore_messages,
) -> Verification:
    """Check a folder: its weights, and the model that it loads.

    Args:
        folder: The folder to check.
        model: The unconverted model, if only its user can build it; converted in place.
        trust_code: Whether to run the user's own code if the folder names it as its model.
        notify: Called with the name of each step.

    Raises:
        CheckpointError: There is no folder. Problems inside a folder are reported as checks.
    """
    folder = check_folder(Path(folder))
    checks = tuple(_checks(folder, model, trust_code, notify))
    return Verification(folder=str(folder), ok=_outcome(checks), checks=checks)


def _outcome(checks: Sequence[Check]) -> bool | None:
    """Return `Verification.ok`. Weights without hash and outputs pass, as timm saves neither."""
    if any(check.ok is False for check in checks):
        return False
    if any(check.name == MODEL and check.ok is None for check in checks):
        return None
    return True


def _checks(
    folder: Path, model: nn.Module | None, trust_code: bool, notify: Notify
) -> Iterator[Check]:
    """Yield the checks in order, until a failure leaves nothing more to check."""
    notify("checking the files")
    try:
        opened = open_folder(folder)
        stamp = read_stamp(opened.weights_path)
        state = load_safetensors(opened.weights_path)
    except DclsConvertError as error:
        yield _problem("files", error, folder)
        return
    yield _compare_hash(opened, state, stamp)
    notify("rebuilding the model")
    try:
        if model is None:
            opened.source(trust_code=trust_code)
    except DclsConvertError as error:
        yield Check(name=MODEL, ok=None, detail=f"not checked: {error}")
        return
    try:
        loaded = load_state(opened, state, model=model, trust_code=trust_code)
    except DclsConvertError as error:
        yield _problem(MODEL, error, opened.weights_path)
        return
    yield Check(name=MODEL, ok=True, detail=f"rebuilt; all {len(state)} tensors fit")
    yield from _compare_classes(loaded, opened)
    yield _compare_outputs(loaded, opened, state, stamp)


def _problem(name: str, error: DclsConvertError, path: Path) -> Check:
    """Return a failed check, without the path at the start of the error's message."""
    detail = str(error).removeprefix(str(path)).lstrip("/: ")
    return Check(name=name, ok=False, detail=detail)


def _compare_hash(opened: OpenedFolder, state: Mapping[str, Tensor], stamp: Stamp | None) -> Check:
    """Check the tensors by the hash in the stamp."""
    if stamp is None:
        detail = "not checked: another program wrote it, without a hash"
        return Check(name=WEIGHTS, ok=None, detail=detail)
    try:
        check_tensors(opened, state)
    except DclsConvertError as error:
        return _problem(WEIGHTS, error, opened.weights_path)
    return Check(name=WEIGHTS, ok=True, detail="as written")


def _compare_classes(model: nn.Module, opened: OpenedFolder) -> Iterator[Check]:
    """Yield a failed check for each place in the config with another number of classes.

    timm would not load such a folder.
    """
    if opened.stored_source is None:
        return
    classes = getattr(model, "num_classes", opened.stored_source.args.get("num_classes"))
    for place, found in opened.stated_classes.items():
        if isinstance(classes, int) and found != classes:
            detail = f"{place} is {shortened(found)}, but the network has {classes:,} classes"
            yield Check(name=CONFIG, ok=False, detail=detail)


def _compare_outputs(
    model: nn.Module, opened: OpenedFolder, state: Mapping[str, Tensor], stamp: Stamp | None
) -> Check:
    """Compare the model's outputs with the outputs stored beside the weights."""
    if stamp is None:
        return Check(name="outputs", ok=None, detail="not checked: none are stored")
    stored = stamp.fingerprint
    if stored.outputs is None:
        detail = f"not checked: none are stored ({stored.reason})"
        return Check(name="outputs", ok=None, detail=detail)
    set_precision_(model, stored, state)
    current = take_fingerprint(model, opened.inputs)
    if current.outputs is None:
        detail = f"the model does not run: {current.reason}"
        return Check(name="outputs", ok=False, detail=detail)
    difference = fingerprint_deviation(current, stored)
    tolerance = TOLERANCES[stored.dtype]
    ok = difference <= tolerance
    found = "match the stored ones" if ok else "do not match the stored ones"
    comparison = f"difference {difference:.1e}, tolerance {tolerance:g} in {stored.dtype}"
    return Check(name="outputs", ok=ok, detail=f"{found} ({comparison})")
