"""Build a model from its source, by its library or the user's factory, on the CPU or on meta."""

import contextlib
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from ..errors import DclsConvertError, ModelError
from ..records import read_json
from ..text import did_you_mean, one_line
from .registries import import_library
from .running import ignored_warnings, seeded
from .source import LIBRARY_KINDS, ModelSource
from .trust import check_source

MAX_MODULES = 4_000  # largest number of modules in a library's model; timm has up to 1,800
# Methods that factories use to fill new weights. `_MetaWeights` skips them on meta tensors.
FILLING_METHODS = {
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
    torch.Tensor.erfinv_,
    torch.Tensor.mul_,
    torch.Tensor.add_,
    torch.Tensor.clamp_,
    torch.Tensor.fill_,
    torch.Tensor.zero_,
}


class _TooManyModulesError(ModelError):
    """The arguments ask for too many modules; building on another device would not help."""


def build_model(
    source: ModelSource,
    *,
    pretrained: bool = False,
    device: str = "cpu",
    seed: int | None = 0,
    offline: bool = False,
    trust_code: bool = False,
) -> nn.Module:
    """Build the model, and leave it in the mode (training or eval) that its factory set.

    Args:
        source: What to build.
        pretrained: Load the library's pretrained weights.
        device: "cpu" or "meta". "meta" puts at least the parameters on meta; a model that cannot
            be built that way is built on the CPU.
        seed: Seed for the random initialisation; None uses the global generators.
        offline: Download nothing; a model from the hub must be in the local cache.
        trust_code: Build sources that `check_source` refuses.

    Raises:
        DclsConvertError: The source is not trusted, or the model cannot be built.
    """
    if not trust_code:
        check_source(source)
    if source.kind == "hf-hub":
        _check_hub_config(source.name, offline=offline)
    if source.kind == "local-dir":
        _check_local_folder(source.name)
    with seeded(seed), ignored_warnings:
        if device == "meta" and not pretrained:
            meta_model = _build_on_meta(source)
            if meta_model is not None:
                return meta_model
        with seeded(seed):  # attempts on meta may have drawn random numbers
            model = _build(source, pretrained=pretrained)
    has_meta_parameters = any(parameter.is_meta for parameter in model.parameters())
    if has_meta_parameters and not _new_parameters_are_on_meta():
        raise ModelError(
            f"{source.name}: was built on the meta device, without weights; build it on the CPU"
        )
    return model


def _check_hub_config(name: str, *, offline: bool) -> None:
    """Raise ModelError if the hub (if `offline`, the local cache) has no config of the repository.

    timm would fetch it itself, but `build_model` may call timm several times, and each call would
    have to fail first.
    """
    from huggingface_hub import try_to_load_from_cache

    repository = name.partition(":")[2]
    if offline:
        repository_id, _, revision = repository.partition("@")
        cached = try_to_load_from_cache(repository_id, "config.json", revision=revision or None)
        if not isinstance(cached, str):
            raise ModelError(
                f"{name}: its config is not in the local cache, and a dry run downloads nothing"
            )
        return
    try:
        import_library("timm.models").load_model_config_from_hf(repository)
    except DclsConvertError:
        raise
    except Exception as error:  # from the hub, its HTTP client, or a config that is not JSON
        raise ModelError(
            f"{name}: cannot be built: {type(error).__name__}: {one_line(error)[:300]}"
        ) from error


def _check_local_folder(name: str) -> None:
    """Raise ModelError if the folder's config.json does not name an architecture."""
    path = Path(name.partition(":")[2]) / "config.json"
    if not isinstance(read_json(path, f"{name}: {path}").get("architecture"), str):
        raise ModelError(f"{name}: {path} names no architecture; it is not a config of timm")


def _build_on_meta(source: ModelSource) -> nn.Module | None:
    """Build the model with its parameters on meta, or return None if its factory cannot do this."""
    # First put every tensor on meta. If the factory calculates with tensors, it needs real ones:
    # then put only the parameters on meta.
    meta_strategies = (torch.device("meta"), contextlib.nullcontext())
    for strategy in meta_strategies:
        try:
            with strategy, _MetaWeights():
                return _build(source, pretrained=False)
        except _TooManyModulesError:
            raise
        except ModelError:
            continue  # an error that is not due to meta occurs again on the CPU and is raised there
    return None


def _new_parameters_are_on_meta() -> bool:
    """Return True inside `torch.device("meta")` or accelerate's `init_empty_weights()`."""
    return nn.PReLU().weight.is_meta  # PReLU draws no random numbers


