"""Build a model from its source, by its library or the user's factory, on the CPU or on meta."""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import DclsConvertError, ModelError
from ..running.process_settings import ignored_warnings, seeded
from ..text import did_you_mean, one_line
from .source import LIBRARY_PREFIXES, ModelSource, check_source, import_library


def build_model(
    source: ModelSource,
    *,
    pretrained: bool = False,
    device: str = "cpu",
    seed: int | None = 0,
    offline: bool = False,
    trust_code: bool = False,
) -> nn.Module:
    """Build the model, in the mode (training or eval) that its factory sets.

    Args:
        source: What to build.
        pretrained: Load the library's pretrained weights.
        device: "cpu", or "meta" for a library's model without its pretrained weights. A model that
            cannot be built on meta is built on the CPU.
        seed: Seed for the random initialisation; None uses the global generators.
        offline: Download nothing; a model from the hub must be in the local cache.
        trust_code: Build sources that `check_source` refuses.

    Raises:
        DclsConvertError: The source is not trusted, or the model cannot be built.
    """
    if not trust_code:
        check_source(source)
    model = None
    with seeded(seed), ignored_warnings(), _errors_on_one_line(source.name, pretrained=pretrained):
        if offline and source.prefix == "hf-hub":
            _check_cached(source.name)
        factory = _factory(source, pretrained=pretrained)
        if device == "meta":
            model = _build_on_meta(factory)
        if model is None:
            with seeded(seed):  # again: the import and the attempt on meta may draw random numbers
                model = factory()
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source.name}: returns a {type(model).__name__}, not a torch.nn.Module")
    is_users_code = source.prefix not in LIBRARY_PREFIXES
    if is_users_code and any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"{source.name}: was built on the meta device, without weights; build it on the CPU"
        )
    return model


def _check_cached(name: str) -> None:
    """Raise ModelError if the local cache has no config of the hub's repository."""
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = name.partition(":")[2].partition("@")
    cached = try_to_load_from_cache(repository, "config.json", revision=revision or None)
    if not isinstance(cached, str):
        raise ModelError(
            f"{name}: its config is not in the local cache, and a dry run downloads nothing"
        )


@contextlib.contextmanager
def _errors_on_one_line(name: str, *, pretrained: bool) -> Iterator[None]:
    """Turn whatever timm, torchvision, the hub or the user's code raises into a ModelError."""
    try:
        yield
    except DclsConvertError:
        raise
    except SystemExit as error:
        problem = f"its factory exits the program (SystemExit {one_line(error)[:200]})"
        raise ModelError(f"{name}: {problem}") from error
    except Exception as error:
        kind_of_error = type(error).__name__
        problem = "its pretrained weights cannot be loaded" if pretrained else "cannot be built"
        problem += f": {kind_of_error}: {one_line(error)[:300]}"
        if kind_of_error in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
            missing = "pretrained weights" if pretrained else "config"
            problem = f"cannot download its {missing}; are you online?"
        if isinstance(error, KeyError) and error.args == ("architecture",):
            problem = "its config.json names no architecture; it is not a config of timm"
        raise ModelError(f"{name}: {problem}") from error


def _build_on_meta(factory: Callable[[], Any]) -> Any:
    """Build a library's model on meta, or return None if its factory needs values.

    torchvision's RegNets need them: they calculate their widths with tensors.
    """
    try:
        with torch.device("meta"):
            return factory()
    except OSError:  # a file or the hub failed; trying again could take long
        raise
    except Exception:  # an error with another cause than meta occurs again on the CPU
        return None


def _factory(source: ModelSource, *, pretrained: bool) -> Callable[[], Any]:
    """Return a function that builds the model; import its library or the user's module."""
    prefix, _, name = source.name.partition(":")
    if prefix == "torchvision":
        return partial(_build_torchvision, name, source.args, pretrained=pretrained)
    if prefix in LIBRARY_PREFIXES:
        name_for_timm = name if prefix == "timm" else source.name
        create_model = import_library("timm").create_model
        return partial(create_model, name_for_timm, pretrained=pretrained, **source.args)
    return _users_factory(source)


def _build_torchvision(name: str, args: dict[str, Any], *, pretrained: bool) -> nn.Module:
    models = import_library("torchvision.models")
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        args = {**args, "weights_backbone": None}  # by default, a backbone is downloaded
    model: nn.Module = models.get_model(name, **args)
    if not pretrained:
        return model
    # Build the model without weights, and copy them into it. torchvision refuses weights together
    # with num_classes. If it loads weights itself, some models get other modules, such as a second
    # head for training or frozen BatchNorms, and the folder of a converted model could not say
    # which. A head of another shape keeps its random values.
    shapes = shapes_of(model)
    state = models.get_model(name, weights="DEFAULT").state_dict()
    for key, tensor in list(state.items()):
        if shapes.get(key) != tensor.shape:
            del state[key]
    model.load_state_dict(state, strict=False)
    return model


def _users_factory(source: ModelSource) -> Callable[[], Any]:
    """Import the user's module, which may be in the current folder, and return its factory."""
    module_name, _, attribute = source.name.partition(":")
    try:
        with _importable_current_folder():
            module = importlib.import_module(module_name)
    except ImportError as error:
        suggestion = did_you_mean(module_name, LIBRARY_PREFIXES)
        raise ModelError(
            f"{source.name}: module {module_name!r} cannot be imported: "
            f"{one_line(error)}{suggestion}"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ModelError(f"{source.name}: module {module_name!r} has no function {attribute!r}")

    def build() -> Any:
        with _importable_current_folder():  # the factory may import other files of the folder
            return factory(**source.args)

    return build


@contextlib.contextmanager
def _importable_current_folder() -> Iterator[None]:
    """Let the block import modules in the current folder."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each tensor in the model's state dict, by name."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
