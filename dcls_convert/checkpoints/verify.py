"""Whether a checkpoint folder is whole, and is what it says: every check, and every problem in words."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, DclsConvertError, one_line, shown
from ..layers.interpolation import find_interpolation, position_limits
from ..planning.plan import ConversionPlan, check_plan
from ..reports.report import REPORT_FORMAT, predict_report
from ..surgery.place import TIMM_ARCHITECTURE, timm_model_args
from .folder import CARD, CONFIG, FILES, OUTPUT_IN_FOLDER, PLAN, REPORT, RULES, read_plan, read_text
from .inspection import PositionSet, position_sets
from .stamp import NO_STAMP, WEIGHTS, Stamp, check_format, folded_hash, read_stamp, read_tensors, tensor_hash

VERIFICATION_FORMAT = 1
MOST_DIFFERENCES = 5  # shown of one file
STOCK_FILES = (WEIGHTS, CONFIG, CARD)  # of a folded model that timm builds by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at, or one problem: a check that finds several problems is there several times."""

    name: str
    ok: bool | None  # None: it could not be looked at, for the reason in `detail`
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """All checks of one folder."""

    folder: str
    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.ok is False)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        checks = [asdict(check) for check in self.checks]
        return {"format": VERIFICATION_FORMAT, "folder": self.folder, "ok": self.ok, "checks": checks}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"


def checked(name: str, problems: Iterable[str], good: str) -> list[Check]:
    """A check for every problem, or one that says what is good."""
    found = [Check(name=name, ok=False, detail=problem) for problem in problems]
    return found or [Check(name=name, ok=True, detail=good)]


def not_checked(name: str, reason: str) -> Check:
    return Check(name=name, ok=None, detail=f"not checked: {reason}")


def rebuild_in_fresh_process(folder: Path) -> list[Check]:
    """The checks of `rebuilding.rebuild_checks`, by a new Python that knows nothing but the folder.

    It has this process's import path and working directory, so that models of the user's own are found.
    """
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from dcls_convert.checkpoints.rebuild import main; main(*sys.argv[2:])"
    )
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "checks.json"
        path = json.dumps([str(entry) for entry in sys.path])
        # -P: a json.py in the working directory is not meant
        command = [sys.executable, "-P", "-c", code, path, str(folder), str(result)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode == 0 and result.is_file():
            return [Check(**check) for check in json.loads(result.read_text(encoding="utf-8"))]
    how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"ended with code {done.returncode}"
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return [Check(name="model", ok=False, detail=f"the process that rebuilt it {how}: {shown(last, 300)}")]


def verify_folder(folder: str | Path, *, rebuild: Callable[[Path], list[Check]] | None = None) -> Verification:
    """Check a checkpoint folder: its files, that they belong together, and that the model they describe can be had.

    Args:
        folder: Written by `save_converted`.
        rebuild: Builds the model from the folder alone, and checks it; `rebuild_in_fresh_process` without it.

    Raises:
        CheckpointError: There is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not a folder")
    stock = is_for_stock_timm(folder)
    checks = _file_checks(folder, STOCK_FILES if stock else FILES)
    bad = {check.name for check in checks if not check.ok}
    plan, stamp, belongs = None, None, False
    if PLAN not in bad and not stock:
        plan, found = _plan_checks(folder)
        checks += found
    if WEIGHTS not in bad:
        stamp, readable, found = _weights_checks(folder, plan, stock)
        checks += found
        belongs = readable and (stamp is None or plan is None or stamp.plan == plan.hash)
    if not stock:
        for name, check in [(CONFIG, _config_problems), (RULES, _rules_problems), (REPORT, _report_problems)]:
            if name not in bad:
                checks += _text_checks(folder, name, check, plan)
    if not belongs or (plan is None and not stock):
        missing = PLAN if belongs else WEIGHTS
        checks.append(not_checked("model", f"there is no valid {missing} that it could be rebuilt from"))
    elif plan is not None and plan.model is None:
        checks.append(not_checked("model", "only its user can build it; load_converted(folder, model=...) takes it"))
    else:
        checks += (rebuild or rebuild_in_fresh_process)(folder)
    return Verification(folder=str(folder), checks=tuple(checks))


def is_for_stock_timm(folder: Path) -> bool:
    """Whether it is a folded model for an architecture of timm's own, of which no plan is kept."""
    if os.path.lexists(folder / PLAN):
        return False
    try:
        architecture = _json_object(read_text(folder / CONFIG), CONFIG).get("architecture")
    except CheckpointError:
        return False
    return isinstance(architecture, str) and architecture != TIMM_ARCHITECTURE


def _file_checks(folder: Path, files: Sequence[str]) -> list[Check]:
    """That these files are there; the name of a check that fails is the file's."""
    checks = []
    for name in files:
        try:
            if problem := _file_problem(folder / name):
                checks.append(Check(name=name, ok=False, detail=problem))
        except OSError as error:
            checks.append(Check(name=name, ok=False, detail=f"cannot be read: {error.strerror}"))
    checks = checks or [Check(name="files", ok=True, detail=f"all {len(files)} are there and readable")]
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in files)
    if foreign:
        names = ", ".join(repr(shown(name)) for name in foreign[:MOST_DIFFERENCES])
        detail = f"note: {names}{_more(len(foreign) - MOST_DIFFERENCES)} not of dcls-convert"
        checks.append(Check(name="other files", ok=True, detail=detail))
    return checks


