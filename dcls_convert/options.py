"""Names and defaults of the options, shared by command line, rule files and library.

Imports neither torch nor typer: `--help` reads this file.
"""

import functools
import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, get_args

from .errors import PlanError
from .text import did_you_mean, join_with_and, shortened

if TYPE_CHECKING:
    from .planning.known_counts import LayerCounts  # which imports torch
    from .planning.rules import RuleSet

# Defined in layers/interpolation.py.
InterpolationName = Literal["bilinear", "triangle", "gaussian"]
Scope = Literal["auto", "model", "error"]
Tie = Literal["stage", "none"]
Init = Literal["auto", "random", "largest", "fit", "exact"]
Positions = Literal["normal", "kernel", "uniform"]
AuthorsVersion = Literal["v0", "v1"]  # layers without sigma; conversion/authors.py
Kind = Literal["depthwise", "grouped", "dense"]  # kinds of convolutions, by their groups
Sort = Literal["name", "params", "macs", "count", "layers"]  # how models are sorted
FigureName = Literal["positions", "kernels", "history"]

INTERPOLATION_NAMES: tuple[str, ...] = get_args(InterpolationName)
SCOPES: tuple[Scope, ...] = get_args(Scope)
TIES: tuple[str, ...] = get_args(Tie)
INITS: tuple[str, ...] = get_args(Init)
POSITIONS: tuple[str, ...] = get_args(Positions)

AUTO: Final = "auto"
DEFAULT_INTERPOLATION: InterpolationName = "bilinear"  # as in the paper
# A scope for trained kernels: tie groups share the budget so that the sum of errors is least.
ERROR_SCOPE: Scope = "error"
# A kernel count and a start: one element in every cell of the old kernel, so that the new layer
# computes the same function.
EXACT: Final = "exact"
MAX_SIDE = 9_999  # cells or pixels, four digits; a larger kernel or image is a typing mistake
MAX_PIXELS = 2048 * 2048  # pixels or voxels of an image on which outputs are compared
MAX_COUNT = 10**9  # elements, classes or channels
# A window stated as a growth: the cells added to the kernel's extent on each side of the window. It
# must be even, because window and extent must both be odd or both be even.
GROWTH = r"\+[1-9][0-9]{0,3}"
EVEN_GROWTH = r"\+([2468]|[1-9][0-9]{0,2}[02468])"
MIN_GROWTH = 2  # cells
MAX_WINDOW = 17  # cells; the largest window of "auto", which is the paper's for ConvNeXt
# Percent of MACs that recommended windows may add; the paper's ConvNeXts have 11.6 to 12.9.
MAX_ADDED_COST_PERCENT = 15.0
CALIBRATION_IMAGES = 80  # images taken from a folder by default
OPSETS = range(7, 26)  # of ONNX, which torch 2.14 and onnxscript 0.7 write
DEFAULT_OPSET = 20  # torch 2.14's own
SEPARATED_BY_COMMAS = ("mean", "std")  # on the command line; other lists are sizes, 17x9
POSITION_LR_SCALE = 5.0  # paper, section 3 "Positions learning rate scaling"
DEFAULT_BUDGET = 100.0  # percent of the replaced weights; the paper keeps the parameter count
# Bounds of a budget. They keep its exact fraction short: that of 1e-999999 would fill the memory.
MIN_PERCENT = Decimal("0.0001")
MAX_PERCENT = 100_000

# Groups of options in --help.
WHAT_TO_CONVERT = "What to convert"
HOW_MANY_ELEMENTS = "How many elements"


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """How a planning option is written on the command line; kept in the metadata of its field."""

    # What the user types. "word": one of the words of the field's type; "flag": no value, the
    # option alone means True; "integer", "number": plain digits; "size": cells for all sides or for
    # each, or a growth; "rules": the name or the file of a rule set.
    form: Literal["word", "flag", "integer", "number", "size", "rules"]
    help: str
    group: str  # of options in --help
    metavar: str | None = None  # the value in --help; if None, the words of the type
    minimum: int | Decimal = 1  # of an integer or a number
    maximum: int = MAX_COUNT
    word: str = ""  # may be typed instead of an integer or a number
    unit: str = ""  # may follow an integer or a number
    shown_default: str | None = None  # in --help; if None, the field's own default
    # Options that, if stated, leave this one without effect. Maps the other option's field to the
    # reason, as a verb and its object, such as "states the count".
    overridden_by: Mapping[str, str] = field(default_factory=dict)


