"""Rules as strict, frozen records: what a rule file may say, and which convolutions match."""

import fnmatch
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..geometry import Grow, size_text
from ..networks.sites import ConvSite
from ..options import (
    EVEN_GROWTH,
    GROWTH,
    INTERPOLATION_NAMES,
    MAX_COUNT,
    MAX_SIDE,
    InterpolationName,
    Kind,
    even_growth,
)
from ..text import one_line, shortened
from .paths import matches_path

RULES_FORMAT = 1
UNNAMED_RULES = "rules"  # the source of rules that come from no file
Positive = Annotated[int, Field(ge=1)]
MAX_SHOWN_CHARACTERS = 200  # of a text from the file, in a message


class _Strict(BaseModel):
    """A mapping in a rule file: no unknown keys, no key without a value, no converted types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _has_a_value(cls, value: Any) -> Any:
        # `skip:` without a value is a mistake; it does not mean the same as no `skip`.
        if value is None:
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

    def includes(self, number: int) -> bool:
        """True if the number is in the range."""
        return (self.min or 0) <= number <= (self.max or math.inf)

    def __str__(self) -> str:
        ends = []
        if self.min is not None:
            ends.append(f"from {self.min}")
        if self.max is not None:
            ends.append(f"to {self.max}")
        return " and ".join(ends)


Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Size = Side | Annotated[list[Side], Field(min_length=1, max_length=3)]
Growth = Annotated[
    str,
    # The schema refuses odd growths, too; the program's error names the nearest even ones.
    Field(pattern=f"^{GROWTH}$", json_schema_extra={"pattern": f"^{EVEN_GROWTH}$"}),
    AfterValidator(even_growth),
]
Globs = str | Annotated[list[str], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class SiteTest:
    """How a predicate tests a convolution; it stands in the predicate's type, in `Match`."""

    # Arguments: what the rule states, and the site's value.
    holds: Callable[[Any, Any], bool]
    attribute: str | None = None  # of ConvSite; None if it has the predicate's name


def _equals_or_is_in_range(stated: int | Range, number: int) -> bool:
    if isinstance(stated, Range):
        return stated.includes(number)
    return number == stated


def _sides_are(stated: int | list[int] | Range, sides: tuple[int, ...]) -> bool:
    """Compare a range with the largest side, an integer with all sides, a list with each side."""
    if isinstance(stated, Range):
        return stated.includes(max(sides))
    if isinstance(stated, int):
        return set(sides) == {stated}
    return list(sides) == stated


def _is_one_of(stated: str | list[str], word: str) -> bool:
    return word in _as_list(stated)


