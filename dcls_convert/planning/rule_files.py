"""Read rule files in YAML, report a mistake in one line, and make the JSON Schema."""

import reprlib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from yaml.constructor import ConstructorError
from yaml.representer import RepresenterError

from ..errors import RuleError
from ..file_checks import builtin_rules, read_bytes
from ..options import AUTO
from ..text import did_you_mean, one_line, printable, shortened
from .rules import MAX_SHOWN_CHARACTERS, UNNAMED_RULES, Defaults, Match, Range, Rule, RuleSet

MAX_RULE_BYTES = 1_000_000
STRING_TAG = "tag:yaml.org,2002:str"  # YAML's tag of strings
# The error with the lowest rank is reported, of all that pydantic finds: a misspelt key before the
# key that is then missing, and a message of our own before errors of other members of a union.
_UNKNOWN_KEY_RANK = 0
_RANK = {"extra_forbidden": _UNKNOWN_KEY_RANK, "invalid_key": _UNKNOWN_KEY_RANK, "value_error": 1}
_OTHER_RANK = 2
_NESTED: dict[str, type[BaseModel]] = {"rules": Rule, "match": Match, "defaults": Defaults}


def load_rules(source: str | Path | Mapping[str, Any]) -> RuleSet:
    """Load a rule set.

    Args:
        source: The name of a rule set that comes with the package, the path of a file, or a mapping
            with the keys of a file.

    Raises:
        RuleError: There is no such rule set, or it has something that this version does not know.
            The message is one line with the place.
    """
    if isinstance(source, Mapping):
        return parse_rules(_as_yaml(source))
    if not isinstance(source, str | Path):
        raise RuleError(
            f"rules: found a {type(source).__name__}; "
            "give the name of a rule set, a file, or a mapping with the keys of a file"
        )
    path = builtin_rules().get(str(source), Path(source))
    try:
        if source == AUTO and not path.exists():
            raise RuleError(
                f"rules {AUTO!r} are one of the built-in sets, chosen for a model; "
                f"name one: {', '.join(builtin_rules())}"
            )
        if not path.is_file():
            known = [*builtin_rules(), AUTO]
            suggestion = did_you_mean(str(source), known)
            raise RuleError(
                f"rules {shortened(source)!r} are neither a file "
                f"nor one of {', '.join(known)}{suggestion}"
            )
        # With "sig": some editors begin a file with a byte order mark.
        text = read_bytes(path, MAX_RULE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise RuleError(
            f"rules {shortened(source, MAX_SHOWN_CHARACTERS)}: cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise RuleError(f"{source}: is not a UTF-8 text: {one_line(error)}") from None
    return parse_rules(text, source=str(source))


def _as_yaml(rules: Mapping[str, Any]) -> str:
    try:
        return yaml.safe_dump(dict(rules), sort_keys=False)
    except RepresenterError as error:
        value = error.args[1]
        raise RuleError(
            f"rules: found {shortened(repr(value))} of type {type(value).__name__}; "
            "allowed are strings, numbers, booleans, lists and mappings"
        ) from None


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Make a mapping as SafeLoader does, but refuse duplicate keys and keep growths as text."""
        keys: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in keys:
                raise ConstructorError(
                    problem=f"duplicate key {shortened(key.value)!r}", problem_mark=key.start_mark
                )
            keys.add(key.value)
            if key.value == "dilated_size":
                _tag_growths_as_strings_(value)
        return super().construct_mapping(node, deep)


def _tag_growths_as_strings_(size: yaml.Node) -> None:
    """Tag growths as strings, also in a list of sides: YAML would read +4 as the integer 4.

    Sides with a leading 0 are tagged, too: YAML would read them as octal numbers. As strings, they
    are refused.
    """
    sides = size.value if isinstance(size, yaml.SequenceNode) else [size]
    for side in sides:
        if isinstance(side, yaml.ScalarNode) and side.value.startswith(("+", "0")):
            side.tag = STRING_TAG


def parse_rules(text: str, source: str = UNNAMED_RULES) -> RuleSet:
    """Return the rule set in a YAML text.

    Args:
        text: What a rule file contains.
        source: The file or name of the rules, for messages and the plan.

    Raises:
        RuleError: The text has something that this version does not know. The message is one line
            with the place.
    """
    source = printable(source)
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    # Deep nesting raises RecursionError, a wrong escape sequence ValueError.
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        place = ""
        if mark:
            place = f" line {mark.line + 1}:"
        problem = getattr(error, "problem", None) or f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, RecursionError):
            problem = "nested too deeply"
        message = f"{source}:{place} not valid YAML: {shortened(problem, MAX_SHOWN_CHARACTERS)}"
        raise RuleError(message) from None  # the message says it all
    if not isinstance(data, dict):
        nouns = {list: "a list", str: "a string", type(None): "empty"}
        found = nouns.get(type(data), f"of type {type(data).__name__}")
        keys = ", ".join(RuleSet.model_fields)
        raise RuleError(f"{source}: is {found}, but must be a mapping with {keys}")
    try:
        rules = RuleSet.model_validate(data)
    except ValidationError as error:
        raise RuleError(f"{source}: {_problem_to_report(error)}") from None
    rules._source = source
    rules._text = text
    return rules


def rules_schema() -> dict[str, Any]:
    """Return a JSON Schema of the rule format, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RuleSet.model_json_schema(),
    }


def _problem_to_report(error: ValidationError) -> str:
    """Say on one line where the file is wrong, what was found and what is allowed."""
    problem = min(error.errors(), key=lambda found: _RANK.get(found["type"], _OTHER_RANK))
    location = problem["loc"]
    if _RANK.get(problem["type"]) == _UNKNOWN_KEY_RANK:
        place, _, model = _describe(location[:-1])
        if model is None:  # inside a predicate, where the only mappings are ranges
            model = Range
        key = str(location[-1])
        known = list(model.model_fields)
        suggestion = did_you_mean(key, known)
        complaint = f"unknown key {shortened(key)!r}{suggestion}; known: {', '.join(known)}"
        if place:
            complaint = f"{place}: {complaint}"
        return complaint
    place, allowed, _ = _describe(location)
    if problem["type"] == "missing":
        return f"top level: {place} is missing"
    if problem["type"] == "value_error":
        return f"{place}: {problem['ctx']['error']}"
    found = shortened(reprlib.repr(problem["input"]))
    if problem["type"] == "string_type":
        found += " (if it is a string, quote it)"  # YAML reads 1.10 as the number 1.1
    return f"{place}: found {found}; allowed is {allowed}"


def _describe(location: Sequence[int | str]) -> tuple[str, str, type[BaseModel] | None]:
    """Return, for a location from pydantic: its text, the allowed values, and the model there."""
    place = ""
    allowed = ""
    model: type[BaseModel] | None = RuleSet
    for step in location:
        if isinstance(step, int):
            place += f"[{step}]"
            if model is not None:
                allowed = f"a mapping with {', '.join(model.model_fields)}"
        elif model is not None and step in model.model_fields:
            if place:
                place += "."
            place += step
            allowed = str(model.model_fields[step].description)
            model = _NESTED.get(step)
        else:
            break  # what follows is the name of a union's member, which pydantic adds
    return place, allowed, model