def option_name(field_name: str) -> str:
    """Return the name of a field's option: "--kernel-count" for "kernel_count"."""
    return f"--{field_name.replace('_', '-')}"


def command_line(model: str, values: Mapping[str, Any], command: str = "") -> str:
    """Return the command that converts a model with these options, to be pasted into a shell.

    Args:
        model: The command line's argument MODEL.
        values: The options' values by field name. True is written as a flag; None and
            False are left out.
        command: A command other than the default one, such as "sweep".
    """
    words = ["dcls-convert", model]
    if command:
        words.insert(1, command)
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append(option_name(name))
        if isinstance(value, Mapping):
            words += [f"{key}={_literal(entry)}" for key, entry in value.items()]
        elif isinstance(value, list | tuple):
            separator = "x"
            if name in SEPARATED_BY_COMMAS:
                separator = ","
            words.append(separator.join(map(_typed, value)))
        elif value is not True:
            words.append(_typed(value))
    return shlex.join(words)


def _literal(value: Any) -> str:
    """Return the text that is parsed into this value: Python, or a bare word."""
    if isinstance(value, str) and value.isidentifier() and value not in ("None", "True", "False"):
        return value
    return repr(value)


def _typed(value: Any) -> str:
    """Return a value as typed: numbers without a needless ".0", rule sets by their name or file."""
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return str(getattr(value, "source", value))


def argument_of(option: Field[Any]) -> Argument:
    """Return how the option of this field is written on the command line."""
    argument: Argument = option.metadata["argument"]
    return argument


