"""Infer the source that a given model was built from, and the input size that it takes."""

import contextlib
import re
from typing import Any

from torch import nn

from ..errors import ModelError
from ..geometry import plain_numbers
from ..layers.conv_classes import AnyConv
from .building import build_model, shapes_of
from .input_tensors import Inputs, InputTensor, image_inputs
from .registries import import_library
from .source import OTHER_TIMM_KINDS, ModelSource
from .trust import check_source

USUAL_INPUT_SIZE = (3, 224, 224)  # of ImageNet classifiers; for models that state no size
USUAL_CLASSES = 1000  # of ImageNet
VIDEO_FRAMES = 16  # frames per clip of torchvision's video models
# torchvision's Inceptions with trained weights normalise their inputs a second time.
TRANSFORM_INPUT = "transform_input"
INCEPTIONS = ("torchvision:googlenet", "torchvision:inception_v3")


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


def infer_source(model: nn.Module) -> ModelSource | None:
    """Infer the registry, name and arguments that a model was built with.

    Return None if no registry builds the same model, because it was edited for example, or if
    `check_source` refuses it.
    """
    config = getattr(model, "pretrained_cfg", None)
    stored_args = getattr(model, "_model_args", None)
    if not isinstance(config, dict) or not isinstance(stored_args, dict):
        return _torchvision_source(model)
    architecture = config.get("architecture")
    if not isinstance(architecture, str):
        return _torchvision_source(model)
    args = {name: plain_numbers(value) for name, value in stored_args.items()}
    # The head may have been replaced since.
    num_classes = plain_numbers(getattr(model, "num_classes", None))
    if num_classes not in (None, config.get("num_classes")):
        args["num_classes"] = num_classes
    # A model with a tag, or from a hub, may have other classes and channels than timm's default.
    stated_args = dict(args)
    if num_classes is not None:
        stated_args.setdefault("num_classes", num_classes)
    if config.get("input_size"):
        stated_args.setdefault("in_chans", plain_numbers(config["input_size"][0]))
    for candidate_args in (args, stated_args):
        source = ModelSource(name=f"timm:{architecture}", args=candidate_args)
        with contextlib.suppress(ModelError):
            check_source(source)
            rebuilt = build_model(source, device="meta")
            if shapes_of(rebuilt) == shapes_of(model):
                return source if _structure(rebuilt) == _structure(model) else None
    return None


# Settings in the text of a module that do not change what a trained model computes: kinds of
# BatchNorm and what follows eps, rates of dropout, and whether an activation works in place.
BATCH_NORM_SETTINGS = re.compile(r"(?:Sync|Frozen)?(BatchNorm)\w*\((\d+, eps=[^,()\n]*)[^()\n]*")
TRAINING_SETTINGS = re.compile(r"(?:, )?\b(?:p|drop_prob|inplace)=[^,)]*")


def _structure(model: nn.Module) -> str:
    """Return the text of the model's modules, equal for models that compute the same."""
    text = BATCH_NORM_SETTINGS.sub(r"\1(\2", repr(model))
    return TRAINING_SETTINGS.sub("", text)


def _torchvision_source(model: nn.Module) -> ModelSource | None:
    """Return the torchvision model that has the same modules with the same settings, or None."""
    model_module = type(model).__module__
    if not model_module.startswith("torchvision.models."):
        return None
    models = import_library("torchvision.models")
    args: dict[str, Any] = {}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if linears and linears[-1].out_features != USUAL_CLASSES:
        args["num_classes"] = plain_numbers(linears[-1].out_features)
    if getattr(model, TRANSFORM_INPUT, False):
        args[TRANSFORM_INPUT] = True
    structure = repr(model)
    for name in models.list_models():
        if models.get_model_builder(name).__module__ != model_module:
            continue
        source = ModelSource(name=f"torchvision:{name}", args=args)
        with contextlib.suppress(ModelError):
            if repr(build_model(source, device="meta")) == structure:
                return source
    return None
