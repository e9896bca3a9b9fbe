"""Check that it is safe to build a model that a file names.

Models of timm and torchvision run none of the user's code. With plain values as arguments, they
open no file and use no network, either.
"""

from typing import Any

from ..errors import ModelError
from ..text import shortened
from .registries import REGISTRIES, is_registered
from .source import ModelSource

# Largest integer argument, such as a number of blocks. timm's own are up to 15,360.
MAX_ARGUMENT = 20_000
# Exempt from MAX_ARGUMENT: they size a single layer, and a meta tensor costs nothing.
UNBOUNDED_ARGUMENTS = ("num_classes", "in_chans")
# An argument whose name contains one of these words can make a factory open a file or reach the
# network.
REFUSED_WORDS = set("cfg checkpoint config dir file hub pretrained url weights".split())


def check_source(source: ModelSource) -> None:
    """Check that building the source runs no user code, opens no file and uses no network.

    Raises:
        ModelError: The name is not in the registry of timm or torchvision, or an argument is not
            a harmless plain value.
    """
    kind, _, name = source.name.partition(":")
    if kind not in REGISTRIES or not is_registered(kind, name):
        raise ModelError(
            f"{shortened(source.name)}: is not the name of a model of timm or torchvision. To run "
            "your own code, add --trust-code, in Python trust_code=True; or give the network itself"
        )
    _check_argument(source.args, shortened(source.name))


def _check_argument(value: Any, where: str) -> None:
    """Raise ModelError if a value, or one nested in it, is not plain or could name a file."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str) or REFUSED_WORDS & set(name.lower().split("_")):
                raise ModelError(
                    f"{where}: argument {shortened(name)} is not allowed: "
                    "it could name a file, url or config"
                )
            if name not in UNBOUNDED_ARGUMENTS or not isinstance(inner, int):
                _check_argument(inner, f"{where}: argument {shortened(name)}")
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_argument(entry, where)
    elif isinstance(value, int) and value > MAX_ARGUMENT:
        raise ModelError(f"{where} is {shortened(value)}; at most {MAX_ARGUMENT:,} is allowed")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ModelError(f"{where} is a {type(value).__name__}, not a plain value")
