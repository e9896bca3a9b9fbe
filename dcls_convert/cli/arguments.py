"""Arguments that commands share: their types, their groups in --help, and their records."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from ..errors import DclsConvertError
from ..input_files import check_file, check_folder, check_images
from ..options import (
    AUTO,
    CALIBRATION_IMAGES,
    GROWTH,
    MAX_COUNT,
    MAX_SIDE,
    PLAN_PARAMETERS,
    WHAT_TO_CONVERT,
    PlanOptions,
    argument_of,
    check_even,
    option_name,
)
from ..pipeline.request import ConversionRequest
from ..text import shortened
from .completion import complete_files, complete_models, complete_rules

# Groups of options in --help; options.py has WHAT_TO_CONVERT and HOW_MANY_ELEMENTS.
WHERE = "Where they start"
OUTPUT = "Output"
RUNNING = "How to run"

DEFAULT_COMMAND = "convert"  # the command that is run if none is named
LONGEST_CHOICES = 22  # characters of `one|two|three`; --help would wrap a longer list
SECONDS_PER_DAY = 86_400  # upper limit of options that take seconds
MAX_SEED = 2**63 - 1  # largest signed 64-bit integer; torch.Generator takes it


def option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """Return a typer option that --help lists in the group `panel`.

    `names` must be given for a flag; otherwise typer adds a --no- form.
    """
    default_text = settings.get("show_default")
    if isinstance(default_text, str):
        # typer would print a text as [default: (TEXT)].
        help = f"{help} \\[default: {default_text}]"
        settings["show_default"] = False
    return typer.Option(*names, rich_help_panel=panel, help=help, **settings)


def number(
    kind: type[Any],
    minimum: Any,
    maximum: int,
    panel: str,
    help: str,
    *,
    word: str = "",
    unit: str = "",
    **settings: Any,
) -> Any:
    """Return an option whose value is a number in plain digits, or `word`."""
    parse = number_parser(kind, minimum, maximum, word=word, unit=unit)
    return option(panel, help, parser=parse, **settings)


def number_parser(
    kind: type[Any], minimum: Any, maximum: int, *, word: str = "", unit: str = ""
) -> Callable[[Any], Any]:
    """Return a parser of a number in plain digits, or of `word`.

    int() and float() alone would also accept `1_000`, ` 17 ` and `nan`.
    """
    digits = r"[0-9]{1,19}"
    noun = "an integer"
    if kind is float:
        digits = r"[0-9]{1,19}(\.[0-9]{1,19})?"
        noun = "a number"
    allowed = f"{noun} from {minimum} to {maximum}"
    if word:
        allowed += f", or {word}"

    def parse(text: Any) -> Any:
        if word and text == word:
            return word
        number_text = str(text).removesuffix(unit)
        if re.fullmatch(digits, number_text):
            value = kind(number_text)
            if minimum <= value <= maximum:
                return value
        raise typer.BadParameter(f"'{shortened(text)}' is not {allowed}")

    return parse


def choice(words: Any, panel: str, help: str, **settings: Any) -> Any:
    """Return an option whose value is one of the words of a `Literal`; --help lists them."""
    names = get_args(words)
    metavar = "|".join(names)
    if len(metavar) > LONGEST_CHOICES:
        metavar = "NAME"
        if not all(name in help for name in names):
            help = f"{help} One of {', '.join(names)}."
    return option(panel, help, metavar=metavar, **settings)


def _parse_sides(text: str, allowed_counts: range, expected: str) -> tuple[int, ...]:
    """Parse "17x9" into (17, 9); `expected` completes the error "TEXT is not ..."."""
    sides: tuple[int, ...] = ()
    if re.fullmatch(r"[0-9]{1,4}([xX][0-9]{1,4})*", text):
        sides = tuple(int(side) for side in re.split("[xX]", text))
    if len(sides) not in allowed_counts or 0 in sides:
        raise typer.BadParameter(f"'{shortened(text)}' is not {expected}")
    return sides


def parse_window_or_auto(text: str) -> int | str | tuple[int, ...]:
    """Parse "auto", or a window as `parse_window` does; refuse an odd growth."""
    if text == AUTO:
        return AUTO
    window = parse_window(text)
    if isinstance(window, str):
        try:
            check_even(window)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return window


def parse_window(text: str) -> int | str | tuple[int, ...]:
    """Parse "17" into 17, and "17x9" into (17, 9); a growth such as "+4" stays text."""
    if re.fullmatch(GROWTH, text):
        return text
    expected = (
        f"a size: give an integer from 1 to {MAX_SIDE} such as 17, sides such as 17x9, "
        "or a growth such as +4"
    )
    sides = _parse_sides(text, range(1, 4), expected)
    if len(sides) == 1:
        return sides[0]
    return sides


def parse_input_size(text: str) -> tuple[int, ...]:
    """Parse "3x224x224" into (3, 224, 224)."""
    expected = f"an input size: give channels and sides from 1 to {MAX_SIDE}, such as 3x224x224"
    return _parse_sides(text, range(2, 5), expected)


def parse_numbers(text: str) -> tuple[float, ...]:
    """Parse "0.5,0.4,0.3" into (0.5, 0.4, 0.3)."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?(,[0-9]{1,9}(\.[0-9]{1,9})?)*", text):
        raise typer.BadParameter(
            f"'{shortened(text)}' is not a list of numbers such as 0.485,0.456,0.406"
        )
    return tuple(map(float, text.split(",")))


