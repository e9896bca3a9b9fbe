"""Rebuild a model from its checkpoint folder alone, and look whether it is the one that was saved.

`verification` runs this in a process of its own, so that nothing but the folder can be used.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, DclsConvertError, one_line
from ..networks.source import ModelSource, build_model
from ..networks.weights import alias_names, load_weights_
from ..planning.plan import ConversionPlan
from .fingerprint import TOLERANCES, Fingerprint, deviation, fingerprint_from_dict, take_fingerprint
from .folder import CONFIG, PLAN, read_plan, read_text, rebuild_model
from .stamp import WEIGHTS, read_stamp, read_tensors
from .verify import Check, checked, is_for_stock_timm, not_checked

MOST_NAMES = 5  # of tensors, in one message


def main(folder: str, result: str) -> None:
    """Write the checks of `folder` to the file `result` as JSON; whatever the model prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        checks = rebuild_checks(Path(folder))
    Path(result).write_text(json.dumps([asdict(check) for check in checks]), encoding="utf-8")


def rebuild_checks(folder: Path) -> list[Check]:
    """Build the model of a folder whose plan and weights can be read; check names, shapes, ties, outputs, and timm."""
    state = dict(read_tensors(folder / WEIGHTS))
    if is_for_stock_timm(folder):
        return _stock_checks(folder, state)
    plan = read_plan(folder)
    try:
        model = rebuild_model(plan, PLAN)
    except DclsConvertError as error:
        return checked("model", [one_line(error)], "")
    checks = checked("model", _misfits(model, state), f"{plan.model} rebuilt; all {len(state)} tensors fit")
    if any(not check.ok for check in checks):
        return [*checks, not_checked("outputs", "the weights do not fit the model")]
    _load_(model, state, folder)
    detail = f"{len(plan.tie_groups)} tie groups, each with one entry that its layers share"
    none = "none, since the model is folded" if plan.folded else "none"
    tied = plan.tie_groups and not plan.folded
    checks += checked("ties", _tie_problems(model, plan, state), detail if tied else none)
    found = take_fingerprint(model, plan.input_size)
    checks += _stored_output_checks(folder, found)
    del model
    return checks + _timm_checks(folder, state, plan, found)


def _misfits(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[str]:
    """Names, shapes and kinds of tensors in which the weights differ from the model."""
    aliases = alias_names(model)
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in aliases}
    if missing := [name for name in own if name not in state]:
        yield f"{WEIGHTS} lacks {_some(missing)} of the rebuilt model"
    if unexpected := [name for name in state if name not in own]:
        yield f"{WEIGHTS} has {_some(unexpected)}, which the rebuilt model has not"
    for name in own.keys() & state.keys():
        if own[name].shape != state[name].shape:
            yield f"{name} has shape {tuple(state[name].shape)}, the rebuilt model needs {tuple(own[name].shape)}"
        if own[name].is_floating_point() != state[name].is_floating_point():
            yield f"{name} is {state[name].dtype}, the rebuilt model needs {own[name].dtype}"


def _load_(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """As `load_converted`, but in the precision of the file, in which the fingerprint was taken."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in state and tensor.is_floating_point():
            tensor.data = tensor.data.to(state[name].dtype)
    load_weights_(model, state, str(folder / WEIGHTS))
    model.eval()


def _tie_problems(model: nn.Module, plan: ConversionPlan, state: Mapping[str, Tensor]) -> Iterator[str]:
    if plan.folded:
        return
    for group in plan.tie_groups:
        for key, parameter in group.parameters.items():
            shared = getattr(model.get_submodule(group.owner), parameter)
            layers: list[Any] = [model.get_submodule(name) for name in group.layers]
            if any(getattr(layer, key) is not shared for layer in layers):
                yield f"tie group {group.name}: not all of its layers share {group.owner}.{parameter}"
            own = [f"{name}.{key}" for name in group.layers if f"{name}.{key}" in state]
            if own:
                yield f"tie group {group.name}: {_some(own)} would be a second entry for the same {key}"


def _stored_fingerprint(folder: Path) -> Fingerprint | str:
    """What the weights file says, or why that says nothing."""
    stamp = read_stamp(folder / WEIGHTS)
    if stamp is None or stamp.fingerprint is None:
        return "none was stored when it was saved"
    stored = fingerprint_from_dict(stamp.fingerprint, WEIGHTS)
    return stored if stored.outputs is not None else f"none was stored when it was saved: {stored.reason}"


def _stored_output_checks(folder: Path, found: Fingerprint) -> list[Check]:
    try:
        return _output_checks("outputs", found, _stored_fingerprint(folder), "of the stored norm")
    except CheckpointError as error:
        return checked("outputs", [one_line(error).removeprefix(f"{WEIGHTS}: ")], "")


def _output_checks(name: str, found: Fingerprint, stored: Fingerprint | str, of: str) -> list[Check]:
    if isinstance(stored, str):
        return [not_checked(name, stored)]
    if found.outputs is None:
        return checked(name, [f"the model does not run: {found.reason}"], "")
    apart, tolerance = deviation(found, stored), TOLERANCES[stored.dtype]
    text = f"differ by {apart:.1e} {of}; up to {tolerance:g} is rounding in {stored.dtype}"
    return checked(name, [] if apart <= tolerance else [text], text)


def _timm_checks(folder: Path, state: Mapping[str, Tensor], plan: ConversionPlan, ours: Fingerprint) -> list[Check]:
    """What `timm.create_model("local-dir:FOLDER", pretrained=True)` gives."""
    try:
        model = build_model(ModelSource(name=f"local-dir:{folder}"), pretrained=True)
    except DclsConvertError as error:
        return checked("timm", [one_line(error)], "")
    problems = list(_misfits(model, state))
    if not problems:
        own = model.state_dict()
        other = [name for name, tensor in state.items() if not torch.equal(own[name], tensor.to(own[name].dtype))]
        problems = [f"loads other values for {_some(other)}"] if other else []
    if problems:
        return checked("timm", problems, "")
    _load_(model, state, folder)
    if ours.outputs is None:
        return checked("timm", [], "loads the same tensors")
    (check,) = _output_checks("timm", take_fingerprint(model, plan.input_size), ours, "from load_converted's")
    return [check if check.ok is False else Check(name="timm", ok=True, detail="loads the same model")]


def _stock_checks(folder: Path, state: Mapping[str, Tensor]) -> list[Check]:
    """Of a folded model for timm alone: that timm builds it, of these tensors, with the outputs that were stored."""
    try:
        model = build_model(ModelSource(name=f"local-dir:{folder}"), pretrained=True)
    except DclsConvertError as error:
        return checked("timm", [one_line(error)], "")
    config = json.loads(read_text(folder / CONFIG))
    checks = checked("timm", _misfits(model, state), f"its own {config['architecture']} loads all {len(state)} tensors")
    if any(not check.ok for check in checks):
        return checks
    _load_(model, state, folder)
    size = config.get("pretrained_cfg", config).get("input_size")
    return checks + _stored_output_checks(folder, take_fingerprint(model, size))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
