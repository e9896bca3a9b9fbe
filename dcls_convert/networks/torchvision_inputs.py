"""Input sizes for torchvision's models, which do not state their own."""

from typing import Any

from torch import nn

from ..running.input_spec import InputSpec, TensorSpec, image_inputs
from .source import ModelSource, import_library

USUAL_INPUT_SIZE = (3, 224, 224)  # of ImageNet classifiers; assumed where no size is stated
VIDEO_FRAMES = 16  # frames per clip of torchvision's video models


def assumed_inputs(source: ModelSource, model: nn.Module) -> InputSpec | None:
    """Return the inputs of a torchvision model; None for any other model.

    The inputs are images of the size that torchvision's transforms produce for this model. timm's
    models state their size themselves. For a network of the user's own, the user states the inputs.
    """
    if source.prefix != "torchvision":
        return None
    name = source.name.partition(":")[2]
    models = import_library("torchvision.models")
    module_name = models.get_model_builder(name).__module__
    family = module_name.removeprefix(models.__name__ + ".").partition(".")[0]
    if family == "optical_flow":  # these models take two images
        image = TensorSpec(shape=(1, *USUAL_INPUT_SIZE))
        return (image, image)
    return image_inputs(_torchvision_input_size(models, family, name, model))


def _torchvision_input_size(
    models: Any, family: str, name: str, model: nn.Module
) -> tuple[int, ...]:
    """Return (channels, *spatial) of the images for a torchvision model of a family."""
    if family == "detection":  # these models scale their images themselves
        scaling: Any = model.transform
        shorter_side = scaling.min_size[-1]
        return (3, *(scaling.fixed_size or (shorter_side, shorter_side)))
    side = getattr(model, "image_size", None)
    if isinstance(side, int):  # vision transformers are built for one size
        return (3, side, side)
    weights = getattr(models.get_model_weights(name), "DEFAULT", None)  # without a download
    transforms = weights.transforms() if weights is not None else None
    size = getattr(transforms, "crop_size", None) or getattr(transforms, "resize_size", None)
    if not size:
        return USUAL_INPUT_SIZE
    sides = (size[0], size[-1])  # a single number is for both sides
    if family == "video":
        return (3, VIDEO_FRAMES, *sides)
    return (3, *sides)