def _argument(**settings: Any) -> dict[str, Argument]:
    """Return the metadata of a field of `PlanOptions`."""
    return {"argument": Argument(**settings)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The options of a plan.

    The fields are options of the command line. Each public planning function spells out a keyword
    argument for every field, so that editors and type checkers find them.
    """

    # Cells: one integer, or one for each side. Or a growth such as "+4". Or "auto", the largest
    # growth with windows of at most MAX_WINDOW that adds at most MAX_ADDED_COST_PERCENT to MACs.
    dilated_size: int | Sequence[int] | str = field(
        default=AUTO,
        metadata=_argument(
            form="size",
            help="Window in which elements move: 17 or 17x9 cells; +4: each side four cells "
            f"longer than the kernel's; auto: the largest growth, up to {MAX_WINDOW} cells, that "
            f"adds at most {MAX_ADDED_COST_PERCENT:g} % to the MACs.",
            group=HOW_MANY_ELEMENTS,
            metavar="N|HxW|+N|auto",
        ),
    )
    kernel_count: "int | Literal['auto', 'exact'] | LayerCounts" = field(
        default=AUTO,
        metadata=_argument(
            form="integer",
            help="Elements in a kernel; auto: as many as the budget allows.",
            group=HOW_MANY_ELEMENTS,
            metavar="N|auto",
            word=AUTO,
        ),
    )
    # "auto", a name, a file, or a mapping with the keys of a file.
    rules: "str | Path | Mapping[str, Any] | RuleSet" = field(
        default=AUTO,
        metadata=_argument(
            form="rules",
            help="Rule file or built-in set; auto: depthwise convolutions, or 3x3 ones if "
            "there are none.",
            group=WHAT_TO_CONVERT,
            metavar="FILE|NAME|auto",
        ),
    )
    # "auto" means "error" with images, else "model".
    scope: Scope = field(
        default="auto",
        metadata=_argument(
            form="word",
            help="model: one element count for all layers; error: more elements where kernels need "
            "them (default with --calibrate).",
            group=HOW_MANY_ELEMENTS,
            overridden_by={"kernel_count": "states the count"},
        ),
    )
    tie: Tie = field(
        default="stage",
        metadata=_argument(
            form="word",
            help="Which layers share their positions.",
            group=HOW_MANY_ELEMENTS,
        ),
    )
    # Percent of the replaced weights: 80 or "80%".
    budget: float | str = field(
        default=DEFAULT_BUDGET,
        metadata=_argument(
            form="number",
            help="Parameters for the new kernels, in percent of the weights that they replace.",
            group=HOW_MANY_ELEMENTS,
            metavar="PERCENT",
            minimum=MIN_PERCENT,
            maximum=MAX_PERCENT,
            unit="%",
            overridden_by={"kernel_count": "states the count"},
        ),
    )
    # For rules that state no interpolation; None means DEFAULT_INTERPOLATION.
    interpolation: InterpolationName | None = field(
        default=None,
        metadata=_argument(
            form="word",
            help="How an element spreads over the cells.",
            group=HOW_MANY_ELEMENTS,
            shown_default=DEFAULT_INTERPOLATION,
        ),
    )
    strict: bool = field(
        default=False,
        metadata=_argument(
            form="flag",
            help="Fail where a layer cannot take the size, instead of skipping it.",
            group=WHAT_TO_CONVERT,
        ),
    )

    def override_message(self, display_name: Callable[[str], str]) -> str | None:
        """Return a message about the first stated option that another one overrides, if any.

        Args:
            display_name: Turns a field's name into the name that the message uses.
        """
        stated = []
        for option in fields(self):
            if getattr(self, option.name) != option.default:
                stated.append(option.name)
        for option in fields(self):
            for other, reason in argument_of(option).overridden_by.items():
                if option.name in stated and other in stated:
                    overridden = map(display_name, self._all_overridden_by(other))
                    names = join_with_and(list(overridden))
                    return f"{display_name(other)} {reason}, so {names} would have no effect"
        return None

    def _all_overridden_by(self, other: str) -> list[str]:
        """Return the sorted names of all options, stated or not, that `other` overrides."""
        names = []
        for option in fields(self):
            if other in argument_of(option).overridden_by:
                names.append(option.name)
        return sorted(names)


def check_even(growth: str) -> None:
    """Check that a growth, a text that matches GROWTH, is even.

    Raises:
        ValueError: It is odd. The message suggests even ones.
    """
    cells = int(growth)
    if cells % 2 == 0:
        return
    allowed = f"+{cells + 1}"
    if cells > MIN_GROWTH:
        allowed = f"+{cells - 1} or {allowed}"
    raise ValueError(f"growth {growth} must be even, or the output would shift; use {allowed}")


def signature_parameters(record: type[PlanOptions]) -> list[inspect.Parameter]:
    """Return the fields of a record of options as parameters of a function."""
    parameters = []
    for option in fields(record):
        parameters.append(
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.default,
                annotation=option.type,
            )
        )
    return parameters


PLAN_PARAMETERS = signature_parameters(PlanOptions)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def suggests_arguments(function: _Function) -> _Function:
    """Make a function answer a misspelt keyword argument with the closest correct one.

    The function's signature stays the same.
    """
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        unknown = [name for name in options if name not in known]
        if unknown:
            hint = did_you_mean(unknown[0], known)
            raise TypeError(f"{function.__name__}() has no argument {unknown[0]!r}{hint}")
        return function(*args, **options)

    return cast(_Function, call)


def parse_percent(text: str | float | int) -> Fraction:
    """Return a percentage as an exact fraction of 1: 99.5 and "99.5%" -> 199/200.

    Raises:
        PlanError: The percentage is not a number, or out of bounds.
    """
    try:
        percent = Decimal(str(text).removesuffix("%"))
    except InvalidOperation:
        percent = Decimal("nan")
    if not percent.is_finite() or not MIN_PERCENT <= percent <= MAX_PERCENT:
        raise PlanError(
            f"budget {shortened(text)!r} must be a percentage from {MIN_PERCENT} to {MAX_PERCENT}"
        )
    return Fraction(percent) / 100
