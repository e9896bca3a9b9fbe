"""Build a model from a name such as "timm:convnext_tiny".

Names of timm and torchvision run no code of the user's, open no file and use no network.
"""

import contextlib
import importlib
import inspect
import itertools
import os
import socket
import sys
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from ..errors import DclsConvertError, ModelError, did_you_mean, one_line, shown
from ..records import read_json
from .running import seeded

REGISTRIES = ("timm", "torchvision")
FOREIGN_SOURCES = ("hf-hub", "local-dir")  # timm itself loads these
# Sources whose models are built by a library's code; all others run code of the user's.
LIBRARIES = (*REGISTRIES, *FOREIGN_SOURCES)
# Our entry in timm's registry. It rebuilds converted models and cannot be converted itself.
TIMM_ARCHITECTURE = "dcls_convert"
WEIGHTS_SUFFIXES = (".pth", ".pt", ".safetensors", ".bin", ".ckpt", ".tar")
# Largest integer argument: factories make lists of that length before they make any module.
MOST_ARGUMENT = 1_000_000
# Exempt from MOST_ARGUMENT: they size a single layer, and a meta tensor costs nothing.
UNBOUNDED_ARGUMENTS = ("num_classes", "in_chans")
MOST_MODULES = 4_000  # modules of a library's model; timm's largest has 1,800
INSTALL_HINT = "install matching versions together: pip install --upgrade torch torchvision timm"
# An argument whose name holds one of these words can make a factory open a file or reach the
# network.
REFUSED_WORDS = frozenset(
    {
        "cache",
        "cfg",
        "checkpoint",
        "config",
        "dir",
        "file",
        "filename",
        "folder",
        "hub",
        "overlay",
        "pretrained",
        "root",
        "source",
        "url",
        "weights",
    }
)
REFUSED_CHARACTERS = frozenset("/\\:")  # of paths and urls
# Methods with which factories fill new weights. `_MetaWeights` skips them on meta tensors.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """How to build a model again."""

    # "timm:convnext_tiny", "torchvision:resnet50", "hf-hub:repo", "local-dir:folder" or
    # "package.module:factory"
    name: str
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments for the factory

    @property
    def kind(self) -> str:
        """What stands before the colon: "timm", "hf-hub", or a module of the user's."""
        return self.name.partition(":")[0]


def check_source(source: ModelSource) -> None:
    """Check that building the source runs no foreign code, opens no file and uses no network.

    Raises:
        ModelError: The name is not in the registry of timm or torchvision, or an argument is not
            a harmless plain value.
    """
    kind, _, name = source.name.partition(":")
    if kind not in REGISTRIES or not _is_registered(kind, name):
        raise ModelError(
            f"{shown(source.name)}: is not the name of a model of timm or torchvision. "
            "To run code of your own for it, pass model=... or trust_code=True (--trust-code)"
        )
    _check_argument(source.args, shown(source.name))


