"""What a given model is: from which source it was built, and which input size it takes."""

import contextlib
from typing import Any

from torch import nn

from ..errors import ModelError
from ..layers.conv_classes import AnyConv
from .building import build_model, shapes_of
from .registries import import_library
from .source import OTHER_TIMM_KINDS, ModelSource
from .trust import check_source

USUAL_INPUT_SIZE = (3, 224, 224)  # of ImageNet's classifiers; for models that state no size
USUAL_CLASSES = 1000
VIDEO_FRAMES = 16  # frames of a clip, for torchvision's video models


def assumed_input_size(source: ModelSource, model: nn.Module) -> tuple[int, ...] | None:
    """The input size (channels, *spatial) to assume where the model itself states none.

    None for timm's models, which state theirs, and for the user's own in 1-D and 3-D, whose usual
    size is not known.
    """
    is_timm = source.kind == "timm" or source.kind in OTHER_TIMM_KINDS
    if is_timm or getattr(model, "pretrained_cfg", None):
        return None
    if source.kind == "torchvision":
        return _torchvision_input_size(source.name.partition(":")[2], model)
    usual_channels, *sides = USUAL_INPUT_SIZE
    channels: list[int] = []  # input channels of each convolution
    max_dims = 0
    for module in model.modules():
        # A lazy convolution has no channels yet.
        if isinstance(module, AnyConv) and module.in_channels:
            channels.append(module.in_channels)
            max_dims = max(max_dims, len(module.kernel_size))
    if not channels:
        return USUAL_INPUT_SIZE
    if max_dims != len(sides):
        return None
    if usual_channels in channels:
        return USUAL_INPUT_SIZE
    return (channels[0], *sides)


def _torchvision_input_size(name: str, model: nn.Module) -> tuple[int, ...]:
    """(channels, *spatial) of the images that torchvision's transforms make for this model."""
    models = import_library("torchvision.models")
    module_name = models.get_model_builder(name).__module__
    family = module_name.removeprefix(models.__name__ + ".").partition(".")[0]
    if family == "detection":  # these models scale their images themselves
        scaling: Any = model.transform
        return (3, *(scaling.fixed_size or (scaling.min_size[-1],) * 2))
    side = getattr(model, "image_size", None)
    if isinstance(side, int):  # vision transformers are built for one size
        return (3, side, side)
    weights = getattr(models.get_model_weights(name), "DEFAULT", None)  # without a download
    transforms = weights.transforms() if weights is not None else None
    size = getattr(transforms, "crop_size", None) or getattr(transforms, "resize_size", None)
    if not size:
        return USUAL_INPUT_SIZE
    sides = (size[0], size[-1])  # a single number is for both
    if family == "video":
        return (3, VIDEO_FRAMES, *sides)
    return (3, *sides)


def infer_source(model: nn.Module) -> ModelSource | None:
    """Find out from which registry, name and arguments a model was built.

    None where no registry builds a model of these names and shapes, or `check_source` refuses it.
    """
    config = getattr(model, "pretrained_cfg", None)
    stored_args = getattr(model, "_model_args", None)
    architecture = config.get("architecture") if isinstance(config, dict) else None
    if not isinstance(architecture, str) or not isinstance(stored_args, dict):
        return _torchvision_source(model)
    args = dict(stored_args)
    classes = getattr(model, "num_classes", None)  # the head may have been replaced since
    if isinstance(config, dict) and classes not in (None, config.get("num_classes")):
        args["num_classes"] = classes
    source = ModelSource(name=f"timm:{architecture}", args=args)
    try:
        check_source(source)
        rebuilt = build_model(source, device="meta")
    except ModelError:
        return None
    if shapes_of(rebuilt) != shapes_of(model):
        return None
    return source


def _torchvision_source(model: nn.Module) -> ModelSource | None:
    """The model of torchvision's registry that has the same modules with the same settings."""
    model_module = type(model).__module__
    if not model_module.startswith("torchvision.models."):
        return None
    models = import_library("torchvision.models")
    args: dict[str, Any] = {}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if linears and linears[-1].out_features != USUAL_CLASSES:
        args["num_classes"] = linears[-1].out_features
    structure = repr(model)
    for name in models.list_models():
        if models.get_model_builder(name).__module__ != model_module:
            continue
        source = ModelSource(name=f"torchvision:{name}", args=args)
        with contextlib.suppress(ModelError):
            if repr(build_model(source, device="meta")) == structure:
                return source
    return None
