"""A folder that dcls-convert wrote: the names of its files, and the contents of its config.json.

Reading a folder runs no code, and imports no torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, PlanError
from ..file_checks import check_folder
from ..networks.source import TIMM_ARCHITECTURE, ModelSource, check_source
from ..planning.plan import ConversionPlan
from ..records import read_json
from ..running.input_spec import InputSpec, checked_input_size, image_inputs
from ..text import shortened

WEIGHTS = "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"  # what timm's savers may write instead
CONFIG = "config.json"
REPORT = "report.json"
CARD = "README.md"
FILES = (WEIGHTS, CONFIG, REPORT, CARD)
PICTURE = "positions.png"  # only if it was requested
PLAN_KEY = "model_args.plan"  # in config.json
METADATA_KEY = "dcls_convert"  # in the metadata of the weights, and in config.json
PROVENANCE = "provenance"  # under METADATA_KEY in config.json
# Entries that timm's own savers write beside `pretrained_cfg`; they override entries in it.
OVERRIDING_ENTRIES = ("num_classes", "label_names", "label_descriptions")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedFolder:
    """The contents of a folder's config.json; `read_state` reads its weights."""

    folder: Path
    stored_plan: ConversionPlan | None  # None if timm builds the model by itself
    stored_source: ModelSource | None  # the unconverted model; None if only its user can build it
    # Inputs of the model, from the plan or, without a plan, from `pretrained_cfg`.
    inputs: InputSpec | None
    pretrained_cfg: dict[str, Any]  # preprocessing, classes and origin, under timm's names
    stated_classes: dict[str, Any]  # each place in the config that states them, and its number
    provenance: dict[str, Any] | None  # None if parts were converted one by one
    is_ours: bool  # whether this package was the last to write the config

    @property
    def weights_path(self) -> Path:
        """Path of the weights file, which may be missing."""
        return self.folder / WEIGHTS

    @property
    def plan(self) -> ConversionPlan:
        """The plan.

        Raises:
            CheckpointError: The folder has no plan.
        """
        if self.stored_plan is None:
            raise CheckpointError(
                f"{self.folder}: there is no plan in {CONFIG}; the model is folded for timm "
                "already, or was never converted"
            )
        return self.stored_plan

    @property
    def stated_size(self) -> tuple[int, ...] | None:
        """Size of an image, from `pretrained_cfg` or else the plan; None for other inputs.

        A network may have been trained at another size than its plan's.
        """
        size = self.plan.input_size
        stated = _stated_size(self.pretrained_cfg)
        if size is None or stated is None:
            return size
        return (size[0], *stated[1:])

    def source(self, *, trust_code: bool) -> ModelSource:
        """Return the source of the unconverted model, after checking that it may be built.

        Raises:
            CheckpointError: The folder names no source.
            ModelError: Building it would run code that is not trusted.
        """
        if self.stored_source is None:
            raise CheckpointError(
                f"{self.folder}: does not say how its model is built; give the unconverted "
                "network, as model=NETWORK in Python or --model package.module:factory"
            )
        if not trust_code:
            check_source(self.stored_source)
        return self.stored_source


def has_plan(folder: Path) -> bool:
    """True if the folder's config.json names our entry in timm's registry."""
    path = folder / CONFIG
    return read_json(path, str(path)).get("architecture") == TIMM_ARCHITECTURE


def open_folder(folder: str | Path) -> OpenedFolder:
    """Read and check a folder's config.json.

    Raises:
        CheckpointError: There is no folder or no valid config in it, or one of its files is a link
            to another place.
    """
    folder = Path(folder)
    path = check_folder(folder) / CONFIG
    _check_links(folder)
    if not path.exists() and not (folder / WEIGHTS).exists():
        raise CheckpointError(
            f"{shortened(folder, 200)}: is not a folder of dcls-convert; "
            f"it has neither {CONFIG} nor {WEIGHTS}"
        )
    config = read_json(path, str(path))
    architecture = config.get("architecture")
    args = config.get("model_args", {})
    if not isinstance(architecture, str) or not isinstance(args, dict):
        raise CheckpointError(
            f"{path}: names no architecture, or has arguments that are not an object"
        )
    plan = None
    source: ModelSource | None = ModelSource(name=f"timm:{architecture}", args=args)
    pretrained_cfg = _pretrained_cfg(config)
    size = _stated_size(pretrained_cfg)
    inputs = None if size is None else image_inputs(size)
    if architecture == TIMM_ARCHITECTURE:
        plan = ConversionPlan.from_dict(args.get("plan"), f"{path}: {PLAN_KEY}")
        source = plan.source
        if source is not None:  # timm's savers may have changed the arguments
            own_args = {name: value for name, value in args.items() if name != "plan"}
            source = replace(source, args=own_args)
        inputs = plan.inputs
    own_entry = config.get(METADATA_KEY)
    provenance = own_entry.get(PROVENANCE) if isinstance(own_entry, dict) else None
    if not isinstance(provenance, dict):
        provenance = None
    return OpenedFolder(
        folder=folder,
        stored_plan=plan,
        stored_source=source,
        inputs=inputs,
        pretrained_cfg=pretrained_cfg,
        stated_classes=_stated_classes(config),
        provenance=provenance,
        is_ours=METADATA_KEY in config,
    )


def _check_links(folder: Path) -> None:
    """Refuse (CheckpointError) a folder if a file to read is a link to a place outside of it.

    Error messages quote the start of an unreadable file, so a link could make them quote any file
    of the user's. Links below `snapshots` may lead into `blobs` beside it, as in the cache of a
    hub.
    """
    real_folder = Path(os.path.realpath(folder))
    allowed = [real_folder]
    for parent in real_folder.parents:
        if parent.name == "snapshots":
            allowed.append(parent.with_name("blobs"))
    for name in (CONFIG, WEIGHTS, TORCH_WEIGHTS):
        path = folder / name
        if path.is_symlink() and Path(os.path.realpath(path)).parent not in allowed:
            raise CheckpointError(
                f"{path}: is a link to a file outside of its folder, and such links are not "
                "followed; put the file itself there"
            )


def _stated_size(pretrained_cfg: Mapping[str, object]) -> tuple[int, ...] | None:
    """Return the size of an image that `pretrained_cfg` states; None if it states no valid one."""
    try:
        return checked_input_size(pretrained_cfg.get("input_size"))
    except PlanError:
        return None


def _pretrained_cfg(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry `pretrained_cfg`, updated by the config's OVERRIDING_ENTRIES."""
    stated = config.get("pretrained_cfg")
    cfg = dict(stated) if isinstance(stated, dict) else {}
    for name in OVERRIDING_ENTRIES:
        if name in config:
            cfg[name] = config[name]
    return cfg


def _stated_classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of classes in each place of the config that states it."""
    stated = {}
    if "num_classes" in config:
        stated["num_classes"] = config["num_classes"]
    cfg = config.get("pretrained_cfg")
    if isinstance(cfg, dict) and "num_classes" in cfg:
        stated["pretrained_cfg.num_classes"] = cfg["num_classes"]
    return stated
