"""Build a model from a name such as "timm:convnext_tiny", and say which run no code, open no file, use no network."""

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from ..errors import DclsConvertError, ModelError, did_you_mean, one_line, shown
from ..layers.conv_classes import AnyConv
from ..records import read_json
from .running import seeded

REGISTRIES = ("timm", "torchvision")
FOREIGN_SOURCES = ("hf-hub", "local-dir")  # timm itself loads these
LIBRARIES = (
    *REGISTRIES,
    *FOREIGN_SOURCES,
)  # whose code builds the model; all others are the user's own
TIMM_ARCHITECTURE = "dcls_convert"  # our entry in timm's registry; it rebuilds converted models and cannot be converted
WEIGHTS_SUFFIXES = (".pth", ".pt", ".safetensors", ".bin", ".ckpt", ".tar")
USUAL_INPUT_SIZE = (3, 224, 224)  # of ImageNet's classifiers; for models that state no size
USUAL_CLASSES = 1000
VIDEO_FRAMES = 16  # frames of a clip, for torchvision's video models
MOST_ARGUMENT = (
    1_000_000  # of an integer; factories make lists of as many values before they make any module
)
NOT_LISTED = ("num_classes", "in_chans")  # one layer each, which costs nothing on meta
MOST_MODULES = 4_000  # of a registry's network, by its arguments; timm's largest has 1,800
INSTALL_HINT = "install matching versions together: pip install --upgrade torch torchvision timm"
# An argument whose name holds one of these words can make a factory open a file or reach the network.
REFUSED_WORDS = frozenset(
    "cache cfg checkpoint config dir file filename folder hub overlay pretrained root source url weights".split()
)
REFUSED_CHARACTERS = frozenset("/\\:")  # of paths and urls
FILLING = {
    getattr(torch.Tensor, f"{name}_")
    for name in "uniform normal erfinv mul add clamp fill zero".split()
}