def _check_argument(value: Any, where: str) -> None:
    """Refuse (ModelError) a value that is not plain, or could name a file; also inside lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str) or REFUSED_WORDS & set(name.lower().split("_")):
                raise ModelError(
                    f"{where}: argument {shown(name)} is not allowed: "
                    "it could name a file, url or config"
                )
            if name not in UNBOUNDED_ARGUMENTS or not isinstance(inner, int):
                _check_argument(inner, f"{where}: argument {shown(name)}")
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_argument(entry, where)
    elif isinstance(value, str):
        if REFUSED_CHARACTERS & set(value):
            raise ModelError(
                f"{where}: {shown(value)!r} is not allowed: it could be a path or a url"
            )
    elif isinstance(value, int) and value > MOST_ARGUMENT:
        raise ModelError(f"{where} is {shown(value)}; at most {MOST_ARGUMENT:,} is allowed")
    elif value is not None and not isinstance(value, bool | int | float):
        raise ModelError(f"{where} is a {type(value).__name__}, not a plain value")


def _is_registered(kind: str, name: str) -> bool:
    if kind == "torchvision":
        return name in _models_of(kind)
    architecture = name.partition(".")[0]  # before the tag of the weights
    return name != TIMM_ARCHITECTURE and bool(import_library("timm").is_model(architecture))


def _models_of(kind: str) -> list[str]:
    library = "timm" if kind == "timm" else "torchvision.models"
    registry = import_library(library)
    return [name for name in registry.list_models() if name != TIMM_ARCHITECTURE]


def registry_names() -> list[str]:
    """Every model of both registries: "timm:..." and then "torchvision:...", each sorted."""
    names: list[str] = []
    for kind in REGISTRIES:
        names += [f"{kind}:{name}" for name in sorted(_models_of(kind))]
    return names


def resolve_model(
    name: str,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    pretrained: bool = False,
) -> ModelSource:
    """Find what a MODEL of the command line means; a bare name is looked up in timm first.

    Raises:
        ModelError: There is no such model, or it does not take one of the options.
    """
    args: dict[str, Any] = {}
    if num_classes is not None:
        args["num_classes"] = num_classes
    if in_chans is not None:
        args["in_chans"] = in_chans
    prefix, colon, rest = name.partition(":")
    if (colon and not rest) or not name.strip():
        raise ModelError(f"model {name!r} has no name")
    if colon and prefix.endswith(".py"):
        module = prefix.removesuffix(".py").replace("/", ".")
        raise ModelError(f"{name}: name the module, not its file: {module}:{rest}")
    if colon and prefix not in REGISTRIES:
        if pretrained and prefix not in FOREIGN_SOURCES:
            raise ModelError(
                f"{name}: --pretrained is for timm and torchvision; "
                "let the factory load, or --checkpoint"
            )
        return ModelSource(name=name, args=args)
    if colon:
        source = ModelSource(name=_registered_name(name, rest, (prefix,)), args=args)
    else:
        source = ModelSource(name=_registered_name(name, name, REGISTRIES), args=args)
    if source.kind == "torchvision" and in_chans is not None:
        raise ModelError(
            f"{source.name} has a fixed number of input channels; --in-chans is for timm"
        )
    return source


def _registered_name(name: str, bare_name: str, kinds: Sequence[str]) -> str:
    """The model's name with the first of these registries that has it: "timm:convnext_tiny".

    ModelError: none has it; the message is about `name`, which is what the user gave.
    """
    for kind in kinds:
        if _is_registered(kind, bare_name):
            if kind == "timm":
                _check_timm_tag(bare_name)
            return f"{kind}:{bare_name}"
    _explain_wrong_model(name)
    known: list[str] = []
    for kind in kinds:
        known += _models_of(kind)
    raise ModelError(f"no model {name!r}{did_you_mean(bare_name, known, 3)}")


def _check_timm_tag(name: str) -> None:
    """Refuse (ModelError) "architecture.tag" where timm has no weights with this tag."""
    architecture, dot, tag = name.partition(".")
    if not dot:
        return
    tagged_names = import_library("timm").list_pretrained(f"{architecture}.*")
    tags = [tagged.partition(".")[2] for tagged in tagged_names]
    if tag not in tags:
        raise ModelError(
            f"timm:{architecture} has no weights tagged {tag!r}; tags: {', '.join(tags) or 'none'}"
        )


def _explain_wrong_model(name: str) -> None:
    """Raise a ModelError that says what `name` is instead of a model, and how to pass it.

    It may be a folder, a weights file or a name on the hub. For any other name, nothing is raised.
    """
    path = Path(name)
    if (path / "config.json").is_file():
        raise ModelError(
            f"{name}: is a folder, not a model's name. If dcls-convert wrote it, inspect, verify, "
            "fold and diff take it, and dcls_convert.load_converted loads it; "
            f"another one of timm's is local-dir:{name}"
        )
    if path.suffix in WEIGHTS_SUFFIXES:
        raise ModelError(
            f"{name}: is a file of weights; name the model, and give --checkpoint {name}"
        )
    if "/" in name:
        raise ModelError(f"no model {name!r}; one of the hub is hf-hub:{name}")


def build_model(
    source: ModelSource,
    *,
    pretrained: bool = False,
    device: str = "cpu",
    seed: int | None = 0,
    offline: bool = False,
    trust_code: bool = False,
) -> nn.Module:
    """Build the model, in the mode (training or eval) in which its factory leaves it.

    Args:
        source: What to build.
        pretrained: Load the library's pretrained weights.
        device: "cpu" or "meta". "meta" puts at least the parameters on meta; a model that cannot
            be built so is built on the CPU.
        seed: Of the random initialisation; None uses the global generators.
        offline: Download nothing; a model of the hub must be in the local cache.
        trust_code: Build sources that `check_source` refuses.

    Raises:
        DclsConvertError: The source is not trusted, or the model cannot be built.
    """
    if not trust_code:
        check_source(source)
    if source.kind == "hf-hub":
        _check_hub(source.name, offline=offline)
    if source.kind == "local-dir":
        _check_local_folder(source.name)
    with seeded(seed), warnings.catch_warnings(action="ignore"):
        if device == "meta" and not pretrained:
            meta = _build_on_meta(source)
            if meta is not None:
                return meta
        with seeded(seed):  # attempts on meta may have drawn random numbers
            model = _build(source, pretrained=pretrained)
    has_meta_parameters = any(parameter.is_meta for parameter in model.parameters())
    if has_meta_parameters and not _new_parameters_are_on_meta():
        raise ModelError(
            f"{source.name}: was built on the meta device, without weights; build it on the CPU"
        )
    return model


def _check_local_folder(name: str) -> None:
    """Refuse (ModelError) a folder whose config names no architecture of timm's."""
    path = Path(name.partition(":")[2]) / "config.json"
    if not isinstance(read_json(path, f"{name}: {path}").get("architecture"), str):
        raise ModelError(f"{name}: {path} names no architecture; it is not a config of timm")


