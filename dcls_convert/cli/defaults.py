"""Defaults of options from a file: `dcls-convert.toml`, or the table `[tool.dcls-convert]` of a `pyproject.toml`.

Its keys are the options of `convert`; a table of a command's name holds those of that command.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from ..errors import DclsConvertError, did_you_mean, one_line, shown
from ..files import builtin_rules
from ..options import AUTO
from . import console

OWN_FILE, PROJECT_FILE, TABLE = "dcls-convert.toml", "pyproject.toml", "dcls-convert"
MOST_BYTES = 1 << 20
MOST_DOTS = 1000  # of a line outside its strings; what a key of many parts costs the parser grows with their square
STRING = re.compile(r""""[^"\n]*"|'[^'\n]*'""")
PATHS = {"FILE", "FOLDER", "PATH"}  # metavars of options whose values are relative to the file
# What a file that came with somebody else's project must not turn on.
NEVER = ("trust-code", "force", "help", "version", "install-completion", "show-completion")


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What a file says."""

    path: Path
    values: Mapping[str, Any]  # command -> parameter -> value as text, or True or False; groups have commands inside


def find_defaults(program: Any) -> Defaults | None:
    """The defaults of the nearest file, from the working directory up to a repository's root or the user's home.

    Args:
        program: The group of all commands.

    Raises:
        OSError: The program's own file cannot be read.
        DclsConvertError: The file is not valid, or names what is no option.
    """
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        return None
    for folder in (here, *here.parents):
        for path, table in _tables(folder):
            default = program.commands[program.default_command]
            own = {key: value for key, value in table.items() if not isinstance(value, dict)}
            inner = {key: value for key, value in table.items() if isinstance(value, dict)}
            values = _of_group(program, inner, path, "")
            given = _of_command(default, own, path, "")
            return Defaults(path=path, values={**values, default.name: {**given, **values.get(default.name, {})}})
        if folder == Path.home() or (folder / ".git").exists():
            break
    return None


def _tables(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The tables for this program in a folder, its own file first."""
    for name in (OWN_FILE, PROJECT_FILE):
        path = folder / name
        try:
            if not path.is_file():
                continue
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except OSError:
            if name == OWN_FILE and os.access(folder, os.X_OK):
                raise
            continue
        if name == PROJECT_FILE and TABLE.encode() not in data:
            continue
        table: Any = _parsed(data, path)
        for key in () if name == OWN_FILE else ("tool", TABLE):
            table = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict):
            yield path, table


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    import tomllib

    if len(data) > MOST_BYTES:
        raise DclsConvertError(f"{shown(path, 200)}: has more than {MOST_BYTES:,} bytes")
    try:
        text = data.decode("utf-8-sig")
        if any(line.count(".") > MOST_DOTS for line in STRING.sub("", text).splitlines()):
            raise ValueError(f"a key of more than {MOST_DOTS:,} parts")
        table = tomllib.loads(text)
        _check_integers(table)
    except (ValueError, RecursionError) as error:
        raise DclsConvertError(f"{shown(path, 200)}: not valid TOML: {one_line(error)[:200]}") from error
    return table


def _check_integers(value: Any) -> None:
    """Refuse (ValueError) integers beyond TOML's; Python does not even print those of many digits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer of more than 64 bits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(inner)


def _of_group(group: Any, table: Mapping[str, Any], path: Path, where: str) -> dict[str, Any]:
    found = {}
    for name, inner in table.items():
        if name not in group.commands or not isinstance(inner, dict):
            near = did_you_mean(name, group.commands)
            raise DclsConvertError(f"{shown(path, 200)}: {where}{shown(name)} is no command{near}")
        command = group.commands[name]
        read = _of_group if hasattr(command, "commands") else _of_command
        found[name] = read(command, inner, path, f"{where}{name}.")
    return found


def _of_command(command: Any, table: Mapping[str, Any], path: Path, where: str) -> dict[str, Any]:
    options = {
        name.removeprefix("--"): option
        for option in command.params
        for name in option.opts
        if option.param_type_name == "option" and name.startswith("--") and name[2:] not in NEVER
    }
    found = {}
    for key, value in table.items():
        place = f"{shown(path, 200)}: {where}{shown(key)}"
        if key in NEVER:
            raise DclsConvertError(f"{place} must be given each time, as --{key}")
        if key not in options:
            raise DclsConvertError(f"{place} is no option of {command.name}{did_you_mean(key, options)}")
        found[options[key].name] = _value(options[key], value, path.parent, place)
    return found


def _value(option: Any, value: Any, folder: Path, place: str) -> str | bool:
    if option.is_flag:
        if not isinstance(value, bool):
            raise DclsConvertError(f"{place} must be true or false, not {shown(value)}")
        return value
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise DclsConvertError(f"{place} must be a text or a number, not {shown(value)}")
    text = str(value)
    if PATHS & set((option.metavar or "").split("|")) and text not in (AUTO, *builtin_rules()):
        return os.path.relpath(folder / text)
    return text


class Command(TyperCommand):
    """A command that says which defaults of a file it takes."""

    def invoke(self, ctx: Any) -> Any:
        defaults = ctx.find_root().obj
        taken = [name for name in ctx.params if _source(ctx, name) == "DEFAULT_MAP"]
        if taken and not ctx.params.get("quiet"):
            values = ", ".join(f"{key_of(name)}={shown(ctx.default_map[name])}" for name in taken)
            console.message(f"note: defaults of {os.path.relpath(defaults.path)}: {values}", style="yellow")
        return super().invoke(ctx)


def _source(ctx: Any, name: str) -> str | None:
    """Where typer has the value of a parameter from."""
    return getattr(ctx.get_parameter_source(name), "name", None)


def key_of(parameter: str) -> str:
    """dilated_size -> dilated-size."""
    return parameter.strip("_").replace("_", "-")


def place_of(error: Any, arguments: Sequence[str], defaults: Defaults | None) -> str:
    """The file in which a value stands that the parser refuses; nothing for one of the command line."""
    option, stated = getattr(error, "param", None), getattr(getattr(error, "ctx", None), "default_map", None)
    if defaults is None or option is None or option.name not in (stated or {}):
        return ""
    given = any(argument.partition("=")[0] in option.opts for argument in arguments)
    return "" if given else f"{shown(defaults.path, 200)}: "