def _build(source: ModelSource, *, pretrained: bool) -> nn.Module:
    """Run the factory; any error of its own becomes a ModelError on one line."""
    try:
        model = _run_factory(source, pretrained=pretrained)
    except DclsConvertError:
        raise
    except SystemExit as error:
        problem = f"its factory exits the program (SystemExit {one_line(error)[:200]})"
        raise ModelError(f"{source.name}: {problem}") from error
    except Exception as error:  # timm, torchvision, the hub and the user's code can raise anything
        kind_of_error = type(error).__name__
        offline_errors = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
        if pretrained and kind_of_error in offline_errors:
            raise ModelError(
                f"{source.name}: cannot download its pretrained weights; are you online?"
            ) from error
        problem = "its pretrained weights cannot be loaded" if pretrained else "cannot be built"
        raise ModelError(
            f"{source.name}: {problem}: {kind_of_error}: {one_line(error)[:300]}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source.name}: returns a {type(model).__name__}, not a torch.nn.Module")
    return model


def _run_factory(source: ModelSource, *, pretrained: bool) -> Any:
    """Call the library or the user's factory; a library may make at most MAX_MODULES modules."""
    kind, _, name = source.name.partition(":")
    module_numbers = itertools.count(1)

    def count_module(*_: object) -> None:
        if next(module_numbers) > MAX_MODULES:  # for example a depth of a million
            raise _TooManyModulesError(
                f"{source.name}: its arguments ask for more than {MAX_MODULES:,} modules"
            )

    with contextlib.ExitStack() as contexts:
        if kind in LIBRARY_KINDS:
            contexts.enter_context(register_module_module_registration_hook(count_module))
        if kind == "torchvision":
            return _build_torchvision(name, source.args, pretrained=pretrained)
        if kind in LIBRARY_KINDS:
            name_for_timm = name if kind == "timm" else source.name
            timm = import_library("timm")
            return timm.create_model(name_for_timm, pretrained=pretrained, **source.args)
        return _call_users_factory(source)


def _build_torchvision(name: str, args: dict[str, Any], *, pretrained: bool) -> nn.Module:
    models = import_library("torchvision.models")
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        args = {**args, "weights_backbone": None}  # by default, a backbone is downloaded
    model: nn.Module = models.get_model(name, **args)
    if not pretrained:
        return model
    # torchvision refuses weights together with num_classes. With weights, some models have other
    # modules, such as a second head for training or frozen BatchNorms; the folder of a converted
    # model could not tell which. So the weights are copied into the model that is built without.
    with_weights: nn.Module = models.get_model(name, weights="DEFAULT")
    if repr(with_weights) == repr(model):
        return with_weights
    _copy_what_fits_(with_weights, model)
    return model


def _copy_what_fits_(pretrained: nn.Module, model: nn.Module) -> None:
    """Copy the pretrained tensors that fit into `model`; a head of another shape stays new."""
    shapes = shapes_of(model)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in pretrained.state_dict().items():
        if shapes.get(name) == tensor.shape:
            state[name] = tensor
    model.load_state_dict(state, strict=False)
    # Pretrained Inceptions expect that the model itself normalises its inputs a second time.
    if hasattr(pretrained, "transform_input"):
        model.transform_input = pretrained.transform_input


def _call_users_factory(source: ModelSource) -> Any:
    """Import the user's module, which may be in the current folder, and call its factory."""
    module_name, _, attribute = source.name.partition(":")
    current_folder = os.getcwd()
    sys.path.insert(0, current_folder)
    try:
        factory = _import_factory(source.name, module_name, attribute)
        return factory(**source.args)  # may import other files of the folder
    finally:
        sys.path.remove(current_folder)


def _import_factory(name: str, module_name: str, attribute: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        suggestion = did_you_mean(module_name, LIBRARY_KINDS)
        raise ModelError(
            f"{name}: module {module_name!r} cannot be imported: {one_line(error)}{suggestion}"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ModelError(f"{name}: module {module_name!r} has no function {attribute!r}")
    return cast(Callable[..., Any], factory)


class _MetaWeights(TorchFunctionMode):
    """Make `torch.empty` return meta tensors, and skip filling them.

    Factories create their weights with `torch.empty`; tensors that they calculate with stay real.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Skipped for speed: on meta, torch would compute each operation's shape in Python.
        if func in FILLING_METHODS and args[0].is_meta:
            return args[0]
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each tensor in the model's state dict, by name."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