def _build_on_meta(source: ModelSource) -> nn.Module | None:
    """Build the model with its parameters on meta; None where the factory cannot do this."""
    # First everything on meta. A factory that calculates with tensors needs real ones: then the
    # parameters alone.
    meta_strategies = (torch.device("meta"), contextlib.nullcontext())
    for strategy in meta_strategies:
        try:
            with strategy, _MetaWeights():
                return _build(source, pretrained=False)
        except _TooManyModulesError:
            raise
        except ModelError:
            continue  # an error that is not due to meta occurs again on the CPU, and is reported
    return None


def _new_parameters_are_on_meta() -> bool:
    """Whether the caller uses `torch.device("meta")` or accelerate's `init_empty_weights()`."""
    return nn.PReLU().weight.is_meta  # a module that draws no random numbers


def _build(source: ModelSource, *, pretrained: bool) -> nn.Module:
    try:
        model = _run_factory(source, pretrained=pretrained)
    except DclsConvertError:
        raise
    except SystemExit as error:
        problem = f"its factory leaves the program (SystemExit {one_line(error)[:200]})"
        raise ModelError(f"{source.name}: {problem}") from error
    except Exception as error:  # timm, torchvision, the hub and the user's code share no base
        kind_of_error = type(error).__name__
        offline_errors = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
        if pretrained and kind_of_error in offline_errors:
            raise ModelError(
                f"{source.name}: cannot download its pretrained weights; are you online?"
            ) from error
        what = "its pretrained weights cannot be loaded" if pretrained else "cannot be built"
        raise ModelError(
            f"{source.name}: {what}: {kind_of_error}: {one_line(error)[:300]}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source.name}: gives a {type(model).__name__}, not a torch.nn.Module")
    return model


def _run_factory(source: ModelSource, *, pretrained: bool) -> Any:
    """Call what builds the model, with a limit on a library's number of modules."""
    kind, _, name = source.name.partition(":")
    module_numbers = itertools.count(1)

    def count_module(*_: object) -> None:
        if next(module_numbers) > MOST_MODULES:  # for example a depth of a million
            raise _TooManyModulesError(
                f"{source.name}: its arguments ask for more than {MOST_MODULES:,} modules"
            )

    with contextlib.ExitStack() as contexts:
        if kind in LIBRARIES:
            contexts.enter_context(register_module_module_registration_hook(count_module))
        if pretrained or kind in FOREIGN_SOURCES:
            contexts.enter_context(_offline_if_unreachable())
        if kind == "torchvision":
            return _build_torchvision(name, source.args, pretrained=pretrained)
        if kind in LIBRARIES:
            name_for_timm = name if kind == "timm" else source.name
            timm = import_library("timm")
            return timm.create_model(name_for_timm, pretrained=pretrained, **source.args)
        return _build_own(source)


