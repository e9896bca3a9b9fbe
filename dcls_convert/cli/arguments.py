"""What the commands' arguments have in common: number and size types, groups for --help, and the planning options.

`PLANNING` has an argument for each field of `PlanOptions`; `with_plan_options` gives them to a command.
"""

import functools
import inspect
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import DclsConvertError, shown
from ..files import check_images, check_weights_file
from ..options import (
    AUTO,
    DEFAULT_BUDGET,
    ERROR,
    INTERPOLATIONS,
    MOST_COUNT,
    MOST_SIDE,
    PLAN_PARAMETERS,
    Interpolation,
    PlanOptions,
    Scope,
    Tie,
)
from ..planning.budget import LEAST_PERCENT, MOST_PERCENT
from .completion import complete_checkpoints, complete_models, complete_rules

# Groups of options in --help.
WHAT, HOW_MANY, WHERE, OUTPUT = "What to convert", "How many elements", "Where they start", "Output"

MOST_SEED = 2**63 - 1  # of torch.Generator


def option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """An option in one of the groups of --help; a flag needs its name, or it would get a --no- form."""
    return typer.Option(*names, rich_help_panel=panel, help=help, **settings)


def number(
    kind: type[int] | type[float],
    least: Any,
    most: int,
    panel: str,
    help: str,
    *,
    word: str = "",
    unit: str = "",
    **settings: Any,
) -> Any:
    """An option for a number in plain decimal digits, with or without its unit, or for the one word that stands for it.

    int() and float() also take `1_000`, ` 17 `, `nan` and digits of other scripts, so typing mistakes would pass.
    """
    digits = r"[0-9]{1,19}" if kind is int else r"[0-9]{1,19}(\.[0-9]{1,19})?"
    allowed = f"{'an integer' if kind is int else 'a number'} from {least} to {most}{word and f', or {word}'}"

    def parse(text: Any) -> Any:
        if word and text == word:
            return word
        written = str(text).removesuffix(unit)
        value = kind(written) if re.fullmatch(digits, written) else None
        if value is None or not least <= value <= most:
            raise typer.BadParameter(f"'{shown(text)}' is not {allowed}")
        return value

    return option(panel, help, parser=parse, min=least, max=most, **settings)


def _sides(text: str, counts: range, what: str) -> tuple[int, ...]:
    """ "17x9" -> (17, 9)."""
    sides = tuple(map(int, text.lower().split("x"))) if re.fullmatch(r"[0-9]{1,4}(x[0-9]{1,4})*", text.lower()) else ()
    if len(sides) not in counts or 0 in sides:
        raise typer.BadParameter(f"'{shown(text)}' is not {what}")
    return sides


def parse_size(text: str) -> int | tuple[int, ...]:
    """ "17" -> 17, "17x9" -> (17, 9)."""
    what = f"a size: give an integer from 1 to {MOST_SIDE} such as 17, or sides such as 17x9"
    sides = _sides(text, range(1, 4), what)
    return sides if len(sides) > 1 else sides[0]


def parse_input_size(text: str) -> tuple[int, ...]:
    """ "3x224x224" -> (3, 224, 224)."""
    what = f"an input size: give channels and sides from 1 to {MOST_SIDE}, such as 3x224x224"
    return _sides(text, range(2, 5), what)


class CommandGroup(TyperGroup):
    """Commands of which one may be the default. Called alone, the group shows its help."""

    default_command: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if args and self.default_command and args[0] not in own and args[0] not in self.commands:
            args = [self.default_command, *args]
        return super().parse_args(ctx, args or ["--help"])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Commands and options, and those of the default command; names of models are many, so not for nothing."""
        found = super().shell_complete(ctx, incomplete)
        if self.default_command and incomplete:
            default = self.commands[self.default_command]
            part: Any = default if incomplete.startswith("-") else default.params[0]
            known = {item.value for item in found}
            found += [item for item in part.shell_complete(ctx, incomplete) if item.value not in known]
        return found

    def get_help_option(self, ctx: Any) -> Any:
        """As in typer, but False by default: typer imports pydantic to validate None, which doubles the time."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


# What several commands take.
def checkpoint_argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete_checkpoints)


def image_size(panel: str, help: str) -> Any:
    """An option for the size of images."""
    return option(panel, help, metavar="CxHxW", parser=parse_input_size)


Checkpoint = Annotated[Path, checkpoint_argument("CHECKPOINT", "A folder that dcls-convert wrote.")]
InputSize = Annotated[Any, image_size(OUTPUT, "Image size for counting MACs; without it, the model's own.")]
Json = Annotated[bool, option(OUTPUT, "Print one JSON object.", "--json")]
Force = Annotated[bool, option(OUTPUT, "Replace what an earlier run wrote.", "--force")]
Quiet = Annotated[bool, option(OUTPUT, "No progress and no report, only the output's name.", "--quiet", "-q")]
TRUST = "Import and run the code of your own that the checkpoint names as its model. Never for folders of others."
TrustCode = Annotated[bool, typer.Option("--trust-code", help=TRUST)]