class _EndlessError(ModelError):
    """A network has too many modules, however it is built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """How to build a model again."""

    # "timm:convnext_tiny", "torchvision:resnet50", "hf-hub:repo", "local-dir:folder" or "package.module:factory"
    name: str
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments for the factory

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


def check_source(source: ModelSource) -> None:
    """Refuse (ModelError) all but models of timm and torchvision by exact names, with arguments that are harmless."""
    kind, _, name = source.name.partition(":")
    if kind not in REGISTRIES or not _is_registered(kind, name):
        raise ModelError(
            f"{shown(source.name)}: is not the name of a model of timm or torchvision. To run code of your own for it, "
            "pass model=... or trust_code=True (--trust-code)"
        )
    _check_value(source.args, shown(source.name))


def _check_value(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str) or REFUSED_WORDS & set(name.lower().split("_")):
                raise ModelError(
                    f"{where}: argument {shown(name)} is not allowed: it could name a file, url or config"
                )
            if name not in NOT_LISTED or not isinstance(inner, int):
                _check_value(inner, f"{where}: argument {shown(name)}")
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_value(entry, where)
    elif isinstance(value, str):
        if REFUSED_CHARACTERS & set(value):
            raise ModelError(
                f"{where}: {shown(value)!r} is not allowed: it could be a path or a url"
            )
    elif isinstance(value, int) and value > MOST_ARGUMENT:
        raise ModelError(f"{where} is {shown(value)}; {MOST_ARGUMENT:,} is the most")
    elif value is not None and not isinstance(value, bool | int | float):
        raise ModelError(f"{where} is a {type(value).__name__}, not a plain value")


def _is_registered(kind: str, name: str) -> bool:
    if kind == "torchvision":
        return name in _models_of(kind)
    return name != TIMM_ARCHITECTURE and bool(_import("timm").is_model(name.partition(".")[0]))


def _models_of(kind: str) -> list[str]:
    registry = _import("timm") if kind == "timm" else _import("torchvision.models")
    return [name for name in registry.list_models() if name != TIMM_ARCHITECTURE]


def registry_names() -> list[str]:
    """Every model of both registries: "timm:..." and then "torchvision:...", each sorted."""
    return [f"{kind}:{name}" for kind in REGISTRIES for name in sorted(_models_of(kind))]


def resolve_model(
    name: str,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    pretrained: bool = False,
) -> ModelSource:
    """What a MODEL of the command line means: timm first, then torchvision; ModelError for no model, or its options."""
    stated = {"num_classes": num_classes, "in_chans": in_chans}
    args = {key: value for key, value in stated.items() if value is not None}
    prefix, colon, rest = name.partition(":")
    if (colon and not rest) or not name.strip():
        raise ModelError(f"model {name!r} has no name")
    if colon and prefix.endswith(".py"):
        module = prefix.removesuffix(".py").replace("/", ".")
        raise ModelError(f"{name}: name the module, not its file: {module}:{rest}")
    if colon and prefix not in REGISTRIES:
        if pretrained and prefix not in FOREIGN_SOURCES:
            raise ModelError(
                f"{name}: --pretrained is for timm and torchvision; let the factory load, or --checkpoint"
            )
        return ModelSource(name=name, args=args)
    bare, kinds = (rest, (prefix,)) if colon else (name, REGISTRIES)
    kind = next((kind for kind in kinds if _is_registered(kind, bare)), None)
    if kind is None:
        _check_mistaken(name)
        known = [other for kind in kinds for other in _models_of(kind)]
        raise ModelError(f"no model {name!r}{did_you_mean(bare, known, 3)}")
    source = ModelSource(name=f"{kind}:{bare}", args=args)
    architecture, dot, tag = bare.partition(".")
    if kind == "timm" and dot:
        tags = [
            known.partition(".")[2]
            for known in _import("timm").list_pretrained(f"{architecture}.*")
        ]
        if tag not in tags:
            raise ModelError(
                f"timm:{architecture} has no weights tagged {tag!r}; tags: {', '.join(tags) or 'none'}"
            )
    elif kind == "torchvision" and in_chans is not None:
        raise ModelError(
            f"{source.name} has a fixed number of input channels; --in-chans is for timm"
        )
    return source


def _check_mistaken(name: str) -> None:
    """Refuse (ModelError) what is no name of a model, with what it is and how it is to be given."""
    path = Path(name)
    if (path / "config.json").is_file():
        raise ModelError(
            f"{name}: is a folder, not a model's name. If dcls-convert wrote it, inspect, verify, fold and diff take "
            f"it, and dcls_convert.load_converted loads it; another one of timm's is local-dir:{name}"
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
    """Build the model, in the mode (training or eval) that its factory leaves it in; DclsConvertError where it cannot.

    On "meta", at least the weights are there, or else all is on the CPU. Without a seed, global generators are used.
    """
    if not trust_code:
        check_source(source)
    if source.kind == "hf-hub":
        _check_hub(source.name, offline=offline)
    if source.kind == "local-dir":
        path = Path(source.name.partition(":")[2]) / "config.json"
        if not isinstance(read_json(path, f"{source.name}: {path}").get("architecture"), str):
            raise ModelError(
                f"{source.name}: {path} names no architecture; it is not a config of timm"
            )
    with seeded(seed), warnings.catch_warnings(action="ignore"):
        # All on meta; or where the factory calculates with tensors, the weights alone.
        ways = (
            (torch.device("meta"), contextlib.nullcontext())
            if device == "meta" and not pretrained
            else ()
        )
        for way in ways:
            try:
                with way, _MetaWeights():
                    return _build(source, pretrained=False)
            except _EndlessError:
                raise
            except (
                ModelError
            ):  # if not due to the way of building, it is repeated, and reported, on the CPU
                pass
        with seeded(seed):
            model = _build(source, pretrained=pretrained)
    if not _new_parameters_are_on_meta() and any(
        parameter.is_meta for parameter in model.parameters()
    ):
        raise ModelError(
            f"{source.name}: was built on the meta device, without weights; build it on the CPU"
        )
    return model


def _new_parameters_are_on_meta() -> bool:
    """Whether the caller is inside `torch.device("meta")` or accelerate's `init_empty_weights()`."""
    return nn.PReLU().weight.is_meta  # a module that draws no random numbers


