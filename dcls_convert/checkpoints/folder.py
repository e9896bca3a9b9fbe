"""A converted model to a folder and back. The folder appears whole or not at all."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from .. import __version__
from ..errors import CheckpointError, DclsConvertError, PlanError, one_line, shown
from ..networks.source import ModelSource, build_hollow, build_model
from ..networks.weights import alias_names, fill_, load_weights_
from ..planning.plan import ConversionPlan, plan_from_json
from ..reports.report import ConversionReport, measure_report, predict_report
from ..reports.report_view import report_markdown
from ..surgery.place import TIMM_ARCHITECTURE, place_layers_, timm_model_args
from .fingerprint import take_fingerprint
from .stamp import METADATA_KEY, NO_STAMP, WEIGHTS, Stamp, read_stamp, read_tensors, tensors_hash

CONFIG, PLAN, RULES, REPORT, CARD = "config.json", "plan.json", "rules.yaml", "report.json", "README.md"
FILES = (WEIGHTS, CONFIG, PLAN, RULES, REPORT, CARD)
OUTPUT_IN_FOLDER = "."  # what report.json calls its own folder, wherever that is moved


def save_converted(
    model: nn.Module,
    plan: ConversionPlan,
    folder: str | Path,
    *,
    report: ConversionReport | None = None,
    force: bool = False,
    fingerprint: bool = True,
) -> Path:
    """Write a converted model as a checkpoint folder that timm loads once `dcls_convert` is imported.

    Args:
        model: Converted by `apply_plan_(model, plan)`.
        plan: The plan that was carried out.
        folder: Must not exist, unless `force` is set: then a checkpoint folder there is replaced.
        report: Measured on the model where it is not given.
        force: Replace an existing checkpoint folder. Anything else that is in the way is never touched.
        fingerprint: Run the model once, on a random image of the plan's input size, and note its output in the weights
            file, for `dcls-convert verify`. Without it, nothing of the model's code runs.

    Returns:
        The folder's path.

    Raises:
        CheckpointError: The folder cannot be written; nothing is left behind.
    """
    folder = Path(folder)
    report = report or measure_report(model, plan)
    with new_folder(folder, force=force) as partial:
        written = write_weights(model, plan, partial / WEIGHTS, fingerprint=fingerprint)
        config = timm_config(model, plan) | {METADATA_KEY: {"tensors": written.tensors}}
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / PLAN).write_text(plan.to_json(), encoding="utf-8")
        (partial / RULES).write_text(plan.rules_text, encoding="utf-8")
        (partial / REPORT).write_text(report.with_output(OUTPUT_IN_FOLDER).to_json(), encoding="utf-8")
        (partial / CARD).write_text(_model_card(report), encoding="utf-8")
    return folder


def load_converted(
    folder: str | Path, *, model: nn.Module | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """Rebuild a converted model from its folder, with its weights, in eval mode.

    Args:
        folder: Written by `save_converted`.
        model: The unconverted model, for a folder whose model only its user can build; converted in place.
        device: Where to put it.

    Raises:
        CheckpointError: Something is missing or damaged in the folder, or belongs to another one.
    """
    folder = Path(folder)
    plan = read_plan(folder)
    state = _read_state(folder, plan)
    if model is None and plan.model is None:
        raise CheckpointError(f"{folder}: does not say how its model is built; pass the unconverted one as `model`")
    # No weights are drawn where the file has all that the model needs.
    source = ModelSource(name=plan.model or "", args=plan.model_args)
    if model is None and (hollow := build_hollow(source)) is not None:
        filled = rebuild_model(plan, str(folder / PLAN), hollow)
        if fill_(filled, state, str(folder / WEIGHTS)):
            return filled.eval().to(device)
    model = rebuild_model(plan, str(folder / PLAN), model)
    load_weights_(model, state, str(folder / WEIGHTS))
    return model.eval().to(device)


def rebuild_model(plan: ConversionPlan, where: str, model: nn.Module | None = None) -> nn.Module:
    """The converted model of a plan, with weights that mean nothing yet.

    Args:
        plan: Says how its model is built, where that is not given.
        where: What messages call the plan.
        model: The unconverted model; converted in place.

    Raises:
        CheckpointError: The plan is for another model.
        ModelError: The model cannot be built.
    """
    if model is None:
        model = build_model(ModelSource(name=plan.model or "", args=plan.model_args))
    try:
        place_layers_(model, plan)
    except PlanError as error:
        raise CheckpointError(f"{where}: does not fit {plan.model or 'the model'}: {error}") from error
    return model


def read_plan(folder: str | Path) -> ConversionPlan:
    """The plan of a checkpoint folder; CheckpointError where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not a folder")
    return plan_from_json(read_text(folder / PLAN), str(folder / PLAN))


