"""One combination of a sweep, on its way through planning, fitting and timing."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..conversion.resolved import ResolvedRequest
from ..errors import DclsConvertError
from ..text import one_line
from .results import SweepRow

MAX_REASON = 200  # characters of an exception's message


@dataclass(slots=True)
class Candidate:
    """A combination, or the original, with its results so far."""

    row: SweepRow
    resolved: ResolvedRequest | None = None  # None for the original, or if not planned
    model: nn.Module | None = None  # only while it is timed
    forward_ms: list[float] = field(default_factory=list)  # of each round
    step_ms: list[float] = field(default_factory=list)  # of each round

    def change(self, **fields: Any) -> None:
        """Replace fields of the row."""
        self.row = replace(self.row, **fields)

    def fail(self, step: str, error: Exception) -> None:
        """Record in the row which step failed and why, and free the model."""
        message = one_line(error)[:MAX_REASON]
        if not isinstance(error, DclsConvertError):
            message = f"{type(error).__name__}: {message}"
        self.change(status="failed", reason=f"{step}: {message}")
        self.model = None

    @contextlib.contextmanager
    def recording_failure(self, step: str) -> Iterator[None]:
        """Let the candidate fail in this step if the block raises an exception."""
        try:
            yield
        except Exception as error:
            self.fail(step, error)
