"""The input sizes to assume for models that state none."""

from typing import Any

from torch import nn

from ..layers.conv_classes import AnyConv
from .input_tensors import Inputs, InputTensor, image_inputs
from .source import OTHER_TIMM_KINDS, ModelSource, import_library

USUAL_INPUT_SIZE = (3, 224, 224)  # of ImageNet classifiers; for models that state no size
VIDEO_FRAMES = 16  # frames per clip of torchvision's video models


def assumed_inputs(source: ModelSource, model: nn.Module) -> Inputs | None:
    """Return the inputs to assume for a model that states none itself.

    Return None for timm models, which state theirs, and for the user's own models that are 1-D or
    3-D, which have no usual size.
    """
    is_timm = source.kind == "timm" or source.kind in OTHER_TIMM_KINDS
    if is_timm or getattr(model, "pretrained_cfg", None):
        return None
    if source.kind == "torchvision":
        return _torchvision_inputs(source.name.partition(":")[2], model)
    usual_channels, *sides = USUAL_INPUT_SIZE
    channels: list[int] = []  # input channels of each convolution
    max_dims = 0
    for module in model.modules():
        # A lazy convolution has no channels yet.
        if isinstance(module, AnyConv) and module.in_channels:
            channels.append(module.in_channels)
            max_dims = max(max_dims, len(module.kernel_size))
    if not channels:
        return image_inputs(USUAL_INPUT_SIZE)
    if max_dims != len(sides):
        return None
    if usual_channels in channels:
        return image_inputs(USUAL_INPUT_SIZE)
    return image_inputs((channels[0], *sides))


def _torchvision_inputs(name: str, model: nn.Module) -> Inputs:
    """Return images of the size that torchvision's transforms produce for this model."""
    models = import_library("torchvision.models")
    module_name = models.get_model_builder(name).__module__
    family = module_name.removeprefix(models.__name__ + ".").partition(".")[0]
    if family == "optical_flow":  # from one image to the next
        image = InputTensor(shape=(1, *USUAL_INPUT_SIZE))
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
