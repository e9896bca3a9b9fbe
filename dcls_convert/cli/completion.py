"""What a shell completes: names of models and rule sets. Imports neither torch nor timm."""

import importlib.util
import re
from pathlib import Path

from ..files import builtin_rules

# A function that timm's or torchvision's registry gets by its name, or by the one that the decorator states. Importing
# the registries would take seconds.
REGISTERED = re.compile(
    r'^@register_model(?:\((?:name="(\w+)")?\))?\n(?:[@ )].*\n)*def (\w+)\(', re.MULTILINE
)
LIBRARIES = ("timm", "torchvision")


def registered_names(library: str) -> list[str]:
    """Models of timm or torchvision, sorted, read from the source of the installed one; nothing where there is none."""
    found = importlib.util.find_spec(library)
    folders = found.submodule_search_locations or [] if found else []
    files = [path for folder in folders for path in Path(folder, "models").rglob("*.py")]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return sorted({stated or name for text in texts for stated, name in REGISTERED.findall(text)})


def complete_models(incomplete: str) -> list[str]:
    """Names of both libraries; with their prefix where one is begun."""
    prefix, colon, part = incomplete.rpartition(":")
    libraries = [library for library in LIBRARIES if prefix in ("", library)]
    names = dict.fromkeys(name for library in libraries for name in registered_names(library))
    return [f"{prefix}{colon}{name}" for name in names if name.startswith(part)]


def complete_rules(incomplete: str) -> list[str]:
    """Built-in sets; where none begins so, shells complete files themselves."""
    return [name for name in ("auto", *builtin_rules()) if name.startswith(incomplete)]


def complete_files(incomplete: str) -> list[str]:
    """Nothing, so that shells complete files themselves."""
    return []
