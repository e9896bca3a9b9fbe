"""What a shell completes: names of models and rule sets. Imports neither torch nor timm."""

import importlib.util
import re
from pathlib import Path

from ..input_files import builtin_rules

# A function that timm or torchvision registers, under its own name or the one that the decorator
# states. Importing the registries would take seconds, so their source is read instead.
REGISTERED = re.compile(
    r'^@register_model(?:\((?:name="(\w+)")?\))?\n(?:[@ )].*\n)*def (\w+)\(', re.MULTILINE
)
COMPLETED_LIBRARIES = ("timm", "torchvision")


def registered_names(library: str) -> list[str]:
    """Models of timm or torchvision, sorted, read from the source of the installed library.

    Returns:
        No names if the library is not installed.
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
    """Names of both libraries, or of the one whose prefix, such as "timm:", is typed already."""
    library, colon, name_start = incomplete.rpartition(":")
    libraries: tuple[str, ...] = COMPLETED_LIBRARIES
    if library in COMPLETED_LIBRARIES:
        libraries = (library,)
    elif library:
        return []
    names: dict[str, None] = {}  # in order; both libraries have models of the same name
    for name in libraries:
        names.update(dict.fromkeys(registered_names(name)))
    return [f"{library}{colon}{name}" for name in names if name.startswith(name_start)]


def complete_rules(incomplete: str) -> list[str]:
    """Built-in sets; if none begins so, shells complete files themselves."""
    return [name for name in ("auto", *builtin_rules()) if name.startswith(incomplete)]


def complete_files(incomplete: str) -> list[str]:
    """Nothing, so that shells complete files themselves."""
    return []
