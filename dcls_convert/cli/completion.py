"""What a shell completes: names of models and rule sets, and checkpoint folders. Imports neither torch nor timm."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from ..files import builtin_rules, is_checkpoint

# A function that timm's or torchvision's registry gets by its name, or by the one that the decorator states. Importing
# the registries would take seconds.
REGISTERED = re.compile(r'^@register_model(?:\((?:name="(\w+)")?\))?\n(?:[@ )].*\n)*def (\w+)\(', re.MULTILINE)
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
    """Built-in sets, and YAML files."""
    names = [name for name in ("auto", *builtin_rules()) if name.startswith(incomplete)]
    return [*names, *(str(path) for path in _entries(incomplete) if path.suffix in (".yaml", ".yml"))]


def complete_checkpoints(incomplete: str) -> list[str]:
    """Checkpoint folders; none where there are none, so that the shell goes on with its own completion of files."""
    return [str(path) for path in _entries(incomplete) if is_checkpoint(path)]


def _entries(incomplete: str) -> Iterator[Path]:
    """What begins with what was typed."""
    typed = Path(incomplete)
    folder, name = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    try:
        yield from sorted(path for path in folder.iterdir() if path.name.startswith(name))
    except OSError:
        return
