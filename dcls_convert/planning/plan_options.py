"""The options of a plan, as plain values. Imports no torch: the command line reads this file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ..errors import PlanError
from ..geometry import plain_numbers
from ..options import (
    AUTO,
    DEFAULT_BUDGET,
    EXACT,
    GROWTH,
    INTERPOLATION_NAMES,
    SCOPES,
    TIES,
    InterpolationName,
    Scope,
    Tie,
    check_choice,
    even_growth,
    parse_percent,
)
from ..text import shortened

if TYPE_CHECKING:
    from .rules import RuleSet


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The options of a plan.

    `convert_` and the commands that plan spell out an argument for every field, so that editors,
    type checkers and --help find them. Other functions take them as keyword arguments.
    """

    # Cells: one integer, or one for each side. Or a growth such as "+4". Or "auto", the growth that
    # `windows.recommended_size` chooses.
    dilated_size: int | Sequence[int] | str = AUTO
    kernel_count: int | Literal["auto", "exact"] = AUTO
    # "auto", a name, a file, or a mapping with the keys of a file.
    rules: "str | Path | Mapping[str, Any] | RuleSet" = AUTO
    scope: Scope = "auto"  # "auto" means "error" with images, else "model"
    tie: Tie = "stage"
    budget: float | str = DEFAULT_BUDGET  # percent of the replaced weights: 80 or "80%"
    # For rules that state no interpolation; None means DEFAULT_INTERPOLATION.
    interpolation: InterpolationName | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        """Refuse (PlanError) values that no model allows."""
        for name in ("dilated_size", "kernel_count"):
            object.__setattr__(self, name, plain_numbers(getattr(self, name)))
        _check_size(self.dilated_size)
        check_choice("scope", self.scope, SCOPES)
        check_choice("tie", self.tie, TIES)
        check_choice("interpolation", self.interpolation, (None, *INTERPOLATION_NAMES))
        count = self.kernel_count
        if count not in (AUTO, EXACT) and (type(count) is not int or count < 1):
            raise PlanError(
                f"kernel count {shortened(repr(count))} must be a positive integer, auto or exact"
            )
        changes_budget = parse_percent(self.budget) != 1
        if count != AUTO and (self.scope != AUTO or changes_budget):
            raise PlanError(
                "kernel count states the count, so budget and scope would have no effect"
            )


def _check_size(size: int | Sequence[int] | str) -> None:
    if size == AUTO:
        return
    if isinstance(size, str) and re.fullmatch(GROWTH, size):
        try:
            even_growth(size)
        except ValueError as error:
            raise PlanError(f"dilated size: {error}") from None
        return
    sides: Sequence[object] = [size]
    if isinstance(size, Sequence):
        sides = size
    if not sides or any(type(side) is not int or side < 1 for side in sides):
        raise PlanError(
            f"dilated size {shortened(repr(size))} must be a positive integer, one for each side, "
            "or a growth such as '+4'"
        )


class PlanArguments(TypedDict, total=False):
    """Keyword arguments for the fields of `PlanOptions`.

    The rules are an argument of their own, since they may be given by position.
    """

    dilated_size: int | Sequence[int] | str
    kernel_count: int | Literal["auto", "exact"]
    scope: Scope
    tie: Tie
    budget: float | str
    interpolation: InterpolationName | None
    strict: bool
