"""The files of a checkpoint folder, and how they are read. Nothing that is read here runs code."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, one_line, shown
from ..files import check_folder, read_bytes
from ..networks.source import ModelSource
from ..planning.plan import ConversionPlan
from ..records import read_json
from ..surgery.place import TIMM_ARCHITECTURE
from .stamp import METADATA_KEY, Stamp, read_stamp

WEIGHTS, CONFIG, REPORT, CARD = "model.safetensors", "config.json", "report.json", "README.md"
FILES = (WEIGHTS, CONFIG, REPORT, CARD)
STOCK_FILES = (WEIGHTS, CONFIG, CARD)  # of a folded model that timm builds by itself
PAGE, PICTURE = "pictures.html", "positions.png"  # which a folder may hold too
PICTURE_FILES = (PAGE, PICTURE)
PLAN_PLACE = "model_args.plan"  # in config.json


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderConfig:
    """What a config.json says."""

    plan: ConversionPlan | None  # None for a folded model that timm builds by itself
    source: ModelSource | None  # of the model to build, before conversion; None where only its user can build it
    input_size: Any  # of the model, as stated
    tensors: str | None  # the hash of the weights beside it; None where it states none
    problem: str | None  # how its arguments differ from those of its plan; timm's savers may change them

    @property
    def files(self) -> tuple[str, ...]:
        return STOCK_FILES if self.plan is None else FILES


def read_folder(folder: str | Path) -> FolderConfig:
    """What the folder's config.json says; CheckpointError where there is no folder, or no valid config in it."""
    folder = check_folder(Path(folder))
    return parse_config(read_text(folder / CONFIG), str(folder / CONFIG))


def read_plan(folder: str | Path) -> ConversionPlan:
    """The plan of a checkpoint folder; CheckpointError where there is none."""
    return the_plan(read_folder(folder), folder)


def the_plan(config: FolderConfig, folder: str | Path) -> ConversionPlan:
    """The plan of a config; CheckpointError where it has none."""
    if config.plan is None:
        raise CheckpointError(f"{folder}: there is no plan in {CONFIG}, which is of another model or of stock timm's")
    return config.plan


def parse_config(text: str, where: str) -> FolderConfig:
    """What the text of a config.json says; CheckpointError, which begins with `where`, if it is not valid."""
    config = read_json(text, where)
    architecture, args = config.get("architecture"), config.get("model_args", {})
    if not isinstance(architecture, str) or not isinstance(args, dict):
        raise CheckpointError(f"{where}: names no architecture, or has arguments that are no object")
    plan, problem = None, None
    source: ModelSource | None = ModelSource(name=f"timm:{architecture}", args=args)
    size = _entry(config.get("pretrained_cfg"), "input_size")
    if architecture == TIMM_ARCHITECTURE:
        plan = ConversionPlan.from_dict(args.get("plan"), f"{where}: {PLAN_PLACE}")
        size, stated = plan.input_size, plan.model_args
        own = {name: value for name, value in args.items() if name != "plan"}
        source = None if plan.model is None else ModelSource(name=plan.model, args=own)
        if changed := [name for name in sorted(own.keys() | stated.keys()) if own.get(name) != stated.get(name)]:
            value = shown(repr(own.get(changed[0])))
            problem = f"model_args.{shown(changed[0])} is {value}, not what its plan says"
    tensors = _entry(config.get(METADATA_KEY), "tensors")
    tensors = tensors if isinstance(tensors, str) else None
    return FolderConfig(plan=plan, source=source, input_size=size, tensors=tensors, problem=problem)


def _entry(data: object, name: str) -> Any:
    return data.get(name) if isinstance(data, dict) else None


def read_checked_stamp(path: Path, config: FolderConfig) -> Stamp | None:
    """The stamp of a weights file, if it has one.

    Raises:
        CheckpointError: The weights were written with another plan, other arguments or another config than this one.
    """
    stamp = read_stamp(path)
    if stamp is None:
        if config.tensors is not None:
            raise CheckpointError(
                f"{path}: has no metadata of dcls-convert, but {CONFIG} states its tensors; was it overwritten? "
                "save_converted(model, FOLDER, NEW) saves a tuned model"
            )
        return None
    if config.plan is not None and stamp.plan != config.plan.hash:
        raise CheckpointError(f"{path}: was not written with the plan in {CONFIG}")
    if config.problem is not None:
        raise CheckpointError(f"{CONFIG}: {config.problem}")
    if config.tensors not in (None, stamp.tensors):
        raise CheckpointError(f"{path}: is of another folder, with the same plan: {CONFIG} states other tensors")
    return stamp


def read_text(path: Path) -> str:
    """A text of a checkpoint folder; CheckpointError where it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8")  # with its line ends, unlike Path.read_text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise CheckpointError(f"{path}: cannot be read: {reason}") from error


def not_of_a_checkpoint(path: Path) -> str | None:
    """Why an existing path is no checkpoint folder, and so is never replaced by one; None where it is."""
    if path.is_symlink():
        return "is a link, not a folder"
    if not path.is_dir():
        return "is a file, not a folder"
    entries = sorted(path.iterdir())
    for entry in entries:
        if entry.name not in (*FILES, *PICTURE_FILES) or entry.is_symlink() or not entry.is_file():
            return f"holds {shown(entry.name)!r}, which is not of a checkpoint"
    if not entries:
        return None
    for is_ours in (lambda: read_stamp(path / WEIGHTS), lambda: read_folder(path).plan):
        with contextlib.suppress(CheckpointError):
            if is_ours() is not None:
                return None
    return "is not of this program"
