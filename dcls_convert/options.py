"""Names and defaults of the options, for command line, rule files and library alike.

Imports nothing heavy.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, Literal, TypeVar, cast, get_args

from .errors import did_you_mean

# Their records are in layers/interpolation.py.
InterpolationName = Literal["bilinear", "triangle", "gaussian"]
Scope = Literal["auto", "model", "stage", "layer", "error"]
Tie = Literal["stage", "none"]
Init = Literal["auto", "random", "largest", "fit", "exact"]
Positions = Literal["normal", "kernel", "uniform"]
Augmentation = Literal["none", "light", "strong"]
AuthorsVersion = Literal["v0", "v1"]  # of the authors' layers without sigma; surgery/authors.py
Kind = Literal["depthwise", "grouped", "dense"]  # of a convolution, by its groups
Sort = Literal["name", "params", "macs", "count", "layers"]  # how models are sorted
FoldFormat = Literal["timm", "onnx", "pt2"]
FigureName = Literal["positions", "kernels", "receptive-field", "history"]

INTERPOLATION_NAMES: tuple[str, ...] = get_args(InterpolationName)
SCOPES: tuple[Scope, ...] = get_args(Scope)
TIES: tuple[str, ...] = get_args(Tie)
INITS: tuple[str, ...] = get_args(Init)
POSITIONS: tuple[str, ...] = get_args(Positions)

AUTO = "auto"
DEFAULT_INTERPOLATION: InterpolationName = "bilinear"  # the paper's
# A scope for trained kernels: each tie group gets as many elements as its kernels need.
ERROR: Scope = "error"
# As many elements as the old kernel has cells, at the places of these cells: the same function.
EXACT = "exact"
MOST_SIDE = 9_999  # cells or pixels, four digits; a larger kernel or image is a typing mistake
MOST_PIXELS = 2048 * 2048  # pixels or voxels of an image on which outputs are compared
MOST_COUNT = 10**9  # elements, classes or channels
MOST_WINDOW = 17  # cells; the largest "auto" size, which is the paper's for ConvNeXt
# Percent of MACs that a recommended size may add; the paper's ConvNeXts have 11.6 to 12.9.
MOST_SLOWER = 15.0
OPSETS = range(7, 26)  # of ONNX, which torch 2.14 and onnxscript 0.7 write
DEFAULT_OPSET = 20  # torch 2.14's own
POSITION_LR_SCALE = 5.0  # paper, section 3 "Positions learning rate scaling"
DEFAULT_BUDGET = 100.0  # percent of the weights replaced; the paper holds the parameter count
# Of a budget. Both bounds keep fractions short: as one, 1e-999999 would fill the memory.
LEAST_PERCENT = Decimal("0.0001")
MOST_PERCENT = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What may be asked of a plan.

    The fields are keyword arguments of `convert_` and `plan_conversion`, and options of the command
    line.
    """

    # Cells, an integer or one for each side. "auto": at most MOST_WINDOW, and within MOST_SLOWER.
    dilated_size: Any = AUTO
    kernel_count: Any = AUTO  # "auto", "exact", an integer, or planning.plan.LayerCounts
    rules: Any = AUTO  # "auto", a name, a file, a mapping as in a file, or a planning.rules.RuleSet
    scope: Scope = "auto"  # what one count is solved for; "error" with images, else "model"
    tie: Tie = "stage"  # which layers share their positions
    budget: float | str = DEFAULT_BUDGET  # percent of the replaced weights: 80, "80%"
    interpolation: InterpolationName | None = None  # for rules that state none; None: bilinear
    strict: bool = False  # refuse if a matching convolution cannot take the size


PLAN_PARAMETERS = [
    inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
    )
    for field in fields(PlanOptions)
]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_plan_options(function: _Function) -> _Function:
    """Put the fields of `PlanOptions` into the signature, instead of the last one, `**planning`."""
    signature = inspect.signature(function)
    *parameters, _ = signature.parameters.values()
    for parameter in PLAN_PARAMETERS:
        if parameter.name not in signature.parameters:
            parameters.append(parameter)
    known = [parameter.name for parameter in parameters]

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name in options.keys() - known:
            raise TypeError(
                f"{function.__name__}() has no argument {name!r}{did_you_mean(name, known)}"
            )
        return function(*args, **options)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return cast(_Function, call)
