"""The files of a checkpoint folder, and how they are read. Nothing that is read here runs code.

config.json states the hash of the tensors, and the weights file the hash of what matters in config.json: if one of the
two comes from another folder, or is edited in more than labels, descriptions and layout, they no longer fit.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, one_line, shown
from ..files import check_folder, read_bytes
from ..networks.source import ModelSource
from ..planning.plan import ConversionPlan
from ..records import read_json
from ..surgery.place import TIMM_ARCHITECTURE
from .stamp import METADATA_KEY, Stamp, config_hash, read_stamp, tensors_hash

WEIGHTS, CONFIG, REPORT, CARD = "model.safetensors", "config.json", "report.json", "README.md"
FILES = (WEIGHTS, CONFIG, REPORT, CARD)
PAGE, PICTURE = "pictures.html", "positions.png"  # which a folder may hold too
PLAN_PLACE = "model_args.plan"  # in config.json


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderConfig:
    """What a config.json says."""

    plan: ConversionPlan | None  # None for a folded model that timm builds by itself
    source: ModelSource | None  # of the model to build, before conversion; None where only its user can build it
    input_size: Any  # of the model, as stated
    tensors: object  # tensors_hash of the weights beside it; None where timm's own savers wrote it
    hash: str  # config_hash


def read_folder(folder: str | Path) -> FolderConfig:
    """What the folder's config.json says; CheckpointError where there is no folder, or no valid config in it."""
    path = check_folder(Path(folder)) / CONFIG
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise CheckpointError(f"{path}: cannot be read: {reason}") from error
    config = read_json(text, str(path))
    architecture, args = config.get("architecture"), config.get("model_args", {})
    if not isinstance(architecture, str) or not isinstance(args, dict):
        raise CheckpointError(f"{path}: names no architecture, or has arguments that are no object")
    plan, size = None, _entry(config.get("pretrained_cfg"), "input_size")
    source: ModelSource | None = ModelSource(name=f"timm:{architecture}", args=args)
    if architecture == TIMM_ARCHITECTURE:
        plan = ConversionPlan.from_dict(args.get("plan"), f"{path}: {PLAN_PLACE}")
        own = {name: value for name, value in args.items() if name != "plan"}  # timm's savers may change them
        source, size = None if plan.model is None else ModelSource(name=plan.model, args=own), plan.input_size
    tensors = _entry(config.get(METADATA_KEY), "tensors")
    return FolderConfig(plan=plan, source=source, input_size=size, tensors=tensors, hash=config_hash(config))


def _entry(data: object, name: str) -> Any:
    return data.get(name) if isinstance(data, dict) else None


def read_plan(folder: str | Path) -> ConversionPlan:
    """The plan of a checkpoint folder; CheckpointError where there is none."""
    return the_plan(read_folder(folder), folder)


def the_plan(config: FolderConfig, folder: str | Path) -> ConversionPlan:
    """The plan of a config; CheckpointError where it has none."""
    if config.plan is None:
        raise CheckpointError(f"{folder}: there is no plan in {CONFIG}, which is of another model or of stock timm's")
    return config.plan


def check_stamp(stamp: Stamp | None, config: FolderConfig, path: Path) -> None:
    """Refuse (CheckpointError) a weights file whose stamp, or lack of one, does not fit the config.

    Folders of timm's own savers have neither a stamp nor a hash of the tensors: names and shapes alone are checked.
    """
    if stamp is None and config.tensors is not None:
        raise CheckpointError(
            f"{path}: has no metadata of dcls-convert, but {CONFIG} states its tensors; was it overwritten? "
            "save_converted(model, FOLDER, NEW) saves a tuned model"
        )
    if stamp is not None and stamp.config != config.hash:
        raise CheckpointError(
            f"{path}: was not written with this {CONFIG}: the config was edited, or one of the two is of another folder"
        )


def check_tensors(state: Mapping[str, Tensor], config: FolderConfig, path: Path) -> None:
    """Refuse (CheckpointError) tensors other than those that were written. Hashing takes about as long as reading."""
    if config.tensors is not None and config.tensors != tensors_hash(state.items()):
        raise CheckpointError(f"{path}: its tensors are not those that were written; it is damaged or was changed")


def not_of_a_checkpoint(path: Path) -> str | None:
    """Why an existing path is no checkpoint folder, and so is never replaced by one; None where it is."""
    if path.is_symlink():
        return "is a link, not a folder"
    if not path.is_dir():
        return "is a file, not a folder"
    for entry in (entries := sorted(path.iterdir())):
        if entry.name not in (*FILES, PAGE, PICTURE) or entry.is_symlink() or not entry.is_file():
            return f"holds {shown(entry.name)!r}, which is not of a checkpoint"
    for is_ours in (lambda: read_stamp(path / WEIGHTS), lambda: read_folder(path).plan):
        with contextlib.suppress(CheckpointError):
            if is_ours() is not None:
                return None
    return "is not of this program" if entries else None