def _file_problem(path: Path) -> str | None:
    if not path.is_file():
        links_nowhere = path.is_symlink() and not path.exists()
        return "is a link that leads nowhere" if links_nowhere else "is not a file" if path.exists() else "is missing"
    if not os.access(path, os.R_OK):
        return "cannot be read: no permission"
    if not path.stat().st_size and path.name != RULES:  # rules that were given as an object have no text
        return "is empty"
    if path.name == CARD:
        try:
            read_text(path)
        except CheckpointError as error:
            return _told(error, path)
    return None


def _plan_checks(folder: Path) -> tuple[ConversionPlan | None, list[Check]]:
    try:
        plan = read_plan(folder)
        check_plan(plan)
    except DclsConvertError as error:
        return None, checked(PLAN, [_told(error, folder / PLAN)], "")
    kept = ", folded into plain convolutions" if plan.folded else ""
    detail = f"is consistent: {len(plan.layers)} layers, {len(plan.tie_groups)} tie groups{kept}"
    return plan, checked(PLAN, [], detail)


def _weights_checks(folder: Path, plan: ConversionPlan | None, stock: bool) -> tuple[Stamp | None, bool, list[Check]]:
    """The stamp, whether stamp and tensors can be read, and what was found."""
    path = folder / WEIGHTS
    problems, stamp, readable = [], None, False
    try:
        stamp = read_stamp(path)
        readable = True
        if stamp is None:
            problems.append(f"{NO_STAMP} {PLAN}")
        elif plan is not None and stamp.plan != plan.hash:
            problems.append(f"was not written with the {PLAN} beside it")
        else:
            stamp.check_config(folder / CONFIG, path)
    except CheckpointError as error:
        problems.append(_told(error, path))
    try:
        tensor_checks = _tensor_checks(path, plan, stamp, stock)
    except CheckpointError as error:
        told = _told(error, path)
        return stamp, False, checked(WEIGHTS, problems if told in problems else [*problems, told], "")
    written = f"written by dcls-convert {stamp.version}" if stamp is not None else ""
    written += f", for this {PLAN}" * (plan is not None)
    return stamp, readable, checked(WEIGHTS, problems, written) + tensor_checks


def _tensor_checks(path: Path, plan: ConversionPlan | None, stamp: Stamp | None, stock: bool) -> list[Check]:
    """Hash, values and positions, in one reading of the file."""
    sets = position_sets(plan) if plan is not None else ()
    of_name = {name: (place, key) for place in sets for key, name in place.parameters.items()}
    hashes: list[tuple[str, str]] = []
    values: list[str] = []
    positions: list[str] = []
    for name, tensor in read_tensors(path):
        hashes.append((name, tensor_hash(tensor)))
        values += _value_problems(name, tensor)
        if name in of_name:
            positions += _position_problems(name, tensor, *of_name[name])
    there = {name for name, _ in hashes}
    positions += [f"{name} is missing, the {key} of {of_name[name][0].name}" for name, (_, key) in of_name.items()
                  if name not in there]  # fmt: skip
    changed = []
    if stamp is not None and folded_hash(hashes) != stamp.tensors:
        changed = ["are not those that were written: the file is damaged or was changed"]
    checks = [not_checked("tensors", f"{WEIGHTS} does not say what they were")]
    if stamp is not None:
        checks = checked("tensors", changed, f"{len(hashes)}, as they were written (SHA-256)")
    checks += checked("values", values, "all are finite")
    if plan is None and not stock:
        return [*checks, not_checked("positions", f"there is no valid {PLAN}")]
    none = "none, since the model is folded"
    detail = f"{len(sets)} tensors, all inside their windows" if sets else none
    return checks + checked("positions", positions, detail)