def _matches_a_glob(stated: str | list[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in _as_list(stated))


def _is_in_a_path(stated: str | list[str], names: tuple[str, ...]) -> bool:
    return matches_path(names, _as_list(stated))


def _as_list(stated: str | list[str]) -> list[str]:
    return [stated] if isinstance(stated, str) else stated


_GLOB = "a pattern with * and ?, or a list of such patterns"
_SIDE = f"an integer from 1 to {MAX_SIDE}"
_NUMBER = "a positive integer, or {min: N, max: N}"
_AXES = f"{_SIDE} for all axes, or a list with one for each"


class Match(_Strict):
    """What a convolution must be for the rule to claim it; everything stated must hold."""

    # Each predicate states in its type how it tests a convolution.
    path: Annotated[Globs | None, SiteTest(_is_in_a_path, "names")] = Field(
        None,
        description=f"{_GLOB}, for the module's qualified name; "
        "without * and ?, also everything inside the module of that name",
    )
    stage: Annotated[Globs | None, SiteTest(_matches_a_glob)] = Field(
        None, description=f"{_GLOB}, for the stage's name; '*' is any stage, not the stem"
    )
    type: Annotated[Globs | None, SiteTest(_matches_a_glob)] = Field(
        None, description=f"{_GLOB}, for the class name"
    )
    stem: Annotated[bool | None, SiteTest(operator.eq)] = Field(
        None, description="true or false: whether it belongs to the stem, or takes the image itself"
    )
    kind: Annotated[
        Kind | Annotated[list[Kind], Field(min_length=1)] | None, SiteTest(_is_one_of)
    ] = Field(None, description="depthwise, grouped, dense, or a list of them")
    dims: Annotated[Annotated[int, Field(ge=1, le=3)] | None, SiteTest(operator.eq)] = Field(
        None, description="1, 2 or 3 spatial dimensions"
    )
    kernel_size: Annotated[Size | Range | None, SiteTest(_sides_are)] = Field(
        None,
        description=f"{_SIDE} for all sides, a list with one for each, "
        "or {min: N, max: N} for the largest side",
    )
    stride: Annotated[Size | None, SiteTest(_sides_are)] = Field(None, description=_AXES)
    dilation: Annotated[Size | None, SiteTest(_sides_are)] = Field(None, description=_AXES)
    in_channels: Annotated[Positive | Range | None, SiteTest(_equals_or_is_in_range)] = Field(
        None, description=_NUMBER
    )
    out_channels: Annotated[Positive | Range | None, SiteTest(_equals_or_is_in_range)] = Field(
        None, description=_NUMBER
    )

    @property
    def paths(self) -> list[str]:
        """The patterns of `path`; none if it is not stated."""
        return _as_list(self.path or [])

    def mismatch(self, site: ConvSite) -> str | None:
        """Describe the first predicate that `site` fails, or return None if all hold."""
        for predicate, field in type(self).model_fields.items():
            stated = getattr(self, predicate)
            if stated is None:
                continue
            (test,) = [part for part in field.metadata if isinstance(part, SiteTest)]
            value = getattr(site, test.attribute or predicate)  # None for a site outside all stages
            if value is None or not test.holds(stated, value):
                return f"{predicate} is {_in_words(value)}, not {_in_words(stated)}"
        return None


def _in_words(value: Any) -> str:
    """Return a value of a rule or a site as a message shows it."""
    if isinstance(value, list | tuple):
        if isinstance(value[0], int):
            return shortened(size_text(value), MAX_SHOWN_CHARACTERS)
        return shortened(" or ".join(map(str, value)), MAX_SHOWN_CHARACTERS)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return shortened(str(value) or repr(value), MAX_SHOWN_CHARACTERS)


class Defaults(_Strict):
    """What applies if neither the rule nor the command line states a value."""

    dilated_size: Size | Growth | None = Field(
        None,
        description=f"{_SIDE} for all sides, a list with one for each side, "
        "or a growth: +4 is four cells more a side than the kernel's extent",
    )


class Rule(Defaults):
    # The schema shows this docstring as a description, on one line.
    """The first rule whose match holds claims the convolution: it is skipped, or replaced as the \
other keys say."""

    kernel_count: Annotated[int, Field(ge=1, le=MAX_COUNT)] | Literal["auto"] | None = Field(
        None, description=f"an integer from 1 to {MAX_COUNT}, or auto"
    )
    interpolation: InterpolationName | None = Field(
        None, description=" or ".join(INTERPOLATION_NAMES)
    )
    dense_axes: list[Annotated[int, Field(ge=0, le=2)]] | None = Field(
        None, description="a list of spatial axes (0 is the first) along which nothing is learnt"
    )
    padding: Literal["centred", "any"] | None = Field(
        None,
        description="any: also convolutions whose own padding does not centre their kernel, such "
        "as valid and causal ones; centred (the default): these stay as they are",
    )
    grow: Grow | Annotated[list[Grow], Field(min_length=1, max_length=3)] | None = Field(
        None,
        description="both, back or ahead: where the window's new cells lie, seen from the old "
        "kernel; or a list with one for each axis. By default, what was measured decides",
    )
    name: str | None = Field(None, description="a string")
    match: Match = Field(
        Match(), description="a mapping of predicates; without it, the rule claims everything"
    )
    stage_pattern: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="a regular expression for module names; modules in whose names it finds the "
        "same text are one stage, named after the named group that matches, or else after the text "
        "that the groups or the whole pattern match",
    )
    skip: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a string with the reason; the convolution stays as it is"
    )

    @field_validator("stage_pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{shortened(value)!r} is not a regular expression: {one_line(error)}"
            ) from error
        return value

    @model_validator(mode="after")
    def _skips_or_converts(self) -> Self:
        if self.grow is not None and self.padding == "any":
            raise ValueError("grow says to which sides windows grow; omit 'padding: any'")
        if self.skip is None:
            return self
        stated = []
        for key in type(self).model_fields:
            if key not in ("name", "match", "skip") and getattr(self, key) is not None:
                stated.append(key)
        if stated:
            raise ValueError(f"a rule that skips cannot also state {', '.join(stated)}")
        return self

    def stage_of(self, name: str) -> str | None:
        """Return the stage that `stage_pattern` gives a module.

        Return None if the rule has no pattern, or if it finds nothing in the module's name.
        """
        if self.stage_pattern is None:
            return None
        match = re.search(self.stage_pattern, name)
        if match is None:
            return None
        for group, text in match.groupdict().items():
            if text is not None:
                return group
        found_by_groups = ".".join(filter(None, match.groups()))
        return found_by_groups or match[0] or None


class RuleSet(_Strict):
    """A rule file."""

    # Not Literal[1]: to Python, True and 1.0 are 1.
    format: Annotated[int, Field(ge=RULES_FORMAT, le=RULES_FORMAT)] = Field(
        description=f"{RULES_FORMAT}, the version of this format"
    )
    description: str = Field("", description="a string")
    defaults: Defaults = Field(
        Defaults(), description="a mapping with the size for rules that state none"
    )
    rules: list[Rule] = Field(min_length=1, description="a list of at least one rule")

    _source: str = UNNAMED_RULES  # the file or name it was loaded from, for messages
    _text: str  # the file as it was given

    @property
    def source(self) -> str:
        """The file or name of the rules, for messages and the plan."""
        return self._source

    @property
    def text(self) -> str:
        """The rules as YAML, as they were given."""
        return self._text

    def label(self, index: int) -> str:
        """Return the name of a rule for messages: its own, or its index."""
        return shortened(self.rules[index].name or f"rules[{index}]")