# The network to convert.
MODEL_HELP = (
    "convnext_tiny (timm first, then torchvision), timm:NAME, torchvision:NAME, hf-hub:REPO, local-dir:FOLDER, or "
    "package.module:factory, which imports and runs your own code."
)
WEIGHTS_HELP = "Start from the weights in a safetensors or torch file, also one of DCLS's authors."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_models)]
Pretrained = Annotated[bool, option(WHAT, "Start from timm's or torchvision's trained weights.", "--pretrained")]
WeightsFile = Annotated[Path | None, option(WHAT, WEIGHTS_HELP, metavar="FILE")]
NumClasses = Annotated[int | None, number(int, 0, MOST_COUNT, WHAT, "Classes of the model's head.", metavar="N")]
InChans = Annotated[int | None, number(int, 1, MOST_COUNT, WHAT, "Input channels.", metavar="N")]
Images = Annotated[Path | None, option(WHERE, "Images: fit outputs for them, not kernels.", metavar="FOLDER")]

COUNT_HELP = "Elements in a kernel; auto: as many as the budget admits."
SIZE_HELP = "Window in which elements move: 17 or 17x9 cells. Without it, the size that the rules state."
BUDGET_HELP = "Parameters for the new kernels, in percent of the weights that they replace."
RULES_HELP = "Rule file or built-in set; auto: depthwise convolutions, or 3x3 ones where there are none."
HOW_HELP = "How an element spreads over the cells."
STRICT_HELP = "Fail where a layer cannot take the size, instead of skipping it."
PLANNING: dict[str, Any] = {
    "dilated_size": Annotated[Any, option(HOW_MANY, SIZE_HELP, metavar="N|HxW", parser=parse_size)],
    "kernel_count": Annotated[Any, number(int, 1, MOST_COUNT, HOW_MANY, COUNT_HELP, word=AUTO, metavar=f"N|{AUTO}")],
    "rules": Annotated[str, option(WHAT, RULES_HELP, metavar="FILE|NAME|auto", autocompletion=complete_rules)],
    "scope": Annotated[Scope, option(HOW_MANY, "What one count is solved for.")],
    "tie": Annotated[Tie, option(HOW_MANY, "Which layers share their positions.")],
    "budget": Annotated[
        float, number(float, LEAST_PERCENT, MOST_PERCENT, HOW_MANY, BUDGET_HELP, unit="%", metavar="PERCENT")
    ],
    "interpolation": Annotated[Interpolation | None, option(HOW_MANY, HOW_HELP, show_default=INTERPOLATIONS[0])],
    "strict": Annotated[bool, option(WHAT, STRICT_HELP, "--strict")],
}


def with_plan_options(command: Callable[..., None], *, but: Container[str] = ()) -> Callable[..., None]:
    """Give a command an argument for each planning option, in the place of its parameter `options: PlanOptions`.

    The rules are read here; an option that another one makes idle is refused. Options in `but` keep their defaults.
    """
    asked = [
        parameter.replace(annotation=PLANNING[parameter.name])
        for parameter in PLAN_PARAMETERS
        if parameter.name not in but
    ]
    parameters = [
        new.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        for new in (asked if parameter.annotation is PlanOptions else [parameter])
    ]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        options = PlanOptions(**{parameter.name: given.pop(parameter.name) for parameter in asked})
        if options.kernel_count != AUTO and (options.scope, options.budget) != (PlanOptions().scope, DEFAULT_BUDGET):
            raise DclsConvertError("--kernel-count states the count, so --budget and --scope would have no effect")
        if options.rules != AUTO:
            from ..planning.rules import load_rules

            options = replace(options, rules=load_rules(options.rules))
        command(options=options, **given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def refuse(conflicts: Mapping[str, object]) -> None:
    """Raise the first message whose conflict there is."""
    for message, conflict in conflicts.items():
        if conflict:
            raise DclsConvertError(message)


def check_network(options: PlanOptions, *, pretrained: bool, checkpoint: Path | None, images: Path | None) -> None:
    """Refuse two sources of weights, what needs one where there is none, and files that are not there."""
    needs = options.scope == ERROR and not pretrained and checkpoint is None
    refuse(
        {
            "--pretrained and --checkpoint exclude each other": pretrained and checkpoint is not None,
            "--scope error needs trained kernels: --pretrained or --checkpoint": needs,
        }
    )
    if checkpoint is not None:
        check_weights_file(checkpoint)
    if images is not None:
        check_images(images)
