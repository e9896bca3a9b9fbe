"""YAML to a strict, frozen rule set; which rule claims a convolution, and why none does."""

import fnmatch
import math
import re
import reprlib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from yaml.constructor import ConstructorError

from ..depthwise.geometry import size_text
from ..errors import RuleError, did_you_mean, one_line, printable, shown
from ..files import builtin_rules, read_bytes
from ..options import AUTO, INTERPOLATIONS, MOST_COUNT, MOST_SIDE, Interpolation, Kind

if TYPE_CHECKING:
    from ..networks.sites import ConvSite  # which imports torch

RULES_FORMAT = 1
AUTO_RULES = ("depthwise", "conv3x3", "dense3x3x3")  # in the order in which `auto` tries them
Positive = Annotated[int, Field(ge=1)]
MOST_BYTES = 1_000_000  # of a rule file
MOST_SHOWN = 200  # characters of a text from the file, in a message


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _has_a_value(cls, value: Any) -> Any:
        if (
            value is None
        ):  # `skip:` with nothing behind it is a slip; it does not mean the same as no `skip`
            raise PydanticCustomError("no_value", "has no value")
        return value


class Range(_Strict):
    """Integers from min to max, both included; one of the two may be left out."""

    min: Positive | None = Field(None, description="a positive integer")
    max: Positive | None = Field(None, description="a positive integer")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("a range needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    def __str__(self) -> str:
        return " and ".join(
            f"{word} {end}"
            for word, end in [("from", self.min), ("to", self.max)]
            if end is not None
        )


Side = Annotated[int, Field(ge=1, le=MOST_SIDE)]
Size = Side | Annotated[list[Side], Field(min_length=1, max_length=3)]
Globs = str | Annotated[list[str], Field(min_length=1)]


def _holds(stated: Any, value: Any) -> bool:
    """Whether a site has what a predicate states: a pattern, sizes, a number, a range or a truth
    value.
    """
    values = value if isinstance(value, tuple) else (value,)
    if isinstance(stated, Range):
        return bool((stated.min or 0) <= max(values) <= (stated.max or math.inf))
    allowed = stated if isinstance(stated, list) else [stated]
    if isinstance(allowed[0], str):
        return any(
            fnmatch.fnmatchcase(name, glob)
            for name in values
            if name is not None
            for glob in allowed
        )
    return list(values) == (stated if isinstance(stated, list) else [stated] * len(values))


_GLOB = "a pattern with * and ?, or a list of such patterns"
_SIDE = f"an integer from 1 to {MOST_SIDE}"
_NUMBER = "a positive integer, or {min: N, max: N}"
_AXES = f"{_SIDE} for all axes, or a list with one for each"


class Match(_Strict):
    """What a convolution must be for the rule to claim it; everything stated must hold."""

    path: Globs | None = Field(None, description=f"{_GLOB}, for the module's qualified name")
    stage: Globs | None = Field(
        None, description=f"{_GLOB}, for the stage's name; '*' is any stage, not the stem"
    )
    type: Globs | None = Field(None, description=f"{_GLOB}, for the class name")
    stem: bool | None = Field(
        None, description="true or false: whether it belongs to the stem, or takes the image itself"
    )
    kind: Kind | Annotated[list[Kind], Field(min_length=1)] | None = Field(
        None, description="depthwise, grouped, dense, or a list of them"
    )
    dims: Annotated[int, Field(ge=1, le=3)] | None = Field(
        None, description="1, 2 or 3 spatial dimensions"
    )
    kernel_size: Size | Range | None = Field(
        None,
        description=f"{_SIDE} for all sides, a list with one for each, "
        "or {min: N, max: N}, largest side",
    )
    stride: Size | None = Field(None, description=_AXES)
    dilation: Size | None = Field(None, description=_AXES)
    in_channels: Positive | Range | None = Field(None, description=_NUMBER)
    out_channels: Positive | Range | None = Field(None, description=_NUMBER)

    def mismatch(self, site: "ConvSite") -> str | None:
        """The first predicate that `site` fails, in words; None where all hold."""
        for name in type(self).model_fields:
            stated, value = getattr(self, name), getattr(site, "names" if name == "path" else name)
            if stated is not None and not _holds(stated, value):
                return f"{name} is {_in_words(value)}, not {_in_words(stated)}"
        return None


def _in_words(value: Any) -> str:
    """A value of a rule or a site, as a message shows it."""
    if isinstance(value, list | tuple):
        return shown(
            size_text(value) if isinstance(value[0], int) else " or ".join(map(str, value)),
            MOST_SHOWN,
        )
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return shown(str(value) or repr(value), MOST_SHOWN)


class Defaults(_Strict):
    """What holds where neither the rule nor the command line says anything."""

    dilated_size: Size | None = Field(
        None, description=f"{_SIDE} for all sides, or a list with one for each side"
    )


class Rule(Defaults):
    """The first rule whose match holds claims the convolution, and skips or replaces it."""

    kernel_count: Annotated[int, Field(ge=1, le=MOST_COUNT)] | Literal["auto"] | None = Field(
        None, description=f"an integer from 1 to {MOST_COUNT}, or auto"
    )
    interpolation: Interpolation | None = Field(None, description=" or ".join(INTERPOLATIONS))
    dense_axes: list[Annotated[int, Field(ge=0, le=2)]] | None = Field(
        None, description="a list of spatial axes (0 is the first) along which nothing is learnt"
    )
    name: str | None = Field(None, description="a text")
    match: Match = Field(
        Match(), description="a mapping of predicates; without it, the rule claims everything"
    )
    stage_pattern: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="a regular expression for module names; those in which it finds the same are one "
        "stage, which bears the name of the named group that matches, else what the groups or the "
        "whole pattern find",
    )
    skip: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a text with the reason; the convolution stays as it is"
    )

    @field_validator("stage_pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{shown(value)!r} is not a regular expression: {one_line(error)}"
            ) from error
        return value

    @model_validator(mode="after")
    def _skips_or_converts(self) -> Self:
        others = [key for key in type(self).model_fields if key not in ("name", "match", "skip")]
        stated = [key for key in others if getattr(self, key) is not None]
        if self.skip is not None and stated:
            raise ValueError(f"a rule that skips cannot also state {', '.join(stated)}")
        return self

    def stage_of(self, name: str) -> str | None:
        """The stage that `stage_pattern` gives a module; None where there is no pattern, or where
        it finds nothing.
        """
        match = re.search(self.stage_pattern, name) if self.stage_pattern else None
        if match is None:
            return None
        named = next((group for group, text in match.groupdict().items() if text is not None), None)
        return named or ".".join(filter(None, match.groups())) or match[0] or None