def tuned_plan(model: nn.Module, plan: ConversionPlan) -> ConversionPlan:
    """The plan under which to save a converted model of timm that has another head than the plan's, after fine-tuning.

    Args:
        model: As `timm.create_model("local-dir:FOLDER", num_classes=10)` gives it.
        plan: That of the folder.
    """
    plan = replace(plan, model_args={**plan.model_args, "num_classes": model.num_classes})
    found, stated = measure_report(model, plan), predict_report(plan)
    return replace(
        plan,
        params=_shifted(plan.params, stated.params.after, found.params.after),
        macs=_shifted(plan.macs, stated.macs.after, found.macs.after),
    )


def _shifted(count: Any, stated: int | None, found: int | None) -> Any:
    """A count of the unconverted model, by as much more or less as the converted one has."""
    return count if stated is None or found is None else count + found - stated


def read_text(path: Path) -> str:
    """A text of a checkpoint folder; CheckpointError where it cannot be read."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: is not a file")
        return path.read_bytes().decode("utf-8")  # with its line ends, unlike read_text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise CheckpointError(f"{path}: cannot be read: {reason}") from error


def check_output(folder: Path, *, force: bool) -> None:
    """Refuse an output folder that could not be written in the end, before any work is done.

    Raises:
        CheckpointError: It exists (with `force`: and is not a checkpoint folder), or its parent cannot be written.
    """
    try:
        _check_output(folder, force)
    except OSError as error:
        raise CheckpointError(f"output {shown(folder)}: {error.strerror}") from error


def _check_output(folder: Path, force: bool) -> None:
    if folder.name in ("", ".."):
        raise CheckpointError(f"output {folder}: name a new folder, not one that is there already")
    if folder.is_symlink() or folder.exists():
        if not force:
            raise CheckpointError(f"output {folder} already exists; --force replaces it, --output names another")
        foreign = _not_of_a_checkpoint(folder)
        if foreign:
            raise CheckpointError(f"output {folder} {foreign}, so it is left as it is; --output names another")
    _check_parent(folder)


def _check_parent(folder: Path) -> None:
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise CheckpointError(f"output {folder}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"output {folder}: no permission to write in {parent}")


def _not_of_a_checkpoint(folder: Path) -> str | None:
    """Why an existing path is nothing that `save_converted` wrote, and must not be replaced; None where it is."""
    if folder.is_symlink():
        return "is a link, not a folder"
    if not folder.is_dir():
        return "is a file, not a folder"
    entries = sorted(folder.iterdir())
    for entry in entries:
        if entry.name not in FILES or entry.is_symlink() or not entry.is_file():
            return f"holds {entry.name!r}, which is not of a checkpoint"
    try:
        # A folder for stock timm has no plan, but its weights say who wrote them.
        if not entries or (read_plan(folder) if (folder / PLAN).exists() else read_stamp(folder / WEIGHTS)):
            return None
    except CheckpointError:
        pass
    return f"has no readable {PLAN} and is not of this program"


@contextlib.contextmanager
def new_folder(folder: Path, *, force: bool) -> Iterator[Path]:
    """A folder to fill, which takes its final name when the block ends well and vanishes when it does not."""
    check_output(folder, force=force)
    with _beside(folder) as partial:
        yield partial
        partial.chmod(0o777 & ~_umask())
        _swap(partial, folder)


def check_output_file(path: Path, *, force: bool) -> None:
    """As `check_output`, for a file: with `force`, a file of the same suffix may be replaced, and nothing else.

    Raises:
        CheckpointError: It exists, or its parent cannot be written.
    """
    try:
        if force and path.is_file() and not path.is_symlink():
            _check_parent(path)
        elif force and (path.is_symlink() or path.exists()):
            what = "a link" if path.is_symlink() else "not a file"
            raise CheckpointError(f"output {path} is {what}, so it is left as it is; --output names another")
        else:
            _check_output(path, force=False)
    except OSError as error:
        raise CheckpointError(f"output {shown(path)}: {error.strerror}") from error


@contextlib.contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """A path to write to, which takes its final name when the block ends well and vanishes when it does not.

    What else is written beside it takes its place too, before it.
    """
    check_output_file(path, force=force)
    with _beside(path) as partial:
        yield partial / path.name
        written = sorted(partial.iterdir(), key=lambda entry: entry.name == path.name)
        for entry in written:
            check_output_file(path.with_name(entry.name), force=force)
        for entry in written:
            os.replace(entry, path.with_name(entry.name))
        partial.rmdir()


@contextlib.contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A folder beside the output, whose parents are made if need be; all that goes again when the block fails."""
    made: list[Path] = []
    partial = None
    try:
        for parent in [output.absolute().parent, *output.absolute().parent.parents]:
            if parent.exists():
                break
            made.append(parent)
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.absolute().parent))
        yield partial
    except BaseException as error:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError | SafetensorError) and not isinstance(error, DclsConvertError):
            raise CheckpointError(
                f"output {output} cannot be written: {one_line(error)}; nothing was left there"
            ) from error
        raise


