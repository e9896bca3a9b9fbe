"""Records to JSON and back: checked by pydantic, versioned, without NaN, and with one line for what
does not fit.
"""

import functools
import json
import re
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from .errors import CheckpointError, one_line, shown
from .files import read_bytes

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
Ratio = Annotated[Fraction, PlainValidator(_read_fraction), PlainSerializer(Fraction.__str__)]


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """pydantic's adapter of a record's class, made once."""
    return TypeAdapter(kind)


class Record:
    """A dataclass that can be written as JSON; its field `format`, if it has one, states the
    version by its default.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return dict(adapter(type(self)).dump_python(self, mode="json"))  # type: ignore[arg-type]

    def to_json(self) -> str:
        return write_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Self:
        """The record that `to_json` wrote; CheckpointError for any other text, beginning with
        `where`.
        """
        formats = [field.default for field in fields(cls) if field.name == "format"]  # type: ignore[arg-type]
        known: Any = formats[0] if formats else None
        try:
            stated = json.loads(text)["format"]
        except (ValueError, RecursionError, TypeError, KeyError, IndexError):
            stated = None
        if isinstance(known, int) and isinstance(stated, int) and stated > known:
            raise CheckpointError(
                f"{where}: has format {shown(stated, 20)}, this dcls-convert knows {known} at "
                "most; "
                "upgrade it: pip install --upgrade dcls-convert"
            )
        try:
            record: Self = adapter(cls).validate_json(text)  # type: ignore[arg-type]
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            place = f"{shown(place)}: " if place else ""
            raise CheckpointError(f"{where}: {place}{shown(problem['msg'], 200)}") from error
        return record


def write_json(data: object) -> str:
    """Plain values as JSON text; CheckpointError for a number that is not finite, or what JSON does
    not know.
    """
    try:
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"cannot be written as JSON: {error}") from error


def read_json(path: Path, where: str) -> dict[str, object]:
    """The object in a file of JSON; CheckpointError for anything else, beginning with `where`."""
    try:
        data = json.loads(read_bytes(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise CheckpointError(f"{where}: cannot be read: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not JSON: {shown(error, 200)}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: is a {type(data).__name__}, not an object")
    return data