class PlainHelp:
    """Mixin for commands whose --help shows no types in brackets for flags and arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, including --help."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if isinstance(parameter, TyperArgument):
                # typer has no setting for this; a metavar only renames the argument.
                parameter.display_type_rich = _no_type  # type: ignore[method-assign]
            elif parameter.is_flag or parameter.count:
                parameter.metavar = ""
        return parameters

    def get_help_option(self, ctx: Any) -> Any:
        """Return the --help option, with the default False.

        typer's default is None. To validate None, typer imports pydantic, which doubles the time.
        """
        help_option = super().get_help_option(ctx)  # type: ignore[misc]
        help_option.default = False
        return help_option


def _no_type(ctx: Any) -> str:
    return ""


class Command(PlainHelp, TyperCommand):
    """A command with plain help."""


class CommandGroup(PlainHelp, TyperGroup):
    """A group of commands, which shows its help without arguments.

    If the group has `convert`, that is the default command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command before arguments that name no command.

        Raises:
            DclsConvertError: The first argument is nearly a command's name.
        """
        if not args:
            return super().parse_args(ctx, ["--help"])
        known = set(self.commands)
        for parameter in self.get_params(ctx):
            known.update(parameter.opts)
        first = args[0]
        if DEFAULT_COMMAND in self.commands and first not in known:
            # With a cutoff of 0.8, no registered model's name is this close to a command.
            close = difflib.get_close_matches(first, self.commands, n=1, cutoff=0.8)
            if close and not first.startswith("-"):
                raise DclsConvertError(
                    f"there is no command {first!r} (did you mean {close[0]!r}?)"
                )
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete commands and options, and the default command's model and options.

        Model names are listed only once something is typed: there are thousands.
        """
        items = super().shell_complete(ctx, incomplete)
        default = self.commands.get(DEFAULT_COMMAND)
        if not incomplete or default is None:
            return items
        completer: Any = default.params[0]  # MODEL
        if incomplete.startswith("-"):
            completer = default
        known = {item.value for item in items}
        for item in completer.shell_complete(ctx, incomplete):
            if item.value not in known:
                items.append(item)
        return items


def argument(metavar: str, help: str, complete: Callable[[str], list[str]], **settings: Any) -> Any:
    return typer.Argument(
        metavar=metavar, help=help, autocompletion=complete, show_default=False, **settings
    )


def checkpoint_argument(metavar: str, help: str) -> Any:
    return argument(metavar, help, complete_files, callback=check_folder)


def image_size(panel: str, help: str) -> Any:
    return option(panel, help, metavar="CxHxW", parser=parse_input_size)