def _value_problems(name: str, tensor: Tensor) -> Iterator[str]:
    if not tensor.is_floating_point():
        return
    nan = int(tensor.isnan().sum())
    infinite = int(tensor.isinf().sum())
    if nan:
        yield f"{name} has {nan} of {tensor.numel()} values that are NaN"
    # Buffers that mask attention hold -inf, and otherwise 0.
    mask = tensor.dim() > 1 and bool(((tensor == 0) | (tensor == -torch.inf)).all())
    if infinite and not mask:
        yield f"{name} has {infinite} of {tensor.numel()} values that are infinite"


def _position_problems(name: str, tensor: Tensor, place: PositionSet, key: str) -> Iterator[str]:
    wanted = place.layers[0].position_shape
    if tuple(tensor.shape) != wanted or not tensor.is_floating_point():
        yield f"{name} has shape {tuple(tensor.shape)} and is {tensor.dtype}; the plan has {wanted}, floating-point"
        return
    if key == "sigma":
        least = find_interpolation(place.layers[0].interpolation).min_sigma or 0.0
        # Compared in the tensor's own precision, to which the least was rounded when sigma was clamped.
        small = int((tensor < torch.tensor(least, dtype=tensor.dtype)).sum())
        if small:
            yield f"{name} has {small} of {tensor.numel()} sigmas below {least:g} cells, the least"
        return
    for axis, side in enumerate(place.learnt_size):
        low, high = position_limits(side)
        outside = (tensor[axis] < low) | (tensor[axis] > high)
        if count := int(outside.sum()):
            furthest = tensor[axis][outside].abs().max().item()
            yield (
                f"{name} has {count} of {outside.numel()} elements outside the window along axis {axis}, "
                f"which goes from {low} to {high}; the furthest is at {furthest:g}"
            )


def _text_checks(
    folder: Path, name: str, problems_of: Callable[[str, ConversionPlan | None], list[str]], plan: ConversionPlan | None
) -> list[Check]:
    try:
        problems = problems_of(read_text(folder / name), plan)
    except CheckpointError as error:
        return checked(name, [_told(error, folder / name)], "")
    if plan is None and not problems:
        return [not_checked(name, f"there is no valid {PLAN} to compare it with")]
    return checked(name, problems, f"agrees with {PLAN}")


def _config_problems(text: str, plan: ConversionPlan | None) -> list[str]:
    config = _json_object(text, CONFIG)
    architecture = config.get("architecture")
    if architecture != TIMM_ARCHITECTURE:
        return [f"its architecture is {_shown(architecture)}, not {TIMM_ARCHITECTURE!r}"]
    if plan is None:
        return []
    return _differences(config.get("model_args"), _as_json(timm_model_args(plan)), "model_args")


def _rules_problems(text: str, plan: ConversionPlan | None) -> list[str]:
    return [f"is not the text in {PLAN}"] if plan is not None and text != plan.rules_text else []


def _report_problems(text: str, plan: ConversionPlan | None) -> list[str]:
    report = _json_object(text, REPORT)
    check_format(report, REPORT_FORMAT, REPORT)
    if plan is None:
        return []
    wanted = _as_json(predict_report(plan).with_output(OUTPUT_IN_FOLDER).to_dict())
    rows = report.get("layers")
    for row, planned in zip(rows if isinstance(rows, list) else [], wanted["layers"], strict=False):
        if isinstance(row, dict) and isinstance(row.get("fit_error"), float):
            planned["fit_error"] = row["fit_error"]  # measured, and so in no plan
    return _differences(report, wanted, "")


def _json_object(text: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: is not JSON: {one_line(error)[:200]}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{name}: is a {type(data).__name__}, not an object")
    return data


def _as_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


def _differences(found: object, expected: object, place: str) -> list[str]:
    differences = list(_each_difference(found, expected, place))
    more = len(differences) - MOST_DIFFERENCES
    return differences[:MOST_DIFFERENCES] + [f"has {more} more such differences"] * (more > 0)


def _each_difference(found: object, expected: object, place: str) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in expected | found:
            yield from _each_difference(found.get(key), expected.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            yield from _each_difference(ours, theirs, f"{place}.{index}")
    elif type(found) is not type(expected) or found != expected:
        yield f"{shown(place)} is {_shown(found)}, {PLAN} gives {_shown(expected)}"


def _shown(value: object) -> str:
    return f"{len(value)} entries" if isinstance(value, Sequence) and not isinstance(value, str) else shown(repr(value))


def _told(error: Exception, path: Path) -> str:
    """The message without the file's name, which the check has."""
    return one_line(error).removeprefix(f"{path}: ").removeprefix(f"{path.name}: ")


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
