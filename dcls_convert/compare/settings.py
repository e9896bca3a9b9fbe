"""The settings that all runs of a comparison share, and how they are derived from a call."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..conversion.loaded import LoadedNetwork
from ..conversion.provenance import weights_hash
from ..conversion.request import ConversionRequest
from ..errors import CheckpointError
from ..options import AUTO, MIRRORED_SHARE, Augmentation
from ..records import Record
from ..tuning.images_hash import images_hash
from ..tuning.recipe import RECIPE_VERSION, Recipe
from ..tuning.training_images import ImageData

SETTINGS_FILE = "settings.json"
FIRST_FORMAT_WITH_IMAGES = 2  # since this format, settings identify the images and weights
# Learning rate from scratch for LR_BATCH images per update. It scales with the square root of the
# number of images, which gives the paper's 4e-3 for 4,096.
LR = 1e-3
LR_BATCH = 256
TRAINED_LR_FACTOR = 0.1  # for trained weights
EPOCHS_PER_WARMUP_EPOCH = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Record):
    """The settings that all runs of a comparison share. A folder keeps those of its first call."""

    format: int = 3
    model: str
    model_args: dict[str, Any] = field(default_factory=dict)
    weights: str = "random"  # or "pretrained", or the name of the file
    weights_hash: str | None = None  # hash of the tensors; None for random weights
    # Conversion options that differ from the defaults. For rules, the name of their file.
    planning: dict[str, str] = field(default_factory=dict)
    rules_hash: str | None = None  # hash of their text; None for "auto"
    data: str  # timm's name of the data set, or the name of the folder
    classes: int
    train_images: int
    test_images: int
    images_hash: str | None = None
    input_size: tuple[int, ...] | None
    augmentation: Augmentation
    mirrored: float = MIRRORED_SHARE  # share of the training images that are mirrored
    recipe: Recipe  # its seed is replaced in each run
    recipe_version: int = RECIPE_VERSION
    mixed_precision: str | None = None
    seeds: int | None = None  # number of seeds of the first call

    def comparable(self) -> dict[str, Any]:
        """Return by name what must be equal in all runs, including values of the recipe."""
        values = self.to_dict() | asdict(self.recipe)
        del values["recipe"]
        del values["format"]
        values["planning"].pop("rules", None)  # a copy of the file may have another name
        del values["data"]  # a copy of the folder may have another name
        del values["seeds"]  # later calls may have more or fewer
        return values

    def check_same(self, stored: "Settings", folder: Path) -> None:
        """Check that the runs in a folder, whose settings are `stored`, have these settings.

        Raises:
            CheckpointError: A value differs. The message names the first one.
        """
        rules = self.planning.get("rules", AUTO)
        stored_rules = stored.planning.get("rules", AUTO)
        not_recorded = None
        if stored.format < FIRST_FORMAT_WITH_IMAGES:
            not_recorded = "their images and weights"
        elif stored_rules != AUTO and stored.rules_hash is None:
            not_recorded = f"what {stored_rules} says"
        if not_recorded is not None:
            raise CheckpointError(
                f"output {folder}: holds runs of an earlier dcls-convert, "
                f"which did not record {not_recorded}; use another --output"
            )
        stored_values = stored.comparable()
        for name, value in self.comparable().items():
            stored_value = stored_values[name]
            if value == stored_value:
                continue
            difference = f"with {name.replace('_', ' ')} {stored_value}, not {value}"
            if name == "rules_hash":
                difference = f"by the rules of {stored_rules}, which are not those of {rules} now"
            elif name == "images_hash":
                difference = f"on other images than those of {self.data}"
            elif name == "weights_hash":
                difference = f"from other weights, though their name is the same, {self.weights}"
            raise CheckpointError(
                f"output {folder}: holds runs {difference}; use the same or another --output"
            )


def settings_for(
    request: ConversionRequest,
    images: ImageData,
    *,
    data: Path | None,
    dataset: str,
    planning: Mapping[str, Any],
    augmentation: Augmentation,
    mirrored: float,
    recipe: Recipe,
    mixed_precision: str | None,
    seeds: int,
) -> Settings:
    """Return the settings of a comparison. This reads the weights, to hash them.

    Args:
        request: States the network, with as many classes as the images have.
        images: Training and test images.
        data: Folder of the images.
        dataset: timm's name of the data set; "" for a folder of images.
        planning: Conversion options that differ from the defaults, by name.
        augmentation: Augmentation of the training images.
        mirrored: Share of the training images that are mirrored.
        recipe: The recipe of all runs.
        mixed_precision: accelerate's name of the precision; "no" or None for full precision.
        seeds: Number of seeds.
    """
    loaded = LoadedNetwork(request)
    source = loaded.source
    assert source is not None
    data_name = dataset
    if data is not None and not dataset:
        data_name = data.resolve().name
    hash_of_weights = None
    if request.trained:
        hash_of_weights = weights_hash(loaded.network, loaded.authors_weights)
    planning_texts = {}
    rules_hash = None
    for name, value in planning.items():
        if name == "rules":
            planning_texts[name] = Path(value.source).name
            rules_hash = value.hash
        else:
            planning_texts[name] = str(value)
    return Settings(
        model=source.name,
        model_args=dict(source.args),
        weights=_weights_name(request),
        weights_hash=hash_of_weights,
        planning=planning_texts,
        rules_hash=rules_hash,
        data=data_name,
        classes=len(images.classes),
        train_images=len(images.train),
        test_images=len(images.test),
        images_hash=images_hash(dataset, images),
        input_size=None if request.input_size is None else tuple(request.input_size),
        augmentation=augmentation,
        mirrored=mirrored,
        recipe=recipe,
        mixed_precision=None if mixed_precision == "no" else mixed_precision,
        seeds=seeds,
    )


def _weights_name(request: ConversionRequest) -> str:
    if request.pretrained:
        return "pretrained"
    if isinstance(request.weights, Path):
        return request.weights.name
    return "random"


def recipe_for(
    *,
    epochs: int,
    batch_size: int,
    lr: float | None,
    position_lr_scale: float,
    processes: int,
    trained: bool,
) -> Recipe:
    """Return the recipe of all runs.

    Args:
        epochs: Number of epochs. One in 20, and at least one, is for warm-up.
        batch_size: Images per update and process.
        lr: Learning rate; None for `default_lr`.
        position_lr_scale: Learning rate of positions, as a multiple of `lr`.
        processes: Number of processes that train together.
        trained: Whether the weights are already trained.
    """
    if lr is None:
        lr = default_lr(batch_size * processes, trained=trained)
    return Recipe(
        epochs=epochs,
        warmup_epochs=_warmup_epochs(epochs),
        batch_size=batch_size,
        lr=lr,
        position_lr_scale=position_lr_scale,
    )


def default_lr(batch_size: int, *, trained: bool) -> float:
    """Return the default learning rate for `batch_size` images per update, to two digits."""
    rate = LR * math.sqrt(batch_size / LR_BATCH)
    if trained:
        rate *= TRAINED_LR_FACTOR
    return float(f"{rate:.2g}")


def with_epochs(settings: Settings, epochs: int) -> Settings:
    """Return the settings with another number of epochs, and warm-up epochs to match."""
    recipe = replace(settings.recipe, epochs=epochs, warmup_epochs=_warmup_epochs(epochs))
    return replace(settings, recipe=recipe)


def _warmup_epochs(epochs: int) -> int:
    return max(1, epochs // EPOCHS_PER_WARMUP_EPOCH)
