"""Look up model names in timm and torchvision, and import these libraries."""

import importlib
import warnings
from collections.abc import Sequence
from types import ModuleType

from ..errors import ModelError
from ..text import did_you_mean, one_line

REGISTRIES = ("timm", "torchvision")
# Our entry in timm's registry. It rebuilds converted models and cannot be converted itself.
TIMM_ARCHITECTURE = "dcls_convert"
INSTALL_HINT = "install matching versions together: pip install --upgrade torch torchvision timm"


def is_registered(kind: str, name: str) -> bool:
    """Return True if the registry has the model; a timm name may end in a weights tag."""
    if kind == "torchvision":
        return name in registered_models(kind)
    architecture = name.partition(".")[0]  # without the tag
    return name != TIMM_ARCHITECTURE and bool(import_library("timm").is_model(architecture))


def registered_models(kind: str) -> list[str]:
    """Return the names of the registry's models, without our own entry."""
    library = "timm" if kind == "timm" else "torchvision.models"
    registry = import_library(library)
    return [name for name in registry.list_models() if name != TIMM_ARCHITECTURE]


def registry_names() -> list[str]:
    """Return every model of both registries: "timm:...", then "torchvision:...", each sorted."""
    names: list[str] = []
    for kind in REGISTRIES:
        names += [f"{kind}:{name}" for name in sorted(registered_models(kind))]
    return names


def unknown_model(name: str, bare_name: str, kinds: Sequence[str]) -> ModelError:
    """Return an error that suggests the models of these registries with the most similar names.

    `name` is what the user gave; `bare_name` is the name without the registry.
    """
    known: list[str] = []
    for kind in kinds:
        known += registered_models(kind)
    return ModelError(f"no model {name!r}{did_you_mean(bare_name, known, 3)}")


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
