"""Shell completion of model names and rule sets. Imports neither torch nor timm."""

import importlib.util
import re
from pathlib import Path

from ..input import builtin_rules

# A model function that timm or torchvision registers, under its own name or the name that its
# decorator states. Importing the registries would take seconds, so their source is read instead.
REGISTERED = re.compile(
    r'^@register_model(?:\((?:name="(\w+)")?\))?\n(?:[@ )].*\n)*def (\w+)\(', re.MULTILINE
)
COMPLETED_LIBRARIES = ("timm", "torchvision")


def registered_names(library: str) -> list[str]:
    """Return the sorted model names of timm or torchvision, read from the library's source.

    A library that is not installed has no names.
    """
    spec = importlib.util.find_spec(library)
    if spec is None:
        return []
    names = set()
    for folder in spec.submodule_search_locations or ():
        for path in Path(folder, "models").rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            for stated_name, function_name in REGISTERED.findall(text):
                names.add(stated_name or function_name)
    return sorted(names)


def complete_models(incomplete: str) -> list[str]:
    """Complete a model name of both libraries, or of one if its prefix is typed ("timm:")."""
    library, colon, name_start = incomplete.rpartition(":")
    libraries: tuple[str, ...] = COMPLETED_LIBRARIES
    if library in COMPLETED_LIBRARIES:
        libraries = (library,)
    elif library:
        return []
    names: dict[str, None] = {}  # a dict drops names that both libraries have, and keeps the order
    for name in libraries:
        names.update(dict.fromkeys(registered_names(name)))
    return [f"{library}{colon}{name}" for name in names if name.startswith(name_start)]


def complete_rules(incomplete: str) -> list[str]:
    """Complete the name of a built-in rule set; without a match, shells complete files."""
    return [name for name in ("auto", *builtin_rules()) if name.startswith(incomplete)]


def complete_files(incomplete: str) -> list[str]:
    """Return nothing, so that the shell completes files itself."""
    return []