class RuleSet(_Strict):
    """A rule file."""

    # Not Literal[1]: to Python, True and 1.0 are 1.
    format: Annotated[int, Field(ge=RULES_FORMAT, le=RULES_FORMAT)] = Field(
        description=f"{RULES_FORMAT}, the version of this format"
    )
    description: str = Field("", description="a text")
    defaults: Defaults = Field(
        Defaults(), description="a mapping with the size for rules that state none"
    )
    rules: list[Rule] = Field(min_length=1, description="a list of at least one rule")

    _source: str = "rules"  # the file or name it was loaded from, for messages
    _text: str = ""  # the file as it was given

    @property
    def source(self) -> str:
        return self._source

    @property
    def text(self) -> str:
        return self._text or yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)

    def label(self, index: int) -> str:
        """How messages call a rule: its name, or its place."""
        return shown(self.rules[index].name or f"rules[{index}]")


def load_rules(source: str | Path | Mapping[str, Any]) -> RuleSet:
    """The rule set of that name, in that file, or as a mapping of what a file would have.

    Raises:
        RuleError: No such rule set, or anything in it that this version does not know; one line
            with the place.
    """
    if isinstance(source, Mapping):
        return parse_rules(yaml.safe_dump(dict(source), sort_keys=False))
    path = builtin_rules().get(str(source), Path(source))
    try:
        if not path.is_file():
            known = [*builtin_rules(), AUTO]
            near = did_you_mean(str(source), known)
            raise RuleError(
                f"rules {shown(source)!r} are neither a file nor one of {', '.join(known)}{near}"
            )
        text = read_bytes(path, MOST_BYTES).decode(
            "utf-8-sig"
        )  # some editors begin with a byte order mark
    except OSError as error:
        raise RuleError(
            f"rules {shown(source, MOST_SHOWN)}: cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise RuleError(f"{source}: is not a UTF-8 text: {one_line(error)}") from error
    return parse_rules(text, source=str(source))


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error, and errors of Python's own have their
    line.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise ConstructorError(
                    problem=f"key {shown(key.value)!r} stands twice", problem_mark=key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int | str):
                str(value).encode()  # ValueError of too many digits, or of half a surrogate pair
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            problem = f"{type(error).__name__}: {one_line(error)}"
            raise ConstructorError(problem=problem, problem_mark=node.start_mark) from error
        return value


def parse_rules(text: str, source: str = "rules") -> RuleSet:
    """As `load_rules`, from the YAML text itself; `source` is what messages and the plan call it."""
    source = printable(source)
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except (
        Exception
    ) as error:  # RecursionError where it is nested too deeply, ValueError of a wrong escape
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or f"{type(error).__name__}: {one_line(error)}"
        raise RuleError(f"{source}:{place} not valid YAML: {shown(problem, MOST_SHOWN)}") from error
    if not isinstance(data, dict):
        kinds = {list: "a list", str: "a text", type(None): "empty"}
        kind = kinds.get(type(data), f"of type {type(data).__name__}")
        raise RuleError(
            f"{source}: is {kind}, but must be a mapping with {', '.join(RuleSet.model_fields)}"
        )
    try:
        rules = RuleSet.model_validate(data)
    except ValidationError as error:
        raise RuleError(f"{source}: {_explain(error)}") from error
    rules._source, rules._text = source, text
    return rules


def choose_rules(sites: Sequence["ConvSite"]) -> RuleSet:
    """`auto`: the first of AUTO_RULES that claims a convolution; conv3x3 where none does."""
    candidates = [load_rules(name) for name in AUTO_RULES]
    return next((rules for rules in candidates if claim_sites(rules, sites)[0]), candidates[1])


def claim_sites(
    rules: RuleSet, sites: Sequence["ConvSite"]
) -> tuple[dict[str, int], dict[str, str]]:
    """The index of the first rule that matches, which claims a site, or why none does; both by the
    site's name.
    """
    rule_of: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for site in sites:
        misses = [rule.match.mismatch(site) for rule in rules.rules]
        if None in misses:
            rule_of[site.name] = misses.index(None)
        else:
            tried = (
                f"rule {rules.label(0)!r}: {misses[0]}"
                if len(misses) == 1
                else f"none of {len(misses)} rules"
            )
            reasons[site.name] = f"not matched ({tried})"
    return rule_of, reasons


def rules_schema() -> dict[str, Any]:
    """A JSON Schema of the rule format, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RuleSet.model_json_schema(),
    }


def _explain(error: ValidationError) -> str:
    """The first complaint of pydantic as one line: the place in the file, what was found, what is
    allowed.
    """
    # Report a misspelt key rather than the missing one; our own sentence rather than the other
    # members of a union.
    telling = {"extra_forbidden": 0, "invalid_key": 0, "value_error": 1}
    problem = min(error.errors(), key=lambda problem: telling.get(problem["type"], 2))
    unknown_key = telling.get(problem["type"]) == 0
    place, allowed = "", ""
    model: type[BaseModel] | None = RuleSet  # of what is found at the place
    for step in problem["loc"][: -1 if unknown_key else None]:
        if isinstance(step, int):
            place += f"[{step}]"
            allowed = (
                f"a mapping with {', '.join(model.model_fields)}" if model is not None else allowed
            )
        elif model is not None and step in model.model_fields:
            place += f".{step}" if place else step
            allowed, model = str(model.model_fields[step].description), _NESTED.get(step)
        else:
            break  # the name of a union's member
    if unknown_key:
        key, known = str(problem["loc"][-1]), list((model or Range).model_fields)
        where = place + ": " if place else ""
        near = did_you_mean(key, known)
        return f"{where}unknown key {shown(key)!r}{near}; known: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"top level: {place} is missing"
    if problem["type"] == "value_error":
        return f"{place}: {problem['ctx']['error']}"
    return f"{place}: found {shown(reprlib.repr(problem['input']))}; allowed is {allowed}"


_NESTED: dict[str, type[BaseModel]] = {"rules": Rule, "match": Match, "defaults": Defaults}
