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

from pydantic import TypeAdapter
from torch import Tensor, nn

from ..errors import CheckpointError, DclsConvertError, listed, one_line, shown
from ..files import check_folder
from ..networks.source import build_model
from ..networks.weights import load_file, misfits, not_finite
from ..progress import Notify, silent
from ..records import write_json
from ..tables import counted
from .fingerprint import TOLERANCES, deviation, take_fingerprint
from .folder import CONFIG, FILES, PICTURE_FILES, WEIGHTS, FolderConfig, read_checked_stamp, read_folder, read_text
from .inspection import position_sets
from .load import buildable, check_tensors, place_, rebuilt, untied
from .stamp import Stamp, read_stamp, read_tensors, text_hash

VERIFICATION_FORMAT = 1
MOST_SECONDS = 600.0  # for the process that rebuilds the model
FRESH_PROCESS = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dcls_convert.checkpoints.verify import main; main(*sys.argv[2:])"
)
NO_STAMP = "has no metadata of dcls-convert: nothing says that it belongs to this folder"

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check, or one problem: a check that finds several problems is there several times."""

    name: str
    ok: bool | None  # None: not checked, for the reason in `detail`
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """All checks of one folder."""

    format: int = VERIFICATION_FORMAT
    folder: str
    ok: bool
    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.ok is False)

    def to_json(self) -> str:
        return write_json(TypeAdapter(Verification).dump_python(self, mode="json"))


class Checks(list[Check]):
    """Checks as they are made."""

    def add(self, name: str, problems: Iterable[str | None], good: str = "") -> bool:
        """A check for every problem, None apart, or one that says what is good, if anything; whether all is good."""
        found = [Check(name=name, ok=False, detail=problem) for problem in problems if problem]
        self.extend(found or [Check(name=name, ok=True, detail=good)] * bool(good))
        return not found

    def skip(self, name: str, reason: str) -> None:
        self.append(Check(name=name, ok=None, detail=f"not checked: {reason}"))

    def attempt(self, name: str, path: Path, work: Callable[[], Found]) -> Found | None:
        """What the work returns; None and a problem, whose message does not repeat the path, where it fails."""
        try:
            return work()
        except DclsConvertError as error:
            self.add(name, [one_line(error).removeprefix(f"{path}: ").removeprefix(f"{path.name}: ")])
            return None


Rebuild = Callable[[Path, bool], list[Check]]  # folder, and whether to trust its code


def verify_folder(
    folder: str | Path, *, trust_code: bool = False, rebuild: Rebuild | None = None, notify: Notify = silent
) -> Verification:
    """Check a checkpoint folder: its files, that they belong together, and that the model they describe can be had.

    Args:
        folder: Written by `save_converted` or by folding.
        trust_code: Import and run whatever the folder names as its model's factory. Without it, only a model of timm
            or torchvision is rebuilt.
        rebuild: Rebuilds the model and checks it; `rebuild_in_fresh_process` without it.
        notify: Told what is being done.

    Raises:
        CheckpointError: There is no such folder.
    """
    folder, checks = check_folder(Path(folder)), Checks()
    config = checks.attempt(CONFIG, folder / CONFIG, lambda: read_folder(folder))
    readable = checks.attempt(WEIGHTS, folder / WEIGHTS, lambda: (read_stamp(folder / WEIGHTS),))
    stamp = readable[0] if readable is not None else None
    _check_texts(checks, folder, config, stamp)
    if readable is not None:
        notify("checking the weights")
        _check_weights(checks, folder, config, stamp)
    try:
        if config is None or readable is None:
            raise CheckpointError(f"{CONFIG} or {WEIGHTS} cannot be read")
        buildable(config.source, folder, trust_code=trust_code)
    except DclsConvertError as error:
        checks.skip("model", one_line(error))
    else:
        notify("rebuilding the model in a fresh process")
        checks += (rebuild or rebuild_in_fresh_process)(folder, trust_code)
    return Verification(folder=str(folder), ok=all(check.ok is not False for check in checks), checks=tuple(checks))


def _check_texts(checks: Checks, folder: Path, config: FolderConfig | None, stamp: Stamp | None) -> None:
    """That the texts are there, and are as they were written."""
    files, before = config.files if config is not None else FILES, len(checks)
    for name in files:
        if name == WEIGHTS or (name == CONFIG and config is None):
            continue
        text = checks.attempt(name, folder / name, lambda name=name: read_text(folder / name))  # type: ignore[misc]
        written = stamp.texts.get(name) if stamp is not None else None
        if text is not None and written not in (None, text_hash(text)):
            checks.add(name, ["is not the text that was written; it was changed"])
    if len(checks) == before:
        checks.add("texts", [], "all are there, and as they were written")
    known = (*files, *PICTURE_FILES)
    if foreign := sorted(entry.name for entry in folder.iterdir() if entry.name not in known):
        checks.add("other files", [], f"note: {listed(foreign, 5)} not of dcls-convert")


def _check_weights(checks: Checks, folder: Path, config: FolderConfig | None, stamp: Stamp | None) -> None:
    """That they belong to the config, are as they were written, finite, and with positions inside their windows."""
    path, before = folder / WEIGHTS, len(checks)
    if config is not None:
        checks.attempt(WEIGHTS, path, lambda: read_checked_stamp(path, config))
    checks.add(WEIGHTS, [NO_STAMP] if stamp is None else [])
    state = checks.attempt(WEIGHTS, path, lambda: dict(read_tensors(path))) or {}
    checks.attempt(WEIGHTS, path, lambda: check_tensors(state, stamp, path))
    if len(checks) == before:
        checks.add(WEIGHTS, [], f"{counted(len(state), 'tensor')}, as written")
    values = (not_finite(name, tensor, mask=tensor.dim() > 1) for name, tensor in state.items())
    checks.add("values", values, "all are finite")
    if config is not None and config.plan is not None:
        sets = position_sets(config.plan)
        found = (problem for place in sets for problem in list(place.misfits(state)) or place.outside(state))
        checks.add("positions", found, f"{counted(len(sets), 'tensor')}, all inside the window" if sets else "none")


# The model, in a process of its own.


def rebuild_in_fresh_process(folder: Path, trust_code: bool, *, seconds: float = MOST_SECONDS) -> list[Check]:
    """The checks of `rebuild_here`, by a new Python that knows nothing but the folder.

    It has this process's import path and working directory, so that it finds models of the user's own.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "checks.json"
        path = json.dumps([str(entry) for entry in sys.path])
        # -P: a json.py in the working directory is not meant
        command = [sys.executable, "-P", "-c", FRESH_PROCESS, path, str(folder), str(trust_code), str(result)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
            if done.returncode == 0 and result.is_file():
                return TypeAdapter(list[Check]).validate_json(result.read_bytes())
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
    Path(result).write_bytes(TypeAdapter(list[Check]).dump_json(checks))


def rebuild_here(folder: Path, trust_code: bool) -> list[Check]:
    """Build the model of a folder that can be read; check names, shapes, ties and outputs."""
    checks, config, state = Checks(), read_folder(folder), load_file(folder / WEIGHTS)
    model = checks.attempt("model", folder, lambda: _rebuilt(checks, folder, config, state, trust_code))
    if model is not None:
        if config.plan is not None:
            groups = [] if config.plan.folded else config.plan.tie_groups
            checks.add(
                "ties", untied(model, config.plan), f"{counted(len(groups), 'group')} of layers that share a tensor"
            )
        _check_outputs(checks, model.eval(), read_stamp(folder / WEIGHTS), config)
    return checks


def _rebuilt(
    checks: Checks, folder: Path, config: FolderConfig, state: dict[str, Tensor], trust_code: bool
) -> nn.Module | None:
    """The model with its weights, in their precision; None where they do not fit."""
    source = buildable(config.source, folder, trust_code=trust_code)
    twin = build_model(source, device="meta", trust_code=True)  # allowed above; sizes are checked before they cost
    if config.plan is not None:
        place_(twin, config.plan)
    if not checks.add("model", misfits(twin, state), f"{shown(source.name)} rebuilt; all {len(state)} tensors fit"):
        return None

    def take_precision_(model: nn.Module) -> None:  # in which the outputs were stored
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in state and tensor.is_floating_point():
                tensor.data = tensor.data.to(state[name].dtype)

    return rebuilt(source, config.plan, state, WEIGHTS, take_precision_)


def _check_outputs(checks: Checks, model: nn.Module, stamp: Stamp | None, config: FolderConfig) -> None:
    stored = stamp.fingerprint if stamp is not None else None
    if stored is None or stored.outputs is None:
        reason = f": {stored.reason}" if stored is not None else ""
        checks.skip("outputs", f"none were stored when it was saved{reason}")
        return
    found = take_fingerprint(model, config.input_size)
    apart, tolerance = deviation(found, stored), TOLERANCES[stored.dtype]
    detail = f"differ by {apart:.1e} of the stored norm; up to {tolerance:g} is rounding in {stored.dtype}"
    detail = detail if found.outputs is not None else f"the model does not run: {found.reason}"
    checks.add("outputs", [] if apart <= tolerance else [detail], detail)
