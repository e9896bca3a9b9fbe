"""Write records as JSON, and read them back.

JSON is never written with NaN or infinity. When it is read, pydantic validates it, and a mistake is
an error of one line.
"""

import functools
import json
import re
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from .errors import CheckpointError
from .input import read_bytes
from .text import one_line, shortened

# pydantic's settings for records: values must have exactly the stated types, and unknown fields are
# errors.
STRICT = ConfigDict(strict=True, extra="forbid")
_FRACTION = re.compile(r"-?\d+([./]\d+)?")  # without exponents: 1e999999999 would fill the memory


def _read_fraction(value: Any) -> Fraction:
    """Read a fraction in a record: a number, or a number as text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_text = isinstance(value, str) and _FRACTION.fullmatch(value) is not None
    if not is_number and not is_text:
        raise ValueError("is not a fraction")
    try:
        return Fraction(value)
    except (ValueError, ArithmeticError) as error:  # infinite, too many digits, or divided by 0
        raise ValueError("is not a fraction") from error


# pydantic before 2.10 does not support fractions, and some later versions let errors of Fraction
# through.
JsonFraction = Annotated[
    Fraction, PlainValidator(_read_fraction), PlainSerializer(Fraction.__str__)
]


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter for a record's class; it is created once."""
    return TypeAdapter(kind)


class Record:
    """A dataclass that can be written as JSON.

    If it has a field `format`, this field's default is the newest format version that can be read.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, as in its JSON."""
        return dict(adapter(type(self)).dump_python(self, mode="json"))  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Return the record as JSON text; raise CheckpointError if a number is not finite."""
        return write_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Self:
        """Read a record that `to_json` wrote.

        Raises:
            CheckpointError: The text is anything else. The message begins with `where`.
        """
        known_format: Any = None
        for field in fields(cls):  # type: ignore[arg-type]
            if field.name == "format":
                known_format = field.default
        stated_format = _stated_format(text)
        are_numbers = isinstance(known_format, int) and isinstance(stated_format, int)
        if are_numbers and stated_format > known_format:
            raise CheckpointError(
                f"{where}: has format {shortened(stated_format, 20)}, "
                f"but this dcls-convert reads format {known_format} at most; install a newer one"
            )
        try:
            record: Self = adapter(cls).validate_json(text)  # type: ignore[arg-type]
        except ValidationError as error:
            problem = error.errors()[0]
            message = shortened(problem["msg"], 200)
            place = ".".join(map(str, problem["loc"]))
            if place:
                message = f"{shortened(place)}: {message}"
            raise CheckpointError(f"{where}: {message}") from None  # without pydantic's lines
        return record


def _stated_format(text: str | bytes) -> Any:
    """Return the value of the key "format"; None if the text is not JSON or has no such key."""
    try:
        return json.loads(text)["format"]
    except (ValueError, RecursionError, TypeError, KeyError, IndexError):
        return None


def write_json(data: object) -> str:
    """Return plain values as JSON text.

    Raises:
        CheckpointError: A number is not finite, or JSON has no such type.
    """
    try:
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"cannot be written as JSON: {error}") from error


def read_json(path: Path, where: str) -> dict[str, object]:
    """Read the JSON object in a file.

    Raises:
        CheckpointError: The file cannot be read, or contains anything else. The message begins with
            `where`.
    """
    try:
        data = json.loads(read_bytes(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = one_line(error)
        if isinstance(error, OSError):
            reason = str(error.strerror)
        raise CheckpointError(f"{where}: cannot be read: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not JSON: {shortened(error, 200)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: is a {type(data).__name__}, not an object")
    return data


def shared_fields(record: object, kind: type) -> dict[str, Any]:
    """Return the values of `record` for those fields of the dataclass `kind` that it has too."""
    values = {}
    for field in fields(kind):
        if hasattr(record, field.name):
            values[field.name] = getattr(record, field.name)
    return values
