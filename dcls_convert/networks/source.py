"""Find the model that a name such as "timm:convnext_tiny" means, and whether it is safe to build.

Models of timm and torchvision run none of the user's code. If their arguments are plain values,
they open no file and use no network, either.
"""

import importlib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ModelError
from ..file_checks import WEIGHTS_SUFFIXES
from ..text import did_you_mean, one_line, shortened

REGISTRIES = ("timm", "torchvision")
# Our entry in timm's registry. It rebuilds converted models and cannot be converted itself.
TIMM_ARCHITECTURE = "dcls_convert"
INSTALL_HINT = "install matching versions together: pip install --upgrade torch torchvision timm"
OTHER_TIMM_PREFIXES = ("hf-hub", "local-dir")  # timm itself loads these
# With pretrained weights, these models must normalise their inputs a second time themselves.
INCEPTIONS = ("torchvision:googlenet", "torchvision:inception_v3")
# Sources whose models are built by a library's code; all others run the user's code.
LIBRARY_PREFIXES = (*REGISTRIES, *OTHER_TIMM_PREFIXES)
# Largest integer argument, such as a number of blocks. timm's own are up to 15,360.
MAX_ARGUMENT = 20_000
# Limits of arguments that size a single layer. timm allocates it before it reads the weights.
LARGER_LIMITS = {"num_classes": 1_000_000, "in_chans": 1_000_000}
# Start of a path, also on Windows. No name of a model or module starts like this.
PATH_START = re.compile(r"[./~\\]|[A-Za-z]:[/\\]")
# An argument whose name contains one of these words can make a factory open a file or reach the
# network.
REFUSED_WORDS = set("cfg checkpoint config dir file hub pretrained url weights".split())


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """How to build a model again."""

    # "timm:convnext_tiny", "torchvision:resnet50", "hf-hub:repo", "local-dir:folder" or
    # "package.module:factory"
    name: str
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments for the factory

    @property
    def prefix(self) -> str:
        """The part before the colon: "timm", "hf-hub", or a module of the user's."""
        return self.name.partition(":")[0]

    @property
    def is_from_registry(self) -> bool:
        """True if a registry, timm's or torchvision's, builds the model."""
        return self.prefix in REGISTRIES


def are_same_network(first: ModelSource | None, second: ModelSource | None) -> bool:
    """True if two sources build the same network, apart from how it normalises its inputs."""
    if first is None or second is None:
        return first is second
    return first.name == second.name and _network_args(first) == _network_args(second)


def _network_args(source: ModelSource) -> dict[str, Any]:
    if source.name not in INCEPTIONS:
        return source.args
    return {name: value for name, value in source.args.items() if name != "transform_input"}


def is_registered(registry: str, name: str) -> bool:
    """Return True if the registry has the model; a timm name may end in a weights tag."""
    if registry == "torchvision":
        return name in registered_models(registry)
    architecture = name.partition(".")[0]  # without the tag
    return name != TIMM_ARCHITECTURE and bool(import_library("timm").is_model(architecture))


def registered_models(registry: str) -> list[str]:
    """Return the names of the registry's models, without our own entry."""
    library = "timm" if registry == "timm" else "torchvision.models"
    module = import_library(library)
    return [name for name in module.list_models() if name != TIMM_ARCHITECTURE]


def registry_names() -> list[str]:
    """Return every model of both registries: "timm:...", then "torchvision:...", each sorted."""
    return [
        f"{registry}:{name}"
        for registry in REGISTRIES
        for name in sorted(registered_models(registry))
    ]


