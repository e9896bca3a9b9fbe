"""Records to JSON and back.

JSON that is read is checked by pydantic. It has a version and no NaN, and what does not fit is an
error of one line.
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
from .input_files import read_bytes
from .text import one_line, shown

# pydantic's settings of records: values have exactly the stated types, and no field is unknown.
STRICT = ConfigDict(strict=True, extra="forbid")
_FRACTION = re.compile(r"-?\d+([./]\d+)?")  # without exponents: 1e999999999 would fill the memory


def _read_fraction(value: Any) -> Fraction:
    """A fraction of a record: a number, or its text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_text = isinstance(value, str) and _FRACTION.fullmatch(value) is not None
    if not is_number and not is_text:
        raise ValueError("is not a fraction")
    try:
        return Fraction(value)
    except (ValueError, ArithmeticError) as error:  # infinite, too many digits, or over zero
        raise ValueError("is not a fraction") from error


# pydantic before 2.10 does not know fractions, and some later ones let their errors through.
JsonFraction = Annotated[
    Fraction, PlainValidator(_read_fraction), PlainSerializer(Fraction.__str__)
]


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """pydantic's adapter of a record's class, made once."""
    return TypeAdapter(kind)


class Record:
    """A dataclass that can be written as JSON.

    If it has a field `format`, the default of this field is the newest version that is known.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, as in its JSON."""
        return dict(adapter(type(self)).dump_python(self, mode="json"))  # type: ignore[arg-type]

    def to_json(self) -> str:
        """The record as JSON text; CheckpointError for a number that is not finite."""
        return write_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Self:
        """The record that `to_json` wrote.

        Raises:
            CheckpointError: Any other text; the message begins with `where`.
        """
        known_format: Any = None
        for field in fields(cls):  # type: ignore[arg-type]
            if field.name == "format":
                known_format = field.default
        stated_format = _stated_format(text)
        are_numbers = isinstance(known_format, int) and isinstance(stated_format, int)
        if are_numbers and stated_format > known_format:
            raise CheckpointError(
                f"{where}: has format {shown(stated_format, 20)}, "
                f"this dcls-convert knows {known_format} at most; "
                "upgrade it: pip install --upgrade dcls-convert"
            )
        try:
            record: Self = adapter(cls).validate_json(text)  # type: ignore[arg-type]
        except ValidationError as error:
            problem = error.errors()[0]
            message = shown(problem["msg"], 200)
            place = ".".join(map(str, problem["loc"]))
            if place:
                message = f"{shown(place)}: {message}"
            raise CheckpointError(f"{where}: {message}") from None  # without pydantic's lines
        return record


def _stated_format(text: str | bytes) -> Any:
    """The value of the key "format"; None if the text is not JSON or has no such key."""
    try:
        return json.loads(text)["format"]
    except (ValueError, RecursionError, TypeError, KeyError, IndexError):
        return None


def write_json(data: object) -> str:
    """Plain values as JSON text.

    Raises:
        CheckpointError: A number that is not finite, or a value that JSON does not know.
    """
    try:
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"cannot be written as JSON: {error}") from error


def read_json(path: Path, where: str) -> dict[str, object]:
    """The object in a file of JSON.

    Raises:
        CheckpointError: The file has anything else; the message begins with `where`.
    """
    try:
        data = json.loads(read_bytes(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = one_line(error)
        if isinstance(error, OSError):
            reason = str(error.strerror)
        raise CheckpointError(f"{where}: cannot be read: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not JSON: {shown(error, 200)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: is a {type(data).__name__}, not an object")
    return data


def shared_fields(record: object, kind: type) -> dict[str, Any]:
    """Those fields of the dataclass `kind` that `record` has too, with its values."""
    values = {}
    for part in fields(kind):
        if hasattr(record, part.name):
            values[part.name] = getattr(record, part.name)
    return values
