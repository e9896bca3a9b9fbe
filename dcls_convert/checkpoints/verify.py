"""Whether a checkpoint folder is whole, and is what it says: every check, and every problem in words."""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from ..errors import CheckpointError, DclsConvertError, ModelError, listed, one_line, shown
from ..layers.interpolation import find_interpolation, position_limits
from ..networks.source import ModelSource, build_model, check_source
from ..networks.weights import load_weights_, misfits, not_finite
from ..planning.plan import ConversionPlan
from ..surgery.place import TIMM_ARCHITECTURE
from .fingerprint import TOLERANCES, deviation, take_fingerprint
from .folder import CONFIG, FILES, STOCK_FILES, WEIGHTS, read_checked_stamp, read_folder, read_text
from .inspection import PositionSet, position_sets
from .load import place_
from .records import read_json, write_json
from .stamp import read_stamp, read_tensors, tensors_hash

VERIFICATION_FORMAT = 1
MOST_SECONDS = 600.0  # for the process that rebuilds the model
NO_STAMP = "has no metadata of dcls-convert: nothing says that it belongs to this folder"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilding:
    """What the process that rebuilds a model is told."""

    folder: str
    model: str  # "timm:convnext_tiny"
    args: dict[str, Any]
    trust_code: bool


Rebuild = Callable[[Rebuilding], list[Check]]


def verify_folder(folder: str | Path, *, trust_code: bool = False, rebuild: Rebuild | None = None) -> Verification:
    """Check a checkpoint folder: its files, that they belong together, and that the model they describe can be had.

    Args:
        folder: Written by `save_converted` or by folding.
        trust_code: Import and run whatever the folder names as its model's factory. Without it, only a model of timm
            or torchvision is rebuilt.
        rebuild: Rebuilds the model and checks it; `rebuild_in_fresh_process` without it.

    Raises:
        CheckpointError: There is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not a folder")
    plan, source, checks = _config_checks(folder)
    sound = checks[0].ok is True
    checks += _file_checks(folder, STOCK_FILES if source is not None and plan is None else FILES)
    try:
        found = _weights_checks(folder, plan)
    except CheckpointError as error:
        found, sound = _checked(WEIGHTS, [_told(error, folder / WEIGHTS)], ""), False
    checks += found
    if not sound:
        checks.append(_not_checked("model", f"{CONFIG} or {WEIGHTS} cannot be read"))
    elif source is None:
        checks.append(_not_checked("model", "only its user can build it; load_converted(folder, model=...) takes it"))
    else:
        checks += _rebuild_checks(folder, source, trust_code, rebuild or rebuild_in_fresh_process)
    return Verification(folder=str(folder), ok=all(check.ok is not False for check in checks), checks=tuple(checks))


def _checked(name: str, problems: Iterable[str], good: str) -> list[Check]:
    """A check for every problem, or one that says what is good."""
    found = [Check(name=name, ok=False, detail=problem) for problem in problems]
    return found or [Check(name=name, ok=True, detail=good)]


def _not_checked(name: str, reason: str) -> Check:
    return Check(name=name, ok=None, detail=f"not checked: {reason}")


def _told(error: Exception, path: Path) -> str:
    """The message without the file's name, which the check has."""
    return one_line(error).removeprefix(f"{path}: ").removeprefix(f"{path.name}: ")


# The files, one after the other.


def _config_checks(folder: Path) -> tuple[ConversionPlan | None, ModelSource | None, list[Check]]:
    """The plan, if the model has DCLS layers or had; the source of the model to build; what was found."""
    try:
        data = read_json(read_text(folder / CONFIG), CONFIG)
        architecture, args = data.get("architecture"), data.get("model_args", {})
        if isinstance(architecture, str) and architecture != TIMM_ARCHITECTURE:
            if not isinstance(args, dict):
                raise CheckpointError(f"{CONFIG}: model_args is {shown(repr(args))}, not an object")
            good = f"is of timm's own {shown(architecture)}"
            return None, ModelSource(name=f"timm:{architecture}", args=args), _checked(CONFIG, [], good)
        config = read_folder(folder)
    except CheckpointError as error:
        return None, None, _checked(CONFIG, [_told(error, folder / CONFIG)], "")
    plan = config.plan
    folded = ", folded into plain convolutions" if plan.folded else ""
    good = f"holds a plan of {len(plan.layers)} layers and {len(plan.tie_groups)} tie groups{folded}"
    return plan, config.source, _checked(CONFIG, [], good)