def import_library(name: str) -> ModuleType:
    """Import timm, torchvision or one of their modules.

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


def resolve_model(
    name: str,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> ModelSource:
    """Find the source that MODEL on the command line means. A bare name is tried in timm first.

    Args:
        name: The model.
        num_classes, in_chans: Arguments of its factory; None for the factory's defaults.
        model_kwargs: More arguments of its factory.
        pretrained: Whether the user wants the weights that its library offers.

    Raises:
        ModelError: There is no such model, or it does not take one of the options.
    """
    stated = {"num_classes": num_classes, "in_chans": in_chans}
    args = {key: value for key, value in stated.items() if value is not None}
    for key, value in (model_kwargs or {}).items():
        if key in args:
            raise ModelError(f"model kwargs: {key} is stated twice")
        args[key] = value
    prefix, colon, rest = name.partition(":")
    if prefix.endswith(".py"):
        module = prefix.removesuffix(".py").lstrip("./").replace("/", ".")
        raise ModelError(f"{name}: name the module, not its file: {module}:{rest}")
    if PATH_START.match(name):
        _explain_wrong_model(name)
    if (colon and not rest) or not name.strip():
        raise ModelError(f"model {name!r} has no name")
    if not colon or prefix in REGISTRIES:
        if colon:
            full_name = _registered_name(name, rest, (prefix,))
        else:
            full_name = _registered_name(name, name, REGISTRIES)
        if pretrained and full_name in INCEPTIONS:
            args.setdefault("transform_input", True)
        return ModelSource(name=full_name, args=args)
    if pretrained and prefix not in OTHER_TIMM_PREFIXES:
        raise ModelError(
            f"{name}: pretrained weights are for models of timm and torchvision; "
            "let the factory load its own, or give a weights file"
        )
    return ModelSource(name=name, args=args)


def _registered_name(name: str, bare_name: str, registries: Sequence[str]) -> str:
    """Return the name with the first of these registries that has it: "timm:convnext_tiny".

    Raises:
        ModelError: No registry has it. The message quotes `name`, as the user gave it.
    """
    for registry in registries:
        if is_registered(registry, bare_name):
            return f"{registry}:{bare_name}"
    _explain_wrong_model(name)
    known = [known_name for registry in registries for known_name in registered_models(registry)]
    raise ModelError(f"no model {name!r}{did_you_mean(bare_name, known, 3)}")


def _explain_wrong_model(name: str) -> None:
    """Raise ModelError if `name` looks like a folder, a weights file or a name on the hub.

    The message says how to name the model instead.
    """
    path = Path(name)
    if (path / "config.json").is_file():
        raise ModelError(
            f"{name}: is a folder, not a model's name. If dcls-convert wrote it, inspect, verify "
            "and fold take it, dcls_convert.load_converted loads it, and convert gives it a larger "
            f"window if it is not folded; a folder in timm's own format is local-dir:{name}"
        )
    if path.suffix in WEIGHTS_SUFFIXES:
        raise ModelError(f"{name}: is a weights file; name its model, and add --checkpoint {name}")
    if PATH_START.match(name):
        raise ModelError(f"{name}: is a path; a folder in timm's format is local-dir:{name}")
    if "/" in name:
        raise ModelError(f"no model {name!r}; a model on the hub is hf-hub:{name}")
    module, dot, function = name.rpartition(".")
    package = module.partition(".")[0]
    if dot and (Path(package).is_dir() or Path(f"{package}.py").is_file()):
        raise ModelError(f"no model {name!r}; a function of your own is {module}:{function}")


def check_source(source: ModelSource) -> None:
    """Check that building the source runs no user code, opens no file and uses no network.

    Raises:
        ModelError: The name is not in the registry of timm or torchvision, or an argument is not
            a harmless plain value.
    """
    prefix, _, name = source.name.partition(":")
    if prefix not in REGISTRIES or not is_registered(prefix, name):
        raise ModelError(
            f"{shortened(source.name)}: is not the name of a model of timm or torchvision. To run "
            "your own code, add --trust-code, in Python trust_code=True; or give the network itself"
        )
    _check_argument(source.args, shortened(source.name))


def _check_argument(value: Any, where: str, most: int = MAX_ARGUMENT) -> None:
    """Raise ModelError if a value, or a value nested in it, is not plain or could name a file."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str) or REFUSED_WORDS & set(name.lower().split("_")):
                raise ModelError(
                    f"{where}: argument {shortened(name)} is not allowed: "
                    "it could name a file, url or config"
                )
            inner_most = LARGER_LIMITS.get(name, MAX_ARGUMENT)
            _check_argument(inner, f"{where}: argument {shortened(name)}", inner_most)
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_argument(entry, where)
    elif isinstance(value, int) and value > most:
        raise ModelError(f"{where} is {shortened(value)}; at most {most:,} is allowed")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ModelError(f"{where} is a {type(value).__name__}, not a plain value")
