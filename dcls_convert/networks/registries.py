"""Look up model names in timm and torchvision, and import these libraries."""

import importlib
import warnings
from types import ModuleType

from ..errors import ModelError
from ..text import one_line

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
    return [f"{kind}:{name}" for kind in REGISTRIES for name in sorted(registered_models(kind))]


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