def _file_checks(folder: Path, files: tuple[str, ...]) -> list[Check]:
    """That the texts can be read, and are as they were written; the name of a check that fails is the file's."""
    checks = []
    try:
        stamp = read_stamp(folder / WEIGHTS)
    except CheckpointError:
        stamp = None
    for name in files:
        if name == WEIGHTS:
            continue
        try:
            text = read_text(folder / name)
        except CheckpointError as error:
            if name != CONFIG:
                checks.append(Check(name=name, ok=False, detail=_told(error, folder / name)))
            continue
        written = stamp.texts.get(name) if stamp is not None else None
        if written is not None and hashlib.sha256(text.encode()).hexdigest() != written:
            checks.append(Check(name=name, ok=False, detail="is not the text that was written; it was changed"))
    checks = checks or [Check(name="files", ok=True, detail=f"all {len(files)} are there, and as they were written")]
    if foreign := sorted(entry.name for entry in folder.iterdir() if entry.name not in files):
        checks.append(Check(name="other files", ok=True, detail=f"note: {listed(foreign, 5)} not of dcls-convert"))
    return checks


def _weights_checks(folder: Path, plan: ConversionPlan | None) -> list[Check]:
    """Stamp, hash, values and positions; CheckpointError where the file cannot be read."""
    path = folder / WEIGHTS
    stamp = read_stamp(path)
    problems = [] if stamp is not None else [NO_STAMP]
    if plan is not None:
        try:
            read_checked_stamp(path, read_folder(folder))
        except CheckpointError as error:
            problems.append(_told(error, path))
    state = dict(read_tensors(path))
    if stamp is not None and stamp.tensors != tensors_hash(state.items()):
        problems.append("its tensors are not those that were written; it is damaged or was changed")
    written = f"{len(state)} tensors, as dcls-convert {shown(stamp.version)} wrote them" if stamp is not None else ""
    checks = _checked(WEIGHTS, problems, written)
    values = (not_finite(name, tensor, mask=tensor.dim() > 1) for name, tensor in state.items())
    checks += _checked("values", filter(None, values), "all are finite")
    if plan is None:
        return checks
    sets = position_sets(plan)
    found = (problem for place in sets for key in place.parameters for problem in _position_problems(state, place, key))
    return checks + _checked("positions", found, f"{len(sets)} tensors, all inside their windows" if sets else "none")


def _position_problems(state: dict[str, Tensor], place: PositionSet, key: str) -> Iterator[str]:
    name, wanted = place.parameters[key], place.layers[0].position_shape
    tensor = state.get(name)
    if tensor is None or tuple(tensor.shape) != wanted or not tensor.is_floating_point():
        found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)} and is {tensor.dtype}"
        yield f"{name} {found}; the plan has {wanted}, floating-point, for {place.name}"
    elif key == "sigma":
        least = find_interpolation(place.layers[0].interpolation).min_sigma or 0.0
        # Compare in the tensor's own precision: clamping rounded the least to it.
        if small := int((tensor < torch.tensor(least, dtype=tensor.dtype)).sum()):
            yield f"{name} has {small} of {tensor.numel()} sigmas below {least:g} cells, the least"
    else:
        for axis, side in enumerate(place.learnt_size):
            low, high = position_limits(side)
            if outside := int(((tensor[axis] < low) | (tensor[axis] > high)).sum()):
                count = f"{outside} of {tensor[axis].numel()} elements"
                yield f"{name} has {count} outside the window along axis {axis}, which goes from {low} to {high}"


# The model, in a process of its own.


def _rebuild_checks(folder: Path, source: ModelSource, trust_code: bool, rebuild: Rebuild) -> list[Check]:
    try:
        if not trust_code:
            check_source(source)
    except ModelError as error:
        return [_not_checked("model", one_line(error))]
    return rebuild(Rebuilding(folder=str(folder), model=source.name, args=source.args, trust_code=trust_code))


