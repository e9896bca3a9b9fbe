"""Exceptions for user errors; each message is one line."""

from .text import one_line, printable

# Phrases in the out-of-memory messages of torch, C++ and the dynamic loader.
NO_MEMORY = ("allocate memory", "bad_alloc", "failed to map segment", "out of memory")


class DclsConvertError(ValueError):
    """An error that the user can act on: wrong input, or a file, model or device that fails.

    `str(error)` is one printable line: where, what was found and, if possible, what to do instead.
    """

    exit_code = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message))


class NothingMatchesError(DclsConvertError):
    """No convolution of the model matches the rules.

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
    """Weights or a checkpoint folder that cannot be read or written."""


class OutputExistsError(CheckpointError):
    """The output exists already."""

    def __init__(self, path: object) -> None:
        super().__init__(f"output {path} already exists; name another, or replace it by force")


def refuse(*conflicts: tuple[object, str]) -> None:
    """Raise a DclsConvertError with the message of the first condition that is true."""
    for condition, message in conflicts:
        if condition:
            raise DclsConvertError(message)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception says that memory is exhausted."""
    return isinstance(error, MemoryError) or any(words in one_line(error) for words in NO_MEMORY)