# Arguments and options of several commands.
CheckpointFolder = Annotated[
    Path, checkpoint_argument("CHECKPOINT", "A folder that dcls-convert wrote.")
]
INPUT_SIZE_HELP = "Image size for MACs, exports and training (default: the model's own)."
InputSize = Annotated[Any, image_size(OUTPUT, INPUT_SIZE_HELP)]
Json = Annotated[bool, option(OUTPUT, "Print one JSON object.", "--json")]
Csv = Annotated[bool, option(OUTPUT, "Print CSV.", "--csv")]
Force = Annotated[bool, option(OUTPUT, "Replace what an earlier run wrote.", "--force")]
Quiet = Annotated[
    bool,
    option(OUTPUT, "Print no progress and no report, only the output's name.", "--quiet", "-q"),
]
TRUST = (
    "Import and run your own code that the checkpoint names as its model. "
    "Do not use it on folders you did not create."
)
TrustCode = Annotated[bool, typer.Option("--trust-code", help=TRUST)]

MODEL_HELP = (
    "convnext_tiny (timm first, then torchvision), timm:NAME, torchvision:NAME, hf-hub:REPO, "
    "local-dir:FOLDER, or package.module:factory, which imports and runs your own code."
)
PRETRAINED_HELP = "Start from timm's or torchvision's trained weights."
WEIGHTS_HELP = "Start from a safetensors or torch file (including the DCLS authors' checkpoints)."
IMAGES_HELP = "Folder of images; match the network's outputs on them instead of its kernels."
MAX_IMAGES_HELP = "Images of --calibrate, evenly spread; some are held out to compare outputs on."
MEAN_HELP = (
    "Mean by which images are normalised, one for all channels or one for each "
    "(default: the model's own)."
)
STD_HELP = "Standard deviation by which images are normalised."


def typer_annotations(record: type[PlanOptions]) -> dict[str, Any]:
    """Return annotations that turn the fields of a record into typer options, by field name."""
    annotations = {}
    for option_field in fields(record):
        annotations[option_field.name] = _typer_annotation(option_field)
    return annotations


