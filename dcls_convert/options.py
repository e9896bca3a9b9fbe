"""Names and defaults of the options, for command line, rule files and library alike. Imports nothing heavy."""

from typing import Literal, get_args

Interpolation = Literal["bilinear", "triangle", "gaussian"]
Scope = Literal["model", "stage", "layer"]
Tie = Literal["stage", "none"]
Init = Literal["auto", "random", "largest", "fit", "exact"]
Positions = Literal["normal", "uniform"]
AuthorsVersion = Literal["v0", "v1"]  # of their package's layers without sigma; see authors.py
FoldFormat = Literal["timm", "onnx", "pt2"]

INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)
SCOPES: tuple[str, ...] = get_args(Scope)
TIES: tuple[str, ...] = get_args(Tie)
INITS: tuple[str, ...] = get_args(Init)
POSITIONS: tuple[str, ...] = get_args(Positions)
FOLD_FORMATS: tuple[str, ...] = get_args(FoldFormat)

AUTO = "auto"
EXACT = "exact"  # as many elements as the old kernel has cells, at their places: the same function
DEFAULT_BUDGET = 100.0  # percent of the weights replaced; the paper holds the parameter count
