"""The options of a plan, as plain values. Imports no torch: the command line reads this file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..geometry import plain_numbers
from ..options import AUTO, DEFAULT_BUDGET, InterpolationName, Scope, Tie

if TYPE_CHECKING:
    from .rules import RuleSet


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The options of a plan.

    Each public planning function, and each command that plans, spells out an argument for every
    field, so that editors, type checkers and --help find them.
    """

    # Cells: one integer, or one for each side. Or a growth such as "+4". Or "auto", the largest
    # growth with windows of at most MAX_WINDOW that adds at most MAX_ADDED_COST_PERCENT to MACs.
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
        for name in ("dilated_size", "kernel_count"):
            object.__setattr__(self, name, plain_numbers(getattr(self, name)))
