"""Write records as JSON, and read them back.

JSON is never written with NaN or infinity. On reading, pydantic validates the JSON; a mistake is a
one-line error.
"""

import functools
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from .errors import CheckpointError
from .file_checks import read_bytes
from .text import shortened

# pydantic's settings for a record and all records in it: values must have exactly the stated types,
# and unknown fields, NaN and infinity are errors.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
# No exponent: 1e999999999 would fill the memory. No division by 0.
_FRACTION = re.compile(r"-?\d{1,1000}(\.\d{1,1000}|/[1-9]\d{0,999})?")


def _read_fraction(value: object) -> Fraction:
    """Read a number, or a number as text; raise ValueError for anything else."""
    text = str(value)
    if not _FRACTION.fullmatch(text):
        raise ValueError("is not a fraction")
    return Fraction(text)


JsonFraction = Annotated[Fraction, BeforeValidator(_read_fraction)]


@functools.cache
def adapter(record_type: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter for a record's type; it is created once."""
    return TypeAdapter(record_type)


def as_json(record: Any) -> dict[str, Any]:
    """Return a record as plain values, as in its JSON."""
    kind: Any = type(record)
    return dict(adapter(kind).dump_python(record, mode="json"))


class Record:
    """A dataclass that can be written as JSON.

    If it has a field `format`, this field comes first, and its type states the newest format
    version that can be read.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, as in its JSON."""
        return as_json(self)

    def to_json(self) -> str:
        """Return the record as JSON text; raise CheckpointError if a number is not finite."""
        return write_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Self:
        """Read a record that `to_json` wrote.

        Raises:
            CheckpointError: The text is not such a record. The message begins with `where`.
        """
        try:
            record: Self = adapter(cls).validate_json(text)  # type: ignore[arg-type]
        except ValidationError as error:
            problem = _problem_text(error)
            raise CheckpointError(f"{where}: {problem}") from None  # hide pydantic's many lines
        return record


def _problem_text(error: ValidationError) -> str:
    """Return the first problem that pydantic found, on one line."""
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"]))
    if place == "format" and problem["type"] == "less_than_equal":
        return (
            f"has format {shortened(problem['input'], 20)}, but this dcls-convert reads "
            f"format {problem['ctx']['le']} at most; install a newer one"
        )
    message = shortened(problem["msg"], 200)
    if place:
        message = f"{shortened(place)}: {message}"
    return message


def write_json(data: object) -> str:
    """Return plain values as JSON text.

    Raises:
        CheckpointError: A number is not finite, or JSON has no such type.
    """
    try:
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"cannot be written as JSON: {error}") from error


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Read the JSON object in a file.

    Parsed by json, not pydantic: pydantic refuses lone surrogates, which Python puts into file
    names that are not UTF-8.

    Raises:
        CheckpointError: The file cannot be read, or is not a JSON object. The message begins with
            `where`.
    """
    try:
        data = json.loads(read_bytes(path))
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not JSON: {shortened(error, 200)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: is a {type(data).__name__}, not an object")
    return data