def _build(source: ModelSource, *, pretrained: bool) -> nn.Module:
    kind, _, name = source.name.partition(":")
    count = itertools.count(1)

    def refuse_endless(*_: object) -> None:
        """A depth of a million, for example."""
        if next(count) > MOST_MODULES:
            raise _EndlessError(
                f"{source.name}: its arguments ask for more than {MOST_MODULES:,} modules"
            )

    bound = (
        register_module_module_registration_hook(refuse_endless)
        if kind in LIBRARIES
        else contextlib.nullcontext()
    )
    try:
        with (
            bound,
            _without_retries()
            if pretrained or kind in FOREIGN_SOURCES
            else contextlib.nullcontext(),
        ):
            if kind == "torchvision":
                models, args = _import("torchvision.models"), source.args
                if (
                    "weights_backbone"
                    in inspect.signature(models.get_model_builder(name)).parameters
                ):
                    args = {
                        **args,
                        "weights_backbone": None,
                    }  # torchvision downloads a backbone by default
                if pretrained and "num_classes" in args:  # torchvision refuses it
                    model = _with_another_head(
                        models.get_model(name, weights="DEFAULT"), models.get_model(name, **args)
                    )
                else:
                    model = models.get_model(
                        name, weights="DEFAULT" if pretrained else None, **args
                    )
            elif kind == "timm" or kind in FOREIGN_SOURCES:
                target = name if kind == "timm" else source.name
                model = _import("timm").create_model(target, pretrained=pretrained, **source.args)
            else:
                model = _build_own(source)
    except DclsConvertError:
        raise
    except SystemExit as error:
        problem = f"its factory leaves the program (SystemExit {one_line(error)[:200]})"
        raise ModelError(f"{source.name}: {problem}") from error
    except (
        Exception
    ) as error:  # what timm, torchvision, the hub or the user's factory raise has no common base
        if pretrained and type(error).__name__ in (
            "LocalEntryNotFoundError",
            "OfflineModeIsEnabled",
        ):
            raise ModelError(
                f"{source.name}: cannot download its pretrained weights; are you online?"
            ) from error
        what = "its pretrained weights cannot be loaded" if pretrained else "cannot be built"
        raise ModelError(
            f"{source.name}: {what}: {type(error).__name__}: {one_line(error)[:300]}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source.name}: gives a {type(model).__name__}, not a torch.nn.Module")
    return model


def _with_another_head(pretrained: nn.Module, model: nn.Module) -> nn.Module:
    """The model with the other one's weights but for its classifier, which starts afresh as timm's do."""
    own = shapes_of(model)
    state = {
        name: tensor
        for name, tensor in pretrained.state_dict().items()
        if own.get(name) == tensor.shape
    }
    model.load_state_dict(state, strict=False)
    if hasattr(pretrained, "transform_input"):  # of Inceptions, as their weights need it
        model.transform_input = pretrained.transform_input
    return model


def _build_own(source: ModelSource) -> Any:
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
def _without_retries() -> Iterator[None]:
    """Where the hub's name is not known to the network, its client looks into its cache alone, and does not try again.

    Behind a proxy, that knows the name.
    """
    from huggingface_hub import constants

    before: bool = constants.HF_HUB_OFFLINE
    try:
        if not urllib.request.getproxies():
            socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@_without_retries()
