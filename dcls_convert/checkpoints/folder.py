"""The files of a checkpoint folder, read without running code, and hashes that hold config and weights together."""

import contextlib
import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from torch import Tensor

from ..errors import CheckpointError, shown
from ..files import check_folder
from ..networks.source import TIMM_ARCHITECTURE, ModelSource
from ..networks.weights import opened
from ..planning.plan import ConversionPlan
from ..records import Record, read_json
from .fingerprint import Fingerprint

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
REPORT = "report.json"
CARD = "README.md"
FILES = (WEIGHTS, CONFIG, REPORT, CARD)
# A folder may hold these too.
PAGE = "pictures.html"
PICTURE = "positions.png"
PLAN_PLACE = "model_args.plan"  # in config.json
METADATA_KEY = "dcls_convert"
FORMAT_METADATA = {
    "format": "pt"
}  # accelerate and transformers refuse files that do not name torch so
# What a config tells its readers alone, in `pretrained_cfg`.
DESCRIPTIVE = {"label_names", "label_descriptions", "description", "tag", "notes", "license"}
DESCRIPTIVE |= {"origin_url", "paper_name", "paper_ids"}

# What timm's own savers write beside `pretrained_cfg`; there it counts more.
BESIDE_PREPROCESSING = ("num_classes", "label_names", "label_descriptions")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderConfig:
    """What a config.json says."""

    folder: Path
    plan: ConversionPlan | None  # None for a folded model that timm builds by itself
    # The unconverted model to build; None where only its user can build it.
    source: ModelSource | None
    input_size: Any  # of the model, as stated
    tensors: object  # tensors_hash of the weights beside it; None where timm's own savers wrote it
    hash: str  # config_hash

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp(Record):
    """The metadata that `save_converted` puts into the weights file. The hash of its tensors stands in config.json."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    format: int = 1
    version: str  # of the program that wrote it
    config: str  # config_hash of the config.json beside it
    fingerprint: Fingerprint | None  # None where none was wanted


def read_folder(folder: str | Path) -> FolderConfig:
    """What the folder's config.json says; CheckpointError where there is no folder, or no valid config in it."""
    path = check_folder(Path(folder)) / CONFIG
    config = read_json(path, str(path))
    architecture = config.get("architecture")
    args = config.get("model_args", {})
    if not isinstance(architecture, str) or not isinstance(args, dict):
        raise CheckpointError(f"{path}: names no architecture, or has arguments that are no object")
    plan = None
    size = _entry(config.get("pretrained_cfg"), "input_size")
    source: ModelSource | None = ModelSource(name=f"timm:{architecture}", args=args)
    if architecture == TIMM_ARCHITECTURE:
        plan = ConversionPlan.from_dict(args.get("plan"), f"{path}: {PLAN_PLACE}")
        own = {
            name: value for name, value in args.items() if name != "plan"
        }  # timm's savers may change them
        source = None if plan.model is None else ModelSource(name=plan.model, args=own)
        size = plan.input_size
    return FolderConfig(
        folder=Path(folder),
        plan=plan,
        source=source,
        input_size=size,
        tensors=_entry(config.get(METADATA_KEY), "tensors"),
        hash=config_hash(config),
    )


def _entry(data: object, name: str) -> Any:
    return data.get(name) if isinstance(data, dict) else None


def read_plan(folder: str | Path) -> ConversionPlan:
    """The plan of a checkpoint folder; CheckpointError where there is none."""
    return the_plan(read_folder(folder))


def the_plan(config: FolderConfig) -> ConversionPlan:
    """The plan of a config; CheckpointError where it has none."""
    if config.plan is None:
        where = config.folder
        raise CheckpointError(
            f"{where}: there is no plan in {CONFIG}, which is of another model or of stock timm's"
        )
    return config.plan


def read_stamp(path: Path) -> Stamp | None:
    """From the file's header alone; None where another program wrote the file, as timm does after fine-tuning."""
    with opened(path) as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
    return None if text is None else Stamp.from_json(text, f"{path}: its metadata {METADATA_KEY!r}")


def read_tensors(path: Path, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file, or those of `names`, under its name, one at a time."""
    with opened(path) as file:
        for name in sorted(file.keys()):
            if names is None or name in names:
                yield name, file.get_tensor(name)


def check_stamp(stamp: Stamp | None, config: FolderConfig) -> None:
    """Refuse weights whose stamp, or lack of one, does not fit the config; timm's savers write neither."""
    if stamp is None and config.tensors is not None:
        raise CheckpointError(
            f"{config.weights}: has no metadata of dcls-convert, but {CONFIG} states its tensors; was it overwritten? "
            "save_converted(model, FOLDER, NEW) saves a tuned model"
        )
    if stamp is not None and stamp.config != config.hash:
        raise CheckpointError(
            f"{config.weights}: was not written with this {CONFIG}: the config was edited, or one of the two is of "
            "another folder"
        )


def read_preprocessing(folder: Path) -> dict[str, Any]:
    """What the folder's config.json states about images and classes, under timm's names."""
    path = folder / CONFIG
    config = read_json(path, str(path))
    cfg = config.get("pretrained_cfg")
    stated = dict(cfg) if isinstance(cfg, dict) else {}
    for name in BESIDE_PREPROCESSING:
        if name in config:
            stated[name] = config[name]
    return stated


def check_tensors(state: Mapping[str, Tensor], config: FolderConfig) -> None:
    """Refuse (CheckpointError) tensors other than those that were written. Hashing takes about as long as reading."""
    if config.tensors is not None and config.tensors != tensors_hash(state.items()):
        raise CheckpointError(
            f"{config.weights}: its tensors are not those that were written; it is damaged or was changed"
        )


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of what matters in a parsed config.json: neither its layout and order nor labels and descriptions."""
    cfg = config.get("pretrained_cfg")
    if isinstance(cfg, dict):
        cfg = {name: value for name, value in cfg.items() if name not in DESCRIPTIVE}
    parts = {name: config.get(name) for name in ("architecture", "model_args", "num_classes")}
    parts |= {"pretrained_cfg": cfg, "tensors": _entry(config.get(METADATA_KEY), "tensors")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in any order. Looks at one tensor after the other."""
    digests = []
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # torch cannot view a tensor without axes as bytes.
        flat = tensor.detach().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
        digests.append((name, digest.hexdigest()))
    return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()


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
