"""Records to JSON and back: checked by pydantic, without NaN, and with one line for what does not fit."""

import json
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from .errors import CheckpointError, newer_format, shown

Record = TypeVar("Record")


def write_json(data: object) -> str:
    """Plain values as JSON text.

    Raises:
        CheckpointError: A number that is not finite, or a value that JSON does not know.
    """
    try:
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"cannot be written as JSON: {error}") from error


def read_json(text: str, where: str) -> dict[str, object]:
    """An object of JSON; CheckpointError for anything else, beginning with `where`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not JSON: {shown(error, 200)}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: is a {type(data).__name__}, not an object")
    return data


def read_record(adapter: TypeAdapter[Record], text: str, where: str, known_format: int) -> Record:
    """The record that was written as this JSON.

    Raises:
        CheckpointError: Not such a text, or of a newer format; begins with `where`.
    """
    stated = read_json(text, where).get("format")
    if isinstance(stated, int) and stated > known_format:
        raise CheckpointError(newer_format(where, stated, known_format))
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise CheckpointError(f"{where}: {place + ': ' if place else ''}{problem['msg']}") from error