def _check_hub(name: str, *, offline: bool) -> None:
    """Fetch a repository's config, or find it in the cache. timm would too, but is called again for other devices."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    timm, repository = _import("timm"), name.partition(":")[2]
    id_, _, revision = repository.partition("@")
    try:
        if not offline:
            timm.models.load_model_config_from_hf(repository)
        elif not isinstance(
            try_to_load_from_cache(id_, "config.json", revision=revision or None), str
        ):
            raise ModelError(
                f"{name}: its config is not in the local cache, and a dry run downloads nothing"
            )
    except DclsConvertError:
        raise
    except Exception as error:  # the hub's, of its HTTP client, or of a config that is no JSON
        # The hub's client gives the reason for a file that it lacks as a cause.
        cause = (
            error.__cause__
            if isinstance(error, LocalEntryNotFoundError) and error.__cause__
            else error
        )
        problem = f"{type(cause).__name__}: {one_line(cause)[:300]}"
        if isinstance(cause, RepositoryNotFoundError):
            problem = f"{constants.ENDPOINT} has no such repository, or it is private and there is no token for it (HF_TOKEN)"
        raise ModelError(f"{name}: cannot be built: {problem}") from error


class _MetaWeights(TorchFunctionMode):
    """`torch.empty`, which makes weights, gives meta tensors, never filled; what a factory calculates is real."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (
            func in FILLING and args[0].is_meta
        ):  # torch would calculate shapes in Python, operation by operation
            return args[0]
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def stated_input_size(source: ModelSource, model: nn.Module) -> tuple[int, ...] | None:
    """(channels, *spatial); None for timm's models, which state it themselves, and the user's own in 1-D and 3-D."""
    if (
        source.kind == "timm"
        or source.kind in FOREIGN_SOURCES
        or getattr(model, "pretrained_cfg", None)
    ):
        return None
    if source.kind == "torchvision":
        models, name = _import("torchvision.models"), source.name.partition(":")[2]
        family = (
            models.get_model_builder(name)
            .__module__.removeprefix(models.__name__ + ".")
            .partition(".")[0]
        )
        if family == "detection":  # these scale their images: take the size that they scale to
            scaling: Any = model.transform
            return (3, *(scaling.fixed_size or (scaling.min_size[-1],) * 2))
        if isinstance(
            side := getattr(model, "image_size", None), int
        ):  # transformers are built for one size
            return (3, side, side)
        weights = getattr(
            models.get_model_weights(name), "DEFAULT", None
        )  # they are not downloaded
        transforms = weights.transforms() if weights is not None else None
        stated = getattr(transforms, "crop_size", None) or getattr(transforms, "resize_size", None)
        if not stated:
            return USUAL_INPUT_SIZE
        frames = (VIDEO_FRAMES,) if family == "video" else ()
        return (3, *frames, *(stated * 2)[:2])  # one number stands for both sides
    convs = [
        module for module in model.modules() if isinstance(module, AnyConv) and module.in_channels
    ]
    usual, *sides = USUAL_INPUT_SIZE
    if max((len(conv.kernel_size) for conv in convs), default=len(sides)) != len(sides):
        return None
    channels = [conv.in_channels for conv in convs]
    return (usual if usual in channels or not channels else channels[0], *sides)


def known_source(model: nn.Module) -> ModelSource | None:
    """How timm or torchvision builds a model with these names and shapes, if `check_source` allows it; or None."""
    config, arguments = getattr(model, "pretrained_cfg", None), getattr(model, "_model_args", None)
    architecture = config.get("architecture") if isinstance(config, dict) else None
    if not isinstance(architecture, str) or not isinstance(arguments, dict):
        return _of_torchvision(model)
    args, classes = (
        dict(arguments),
        getattr(model, "num_classes", None),
    )  # of a head that may be another one by now
    if isinstance(config, dict) and classes not in (None, config.get("num_classes")):
        args["num_classes"] = classes
    source = ModelSource(name=f"timm:{architecture}", args=args)
    try:
        check_source(source)
        built = build_model(source, device="meta")
    except ModelError:
        return None
    return source if shapes_of(built) == shapes_of(model) else None


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Of the tensors in the model's state dict, by name."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _of_torchvision(model: nn.Module) -> ModelSource | None:
    """The model of torchvision's registry that is built of the same modules, with the same settings."""
    if not type(model).__module__.startswith("torchvision.models."):
        return None
    models, same = _import("torchvision.models"), repr(model)
    heads = [module.out_features for module in model.modules() if isinstance(module, nn.Linear)]
    args = {"num_classes": heads[-1]} if heads and heads[-1] != USUAL_CLASSES else {}
    for name in models.list_models():
        if models.get_model_builder(name).__module__ == type(model).__module__:
            source = ModelSource(name=f"torchvision:{name}", args=args)
            with contextlib.suppress(ModelError):
                if repr(build_model(source, device="meta")) == same:
                    return source
    return None


def _import(name: str) -> ModuleType:
    """timm or torchvision; ModelError where torch and torchvision do not match."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise ModelError(
            f"{name} cannot be imported: {one_line(error)[:200]}; {INSTALL_HINT}"
        ) from error