def rebuild_in_fresh_process(task: Rebuilding, *, seconds: float = MOST_SECONDS) -> list[Check]:
    """The checks of `rebuild_here`, by a new Python that knows nothing but the folder.

    It has this process's import path and working directory, so that it finds models of the user's own.
    """
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from dcls_convert.checkpoints.verify import main; main(*sys.argv[2:])"
    )
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "checks.json"
        given = (
            json.dumps([str(entry) for entry in sys.path]),
            TypeAdapter(Rebuilding).dump_json(task).decode(),
            str(result),
        )
        command = [sys.executable, "-P", "-c", code, *given]  # -P: a json.py in the working directory is not meant
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return _checked("model", [f"the process that rebuilt it took more than {seconds:g} s"], "")
        if done.returncode == 0 and result.is_file():
            return TypeAdapter(list[Check]).validate_json(result.read_text(encoding="utf-8"))
    how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"ended with code {done.returncode}"
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return _checked("model", [f"the process that rebuilt it {how}: {shown(last, 300)}"], "")


def main(task: str, result: str) -> None:
    """Write the checks of a `Rebuilding` (as JSON) to a file; whatever the model prints goes to stderr."""
    with redirect_stdout(sys.stderr):
        checks = rebuild_here(TypeAdapter(Rebuilding).validate_json(task))
    Path(result).write_bytes(TypeAdapter(list[Check]).dump_json(checks))


def rebuild_here(task: Rebuilding) -> list[Check]:
    """Build the model of a folder that can be read; check names, shapes, ties and outputs."""
    folder = Path(task.folder)
    state = dict(read_tensors(folder / WEIGHTS))
    plan = None if _is_stock(folder) else read_folder(folder).plan
    try:
        model = build_model(ModelSource(name=task.model, args=task.args), trust_code=task.trust_code)
        if plan is not None:
            place_(model, plan)
    except DclsConvertError as error:
        return _checked("model", [one_line(error)], "")
    checks = _checked("model", misfits(model, state), f"{shown(task.model)} rebuilt; all {len(state)} tensors fit")
    if not all(check.ok for check in checks):
        return [*checks, _not_checked("outputs", "the weights do not fit the model")]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in state and tensor.is_floating_point():
            tensor.data = tensor.data.to(state[name].dtype)  # the precision in which the outputs were stored
    try:
        load_weights_(model, state, WEIGHTS)
    except CheckpointError as error:
        return [*checks, _not_checked("outputs", one_line(error))]
    if plan is not None:
        groups = plan.tie_groups if not plan.folded else ()
        good = f"{len(groups)} tie groups, each with one entry that its layers share" if groups else "none"
        checks += _checked("ties", _tie_problems(model, plan), good)
    size = plan.input_size if plan is not None else _stated_size(folder)
    return [*checks, _output_check(model.eval(), folder, size)]


def _is_stock(folder: Path) -> bool:
    return read_json(read_text(folder / CONFIG), CONFIG).get("architecture") != TIMM_ARCHITECTURE


def _stated_size(folder: Path) -> Any:
    config: Any = read_json(read_text(folder / CONFIG), CONFIG).get("pretrained_cfg")
    return config.get("input_size") if isinstance(config, dict) else None


def _tie_problems(model: nn.Module, plan: ConversionPlan) -> Iterator[str]:
    for group in plan.tie_groups if not plan.folded else ():
        for key, name in group.parameters.items():
            shared = getattr(model.get_submodule(group.owner), name, None)
            if any(getattr(model.get_submodule(layer), key) is not shared for layer in group.layers):
                yield f"tie group {group.name}: not all of its layers share {group.owner}.{name}"


def _output_check(model: nn.Module, folder: Path, size: Any) -> Check:
    stamp = read_stamp(folder / WEIGHTS)
    stored = stamp.fingerprint if stamp is not None else None
    if stored is None or stored.outputs is None:
        reason = f": {stored.reason}" if stored is not None else ""
        return _not_checked("outputs", f"none were stored when it was saved{reason}")
    found = take_fingerprint(model, size)
    if found.outputs is None:
        return Check(name="outputs", ok=False, detail=f"the model does not run: {found.reason}")
    apart, tolerance = deviation(found, stored), TOLERANCES[stored.dtype]
    detail = f"differ by {apart:.1e} of the stored norm; up to {tolerance:g} is rounding in {stored.dtype}"
    return Check(name="outputs", ok=apart <= tolerance, detail=detail)