def _typer_annotation(option_field: Field[Any]) -> Any:
    declared = argument_of(option_field)
    panel = declared.group
    help = declared.help
    settings: dict[str, Any] = {}
    if declared.metavar is not None:
        settings["metavar"] = declared.metavar
    if declared.shown_default is not None:
        settings["show_default"] = declared.shown_default
    match declared.form:
        case "flag":
            return Annotated[bool, option(panel, help, option_name(option_field.name))]
        case "word":
            words = option_field.type
            if type(None) in get_args(words):  # Literal[...] | None
                words = get_args(words)[0]
            return Annotated[option_field.type, choice(words, panel, help, **settings)]
        case "size":
            return Annotated[Any, option(panel, help, parser=parse_window_or_auto, **settings)]
        case "rules":
            return Annotated[str, option(panel, help, autocompletion=complete_rules, **settings)]
    kind: type[Any] = int
    if declared.form == "number":
        kind = float
    return Annotated[
        Any,
        number(
            kind,
            declared.minimum,
            declared.maximum,
            panel,
            help,
            word=declared.word,
            unit=declared.unit,
            **settings,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The network to convert, and how: options that several commands share."""

    model: Annotated[str, argument("MODEL", MODEL_HELP, complete_models)]
    pretrained: Annotated[bool, option(WHAT_TO_CONVERT, PRETRAINED_HELP, "--pretrained")] = False
    checkpoint: Annotated[Path | None, option(WHAT_TO_CONVERT, WEIGHTS_HELP, metavar="FILE")] = None
    num_classes: Annotated[
        int | None,
        number(int, 0, MAX_COUNT, WHAT_TO_CONVERT, "Classes of the model's head.", metavar="N"),
    ] = None
    in_chans: Annotated[
        int | None, number(int, 1, MAX_COUNT, WHAT_TO_CONVERT, "Input channels.", metavar="N")
    ] = None
    options: PlanOptions = field(default_factory=PlanOptions)
    calibrate: Annotated[Path | None, option(WHERE, IMAGES_HELP, metavar="FOLDER")] = None
    images: Annotated[
        int | None,
        number(
            int,
            1,
            MAX_COUNT,
            WHERE,
            MAX_IMAGES_HELP,
            metavar="N",
            show_default=str(CALIBRATION_IMAGES),
        ),
    ] = None
    mean: Annotated[Any, option(WHERE, MEAN_HELP, metavar="M,M,M", parser=parse_numbers)] = None
    std: Annotated[Any, option(WHERE, STD_HELP, metavar="S,S,S", parser=parse_numbers)] = None
    input_size: InputSize = None

    @property
    def trained(self) -> bool:
        """True if the network has trained weights."""
        return self.pretrained or self.checkpoint is not None

    def request(self, **settings: Any) -> ConversionRequest:
        """Return the conversion request; refuse conflicting options and missing files."""
        request = ConversionRequest(
            model=self.model,
            num_classes=self.num_classes,
            in_chans=self.in_chans,
            pretrained=self.pretrained,
            weights=self.checkpoint,
            options=self.options,
            input_size=self.input_size,
            calibration=self.calibrate,
            most_images=self.images,
            mean=self.mean,
            std=self.std,
            **settings,
        )
        if self.checkpoint is not None:
            check_file(self.checkpoint)
        if self.calibrate is not None:
            check_images(self.calibrate)
        return request


def expand_options(
    command: Callable[..., None], *, omit: Container[str] = ()
) -> Callable[..., None]:
    """Give a command the fields of `NetworkOptions` and `PlanOptions` as its own arguments.

    `def models(options: PlanOptions, pattern=None)` becomes `def models(*, dilated_size="auto",
    kernel_count="auto", ..., pattern=None)`; `network_options: NetworkOptions` becomes its fields,
    with those of `PlanOptions` in place of its `options`. Fields in `omit` do not become
    arguments and keep their defaults.
    """
    plan_parameters = _typer_plan_parameters(omit)
    network_parameters = _network_parameters(plan_parameters)
    plan_names = [parameter.name for parameter in plan_parameters]
    network_names = [
        parameter.name for parameter in network_parameters if parameter.name not in plan_names
    ]
    parameters = []
    takes_network = False
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        replacements = [parameter]
        if parameter.annotation is NetworkOptions:
            takes_network = True
            replacements = network_parameters
        elif parameter.annotation is PlanOptions:
            replacements = plan_parameters
        for replacement in replacements:
            parameters.append(replacement.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        plan_values = {name: values.pop(name) for name in plan_names}
        options = _plan_options(plan_values)
        if takes_network:
            network_values = {name: values.pop(name) for name in network_names}
            values["network_options"] = NetworkOptions(options=options, **network_values)
        else:
            values["options"] = options
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _typer_plan_parameters(omit: Container[str]) -> list[inspect.Parameter]:
    """Return the fields of `PlanOptions`, without those in `omit`, as parameters for typer."""
    annotations = typer_annotations(PlanOptions)
    parameters = []
    for parameter in PLAN_PARAMETERS:
        if parameter.name not in omit:
            parameters.append(parameter.replace(annotation=annotations[parameter.name]))
    return parameters


def _network_parameters(plan_parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the fields of `NetworkOptions` as parameters, with `plan_parameters` for `options`."""
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(NetworkOptions, eval_str=True).parameters.items():
        if name == "options":
            parameters += plan_parameters
        else:
            parameters.append(parameter)
    return parameters


def changed_options(record: NetworkOptions | PlanOptions) -> dict[str, Any]:
    """Return the options whose values differ from their defaults."""
    values = {}
    for record_field in fields(record):
        name = record_field.name
        value = getattr(record, name)
        if name not in ("model", "options") and value != record_field.default:
            values[name] = value
    return values


def _plan_options(values: Mapping[str, Any]) -> PlanOptions:
    """Make the options and load their rules; refuse an option that another one overrides."""
    options = PlanOptions(**values)
    conflict = options.override_message(option_name)
    if conflict is not None:
        raise DclsConvertError(conflict)
    if values["rules"] != AUTO:
        from ..planning.rule_files import load_rules

        options = replace(options, rules=load_rules(values["rules"]))
    return options


def refuse(*conflicts: tuple[object, str]) -> None:
    """Raise a DclsConvertError with the message of the first condition that is true."""
    for condition, message in conflicts:
        if condition:
            raise DclsConvertError(message)