def _build_torchvision(name: str, args: dict[str, Any], *, pretrained: bool) -> nn.Module:
    models = import_library("torchvision.models")
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        args = {**args, "weights_backbone": None}  # by default, a backbone is downloaded
    model: nn.Module
    if pretrained and "num_classes" in args:  # torchvision refuses the two together
        with_weights = models.get_model(name, weights="DEFAULT")
        model = models.get_model(name, **args)
        _copy_all_but_the_head_(with_weights, model)
    else:
        model = models.get_model(name, weights="DEFAULT" if pretrained else None, **args)
    return model


def _copy_all_but_the_head_(pretrained: nn.Module, model: nn.Module) -> None:
    """Give `model` all pretrained tensors that have its shapes; a head of other shape stays new."""
    shapes = shapes_of(model)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in pretrained.state_dict().items():
        if shapes.get(name) == tensor.shape:
            state[name] = tensor
    model.load_state_dict(state, strict=False)
    # Pretrained Inceptions were trained on inputs that the model itself normalises again.
    if hasattr(pretrained, "transform_input"):
        model.transform_input = pretrained.transform_input


def _build_own(source: ModelSource) -> Any:
    """Import the user's module, the current folder included, and call its factory."""
    module_name, _, attribute = source.name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        near = did_you_mean(module_name, LIBRARIES)
        raise ModelError(
            f"{source.name}: module {module_name!r} cannot be imported: {one_line(error)}{near}"
        ) from error
    finally:
        sys.path.remove(here)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ModelError(f"{source.name}: module {module_name!r} has no function {attribute!r}")
    return factory(**source.args)


@contextlib.contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Inside, huggingface_hub is in offline mode if DNS cannot resolve the hub's name.

    Otherwise it would retry for a minute. A proxy resolves names itself, so nothing is checked
    behind one.
    """
    from huggingface_hub import constants

    offline_before: bool = constants.HF_HUB_OFFLINE
    try:
        if not urllib.request.getproxies():
            socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline_before


@_offline_if_unreachable()
def _check_hub(name: str, *, offline: bool) -> None:
    """Check (ModelError) that a repository of the hub has a config, or that the cache holds it.

    timm would fetch the config too, but it is called once for each device that is tried.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    timm = import_library("timm")
    repository = name.partition(":")[2]
    repository_id, _, revision = repository.partition("@")
    try:
        if not offline:
            timm.models.load_model_config_from_hf(repository)
            return
        cached = try_to_load_from_cache(repository_id, "config.json", revision=revision or None)
    except DclsConvertError:
        raise
    except Exception as error:  # of the hub, of its HTTP client, or of a config that is not JSON
        # For a missing file, huggingface_hub keeps the reason as the cause.
        reason: BaseException = error
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__:
            reason = error.__cause__
        problem = f"{type(reason).__name__}: {one_line(reason)[:300]}"
        if isinstance(reason, RepositoryNotFoundError):
            problem = (
                f"{constants.ENDPOINT} has no such repository, "
                "or it is private and there is no token for it (HF_TOKEN)"
            )
        raise ModelError(f"{name}: cannot be built: {problem}") from error
    if not isinstance(cached, str):
        raise ModelError(
            f"{name}: its config is not in the local cache, and a dry run downloads nothing"
        )


class _MetaWeights(TorchFunctionMode):
    """Makes `torch.empty` give meta tensors, and skips filling them.

    Factories make their weights with `torch.empty`; tensors that they calculate with stay real.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Without this, torch would calculate shapes in Python, one operation after another.
        if func in FILLING_METHODS and args[0].is_meta:
            return args[0]
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Of the tensors in the model's state dict, by name."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def import_library(name: str) -> ModuleType:
    """Import timm or torchvision, or a part of them.

    Raises:
        ModelError: torch and torchvision do not match, or the library is broken.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise ModelError(
            f"{name} cannot be imported: {one_line(error)[:200]}; {INSTALL_HINT}"
        ) from error
