"""Exceptions for user errors, each with a one-line message, and a check of an argument's class."""

from pathlib import Path

from .text import one_line, printable, shortened

# Phrases in the out-of-memory messages of torch, C++ and the dynamic loader.
OUT_OF_MEMORY_PHRASES = ("allocate memory", "bad_alloc", "failed to map segment", "out of memory")
# Class of an argument -> what the user should give, and where to get it.
WHAT_TO_GIVE = {
    "Module": "a torch.nn.Module, such as timm.create_model(...) or load_converted(folder)",
    "Optimizer": "a torch.optim.Optimizer",
    "ConversionPlan": "a ConversionPlan, such as plan_conversion(...) or report.plan",
    "DraftPlan": "a ConversionPlan, such as plan_conversion(...) or report.plan",
    "ModelConvs": "a ModelConvs, such as find_convs(...)",
}


class DclsConvertError(ValueError):
    """An error that the user can act on: wrong input, or a file, model or device that fails.

    `str(error)` is one printable line: where, what was found and, if possible, what to do instead.
    """

    exit_code = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message))


class NothingMatchesError(DclsConvertError):
    """No convolution matches the rules, or every matching convolution must stay as it is.

    This is a normal outcome, so it has its own exit code.
    """

    exit_code = 3


class RuleError(DclsConvertError):
    """A rule set that cannot be read, or that does not fit the model."""


class PlanError(DclsConvertError):
    """Sizes, counts or a budget that the model's convolutions cannot take."""


class ModelError(DclsConvertError):
    """A model that cannot be found or built."""


class CheckpointError(DclsConvertError):
    """A weights file or a folder that cannot be read or written."""


class WriteError(CheckpointError):
    """An output that cannot be written: no space or no permission, for example."""


class OutputExistsError(CheckpointError):
    """The output exists already."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"output {path} already exists; name another, or replace it: --force, "
            "in Python force=True"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception reports that memory is exhausted."""
    return isinstance(error, MemoryError) or any(
        words in one_line(error) for words in OUT_OF_MEMORY_PHRASES
    )


def check_argument(name: str, value: object, expected: type) -> None:
    """Raise DclsConvertError unless the argument is of this class; say what to give instead."""
    if isinstance(value, expected):
        return
    found = f"a {type(value).__name__}"
    if isinstance(value, type):
        found = f"the class {value.__name__}"
    elif isinstance(value, str | Path):
        found = f"the text {shortened(repr(str(value)))}"
    give = WHAT_TO_GIVE.get(expected.__name__, f"a {expected.__name__}")
    raise DclsConvertError(f"{name}: found {found}; give {give}")