def _swap(partial: Path, folder: Path) -> None:
    """Give the new folder its name; an old one goes only when the new one stands."""
    if not folder.exists():
        partial.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.absolute().parent))
    try:
        folder.rename(old / folder.name)
        try:
            partial.rename(folder)
        except BaseException:
            (old / folder.name).rename(folder)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_weights(model: nn.Module, plan: ConversionPlan, path: Path, *, fingerprint: bool = True) -> Stamp:
    """Every tensor once, under its first name; and what the file says about itself."""
    given = take_fingerprint(model, plan.input_size).to_dict() if fingerprint else None
    aliases = alias_names(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in aliases}
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        ready = tensor.detach().cpu().contiguous()
        storage = ready.untyped_storage().data_ptr()
        tensors[name] = ready.clone() if storage in storages and ready.numel() else ready  # views of one memory
        storages.add(storage)
    stamp = Stamp(version=__version__, plan=plan.hash, tensors=tensors_hash(tensors.items()), fingerprint=given)
    save_file(tensors, path, metadata={METADATA_KEY: stamp.to_json()})
    path.chmod(0o666 & ~_umask())
    return stamp


def _read_state(folder: Path, plan: ConversionPlan) -> dict[str, Tensor]:
    """The weights, as they were written: hashing them takes about as long as reading them."""
    path = folder / WEIGHTS
    stamp = read_stamp(path)
    if stamp is None:
        raise CheckpointError(f"{path}: {NO_STAMP} {PLAN}")
    stamp.check_plan(plan, path, f"the {PLAN} beside it")
    stamp.check_config(folder / CONFIG, path)
    state = dict(read_tensors(path))
    stamp.check_tensors(tensors_hash(state.items()), path)
    return state


def timm_config(model: nn.Module, plan: ConversionPlan) -> dict[str, Any]:
    """timm's config.json: `model_args` for its entry point `dcls`, and the preprocessing in `pretrained_cfg`."""
    stated = getattr(model, "pretrained_cfg", None)
    source_keys = {"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "custom_load"}
    config = {
        key: value
        for key, value in (stated if isinstance(stated, dict) else {}).items()
        if key not in source_keys and value is not None
    }
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int):
        config["num_classes"] = classes
    if plan.input_size is not None:
        config["input_size"] = list(plan.input_size)
    result: dict[str, Any] = {"architecture": TIMM_ARCHITECTURE}
    for name in ("num_classes", "num_features"):
        if isinstance(getattr(model, name, None), int):
            result[name] = getattr(model, name)
    return {**result, "model_args": timm_model_args(plan), "pretrained_cfg": config}


def _model_card(report: ConversionReport) -> str:
    loading = LOAD_WITH_TIMM if (report.model or "").startswith("timm:") else LOAD_WITHOUT_TIMM
    return model_card(
        report,
        loading,
        "`plan.json` says what became of every layer, `rules.yaml` by which rules, `report.json` what it costs.",
    )


def model_card(report: ConversionReport, loading: str, files: str) -> str:
    """README.md of a folder: what the model is, its numbers, the lines that load it, what else lies there."""
    name = report.model or "a model"
    title = "folded from learnable element positions" if report.folded else "with learnable element positions"
    folding = (
        "The model is folded: the kernels are constructed once and for all, and stand in plain convolutions of the "
        "windows' sizes; no positions are left to be learnt. "
    )
    return (
        f"---\nlibrary_name: timm\ntags:\n- image-classification\n- timm\n- dcls\n---\n"
        f"# {name} {title} (DCLS)\n\n"
        f"Convolutions of {name} are replaced by dilated convolutions with learnable spacings "
        f"([arXiv:2112.03740](https://arxiv.org/abs/2112.03740)): every kernel is a few weighted elements whose "
        f"positions in a larger window are learnt by backpropagation. {folding * report.folded}"
        f"Made by dcls-convert {__version__}.\n\n"
        f"{report_markdown(report)}\n## Loading\n\n"
        f"Where this folder is `dcls-model` below:\n\n```python\n{loading.format(folder='dcls-model')}```\n\n"
        f"{files}\n"
    )


LOAD_WITH_TIMM = """\
import timm
import dcls_convert  # registers the architecture with timm

model = timm.create_model("local-dir:{folder}", pretrained=True, num_classes=10)
"""
LOAD_WITHOUT_TIMM = """\
import dcls_convert

model = dcls_convert.load_converted("{folder}")
"""
