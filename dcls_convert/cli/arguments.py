"""What the commands' arguments have in common: number and size types, groups for --help, and the planning options.

`PLANNING` has an argument for each field of `PlanOptions`; `with_plan_options` gives them to a command.
"""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import DclsConvertError, shown
from ..options import AUTO, INTERPOLATIONS, Interpolation, PlanOptions, Scope, Tie
from ..planning.budget import LEAST_PERCENT, MOST_PERCENT

# Groups of options in --help.
WHAT, HOW_MANY, WHERE, OUTPUT = "What to convert", "How many elements", "Where they start", "Output"

MOST_SIDE = 9_999  # cells or pixels; a larger kernel or image is a typing mistake
MOST_COUNT = 10**9  # elements, classes or channels
MOST_SEED = 2**63 - 1  # of torch.Generator


def number(kind: type[int] | type[float], least: Any, most: int, *, word: str | None = None, **settings: Any) -> Any:
    """An option for a number in plain decimal digits, or for the one word that stands for it.

    int() and float() also take `1_000`, ` 17 `, `nan` and digits of other scripts, so typing mistakes would pass.
    """
    digits = r"[0-9]{1,19}" if kind is int else r"[0-9]{1,19}(\.[0-9]{1,19})?"
    allowed = f"{'an integer' if kind is int else 'a number'} from {least} to {most}" + (f", or {word}" if word else "")

    def parse(text: Any) -> Any:
        if word is not None and text == word:
            return word
        value = kind(str(text)) if re.fullmatch(digits, str(text)) else None
        if value is None or not least <= value <= most:
            raise typer.BadParameter(f"'{shown(text)}' is not {allowed}")
        return value

    return typer.Option(parser=parse, min=least, max=most, **settings)


def parse_size(text: str) -> int | tuple[int, ...]:
    """ "17" -> 17, "17x9" -> (17, 9)."""
    sides = _sides(text)
    if not 1 <= len(sides) <= 3:
        raise typer.BadParameter(
            f"'{shown(text)}' is not a size: give an integer from 1 to {MOST_SIDE} such as 17, or sides such as 17x9"
        )
    return sides[0] if len(sides) == 1 else sides


def parse_input_size(text: str) -> tuple[int, ...]:
    """ "3x224x224" -> (3, 224, 224)."""
    sides = _sides(text)
    if not 2 <= len(sides) <= 4:
        raise typer.BadParameter(
            f"'{shown(text)}' is not an input size: give channels and sides from 1 to {MOST_SIDE}, such as 3x224x224"
        )
    return sides


def _sides(text: str) -> tuple[int, ...]:
    """ "17x9" -> (17, 9); nothing where a part is no integer from 1 to MOST_SIDE."""
    if not re.fullmatch(r"[0-9]{1,4}(x[0-9]{1,4})*", text.lower()):
        return ()
    sides = tuple(int(side) for side in text.lower().split("x"))
    return sides if all(1 <= side <= MOST_SIDE for side in sides) else ()


class CommandGroup(TyperGroup):
    """Commands of which one may be the default. Called alone, the group shows its help."""

    default_command: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if args and self.default_command and args[0] not in own and args[0] not in self.commands:
            args = [self.default_command, *args]
        return super().parse_args(ctx, args or ["--help"])

    def get_help_option(self, ctx: Any) -> Any:
        """As in typer, but False by default: typer imports pydantic to validate None, which doubles the time."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


# What several commands take.
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder that dcls-convert wrote.")]
InputSize = Annotated[
    Any,
    typer.Option(
        metavar="CxHxW",
        parser=parse_input_size,
        rich_help_panel=OUTPUT,
        help="Image size for counting MACs; without it, the model's own.",
    ),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON object.")]
Force = Annotated[bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Replace what an earlier run wrote.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="No progress and no report, only the output's name."),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Import and run the code of your own that the checkpoint names as its model. Never for folders of others.",
    ),
]

PLANNING: dict[str, Any] = {
    "dilated_size": Annotated[
        Any,
        typer.Option(
            metavar="N|HxW",
            parser=parse_size,
            rich_help_panel=HOW_MANY,
            help="Window in which elements move: 17 or 17x9 cells. Without it, the size that the rules state.",
        ),
    ],
    "kernel_count": Annotated[
        Any,
        number(
            int,
            1,
            MOST_COUNT,
            word=AUTO,
            metavar="N|auto",
            rich_help_panel=HOW_MANY,
            help="Elements in a kernel; auto: as many as the budget admits.",
        ),
    ],
    "rules": Annotated[
        str,
        typer.Option(
            metavar="FILE|NAME|auto",
            rich_help_panel=WHAT,
            help="Rule file or built-in set; auto: depthwise convolutions, or 3x3 ones where there are none.",
        ),
    ],
    "scope": Annotated[Scope, typer.Option(rich_help_panel=HOW_MANY, help="What one count is solved for.")],
    "tie": Annotated[Tie, typer.Option(rich_help_panel=HOW_MANY, help="Which layers share their positions.")],
    "budget": Annotated[
        float,
        number(
            float,
            LEAST_PERCENT,
            MOST_PERCENT,
            metavar="PERCENT",
            rich_help_panel=HOW_MANY,
            help="Parameters for the new kernels, in percent of the weights that they replace.",
        ),
    ],
    "interpolation": Annotated[
        Interpolation | None,
        typer.Option(
            rich_help_panel=HOW_MANY, show_default=INTERPOLATIONS[0], help="How an element spreads over the cells."
        ),
    ],
    "strict": Annotated[
        bool,
        typer.Option(
            "--strict", rich_help_panel=WHAT, help="Fail where a layer cannot take the size, instead of skipping it."
        ),
    ],
}


def with_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an argument for each planning option, in the place of its parameter `options: PlanOptions`."""
    names = [field.name for field in fields(PlanOptions)]
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameter = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        if parameter.annotation is not PlanOptions:
            parameters.append(parameter)
            continue
        for field in fields(PlanOptions):
            parameters.append(
                parameter.replace(name=field.name, default=field.default, annotation=PLANNING[field.name])
            )

    @functools.wraps(command)
    def call(**given: Any) -> None:
        options = PlanOptions(**{name: given.pop(name) for name in names})
        _refuse_idle(options)
        command(options=options, **given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _refuse_idle(options: PlanOptions) -> None:
    """Refuse options that would be dropped in silence."""
    default = PlanOptions()
    if options.kernel_count != AUTO and (options.scope, options.budget) != (default.scope, default.budget):
        raise DclsConvertError("--kernel-count states the count, so --budget and --scope would have no effect")
