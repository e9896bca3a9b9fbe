"""Check the arguments of public functions, so that a wrong one is answered in one line."""

from collections.abc import Iterable
from pathlib import Path

from .errors import DclsConvertError
from .text import shortened

# The public function that makes an object of a class.
MADE_BY = {"ConversionPlan": "plan_conversion", "ModelConvs": "find_convs"}


def check_argument(name: str, value: object, kind: type) -> None:
    """Raise DclsConvertError unless the argument is of this kind; say what was found and a cure.

    Args:
        name: The argument's name.
        value: What was given.
        kind: Its class.
    """
    if isinstance(value, kind):
        return
    raise DclsConvertError(f"{name}: found {_found(value)}; give {_cure(value, kind)}")


def _found(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | Path):
        return f"the text {shortened(repr(str(value)))}"
    return f"a {type(value).__name__}"


def _cure(value: object, kind: type) -> str:
    """Say what is expected, and how to get there from what was found."""
    if isinstance(value, type) and issubclass(value, kind):
        return f"an object of it, such as {value.__name__}()"
    if isinstance(getattr(value, "plan", None), kind):
        return f"its plan, a {kind.__name__}"
    if kind.__name__ in MADE_BY:
        return f"a {kind.__name__}, from {MADE_BY[kind.__name__]}"
    if isinstance(value, str | Path):
        return (
            "a torch.nn.Module: timm.create_model makes one by its name, "
            "dcls_convert.load_converted loads a folder"
        )
    if isinstance(value, Iterable):
        return "the torch.nn.Module itself"
    return "a torch.nn.Module, such as timm.create_model(...)"
