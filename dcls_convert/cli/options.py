"""Options and arguments of several commands, with their help. A command writes out what it takes.

Imports no torch: --help reads this file.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..input import builtin_rules, check_folder, check_images
from ..options import (
    AUTO,
    CALIBRATION_IMAGES,
    DEFAULT_INTERPOLATION,
    INTERPOLATION_NAMES,
    MAX_ADDED_COST_PERCENT,
    MAX_WINDOW,
    AuthorsVersion,
    Init,
    InterpolationName,
    Positions,
    Scope,
    Tie,
)
from ..weights.find_file import find_weights_file
from .parsing import (
    parse_added_percent,
    parse_budget,
    parse_count_or_auto,
    parse_input_size,
    parse_keywords,
    parse_numbers,
    parse_window,
)

# Groups of options in --help.
WHAT_TO_CONVERT = "What to convert"
HOW_MANY_ELEMENTS = "How many elements"
WHERE_THEY_START = "Where they start"
OUTPUT = "Output"


def _checked(check: Callable[[Path], object]) -> Callable[[Path | None], Path | None]:
    """Return a callback that checks a path, if one is given."""

    def callback(path: Path | None) -> Path | None:
        if path is not None:
            check(path)
        return path

    return callback


def _load_rules(name: str) -> Any:
    """Load rules before the model, so that a mistake in them is reported at once."""
    if name == AUTO:
        return name
    from ..planning.rule_files import load_rules

    return load_rules(name)


def complete_models(incomplete: str) -> list[str]:
    """Return names of models, with their registry if a colon is typed ("timm:").

    This imports both registries, which takes seconds.
    """
    from ..networks.source import registry_names

    names = registry_names()
    if ":" not in incomplete:
        names = [name.partition(":")[2] for name in names]
    return list(dict.fromkeys(names))  # both registries have some names


def complete_rules() -> list[str]:
    """Return the names of the built-in rule sets; if none fits, shells complete files."""
    return [AUTO, *builtin_rules()]


def values_for(record: type, context: typer.Context) -> dict[str, Any]:
    """Return those parameters of a command that a dataclass has as fields, too."""
    values = {}
    for field in fields(record):
        if field.name in context.params:
            values[field.name] = context.params[field.name]
    return values


# What to convert

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="convnext_tiny (timm first, then torchvision), timm:NAME, torchvision:NAME, "
        "hf-hub:REPO, local-dir:FOLDER, or package.module:factory, which imports and runs your "
        "own code.",
        autocompletion=complete_models,
        show_default=False,
    ),
]
Pretrained = Annotated[
    bool,
    typer.Option(
        "--pretrained",
        metavar="",
        help="Start from timm's or torchvision's trained weights.",
        rich_help_panel=WHAT_TO_CONVERT,
    ),
]
WeightsFile = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="FILE",
        help="Start from a safetensors or torch file (including the DCLS authors' checkpoints), "
        "an index of shards, or the weights in a folder.",
        callback=_checked(find_weights_file),
        rich_help_panel=WHAT_TO_CONVERT,
    ),
]
CheckpointKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Which weights of the file, if it holds several: ema, state_dict, encoder_q, ...",
        rich_help_panel=WHAT_TO_CONVERT,
    ),
]
NumClasses = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, help="Classes of the model's head.", rich_help_panel=WHAT_TO_CONVERT
    ),
]
InChans = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Input channels.", rich_help_panel=WHAT_TO_CONVERT),
]
ModelKwargs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE ...",
        help="More arguments of the model's function, stored in the checkpoint: "
        "ls_init_value=0.1 drop_path_rate=0.2",
        callback=parse_keywords,
        rich_help_panel=WHAT_TO_CONVERT,
    ),
]
Rules = Annotated[
    str,
    typer.Option(
        metavar="FILE|NAME|auto",
        help="Rule file or built-in set; auto: depthwise convolutions, or 3x3 ones if there are "
        "none.",
        callback=_load_rules,
        autocompletion=complete_rules,
        rich_help_panel=WHAT_TO_CONVERT,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        metavar="",
        help="Fail if a layer cannot take the size, instead of skipping the layer.",
        rich_help_panel=WHAT_TO_CONVERT,
    ),
]
PlanFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Apply the plan of a checkpoint to other weights of the same model.",
        callback=_checked(check_folder),
        rich_help_panel=WHAT_TO_CONVERT,
    ),
]

# How many elements

DilatedSize = Annotated[
    Any,
    typer.Option(
        metavar="N|HxW|+N|auto",
        help="Window in which elements move: 17 or 17x9 cells; +4: each side four cells longer "
        f"than the kernel's; auto: the largest growth, up to {MAX_WINDOW} cells, that adds at "
        f"most {MAX_ADDED_COST_PERCENT:g} % to the MACs.",
        parser=parse_window,
        rich_help_panel=HOW_MANY_ELEMENTS,
    ),
]
KernelCount = Annotated[
    Any,
    typer.Option(
        metavar="N|auto",
        help="Elements in a kernel; auto: as many as the budget allows.",
        parser=parse_count_or_auto,
        rich_help_panel=HOW_MANY_ELEMENTS,
    ),
]
ScopeOption = Annotated[
    Scope,
    typer.Option(
        metavar="model|error|auto",
        help="model: one element count for all layers; error: more elements where kernels need "
        "them; auto: error with --calibrate, else model.",
        rich_help_panel=HOW_MANY_ELEMENTS,
    ),
]
TieOption = Annotated[
    Tie,
    typer.Option(
        metavar="stage|none",
        help="Which layers share their positions.",
        rich_help_panel=HOW_MANY_ELEMENTS,
    ),
]
Budget = Annotated[
    float,
    typer.Option(
        metavar="PERCENT",
        help="Parameters for the new kernels, in percent of the weights that they replace.",
        parser=parse_budget,
        rich_help_panel=HOW_MANY_ELEMENTS,
    ),
]
MaxMacs = Annotated[
    Any,
    typer.Option(
        metavar="PERCENT",
        help="Write nothing if this would add more to the MACs, such as +50%.",
        parser=parse_added_percent,
        rich_help_panel=HOW_MANY_ELEMENTS,
    ),
]
InterpolationOption = Annotated[
    InterpolationName | None,
    typer.Option(
        metavar="NAME",
        help=f"How an element spreads over the cells: {', '.join(INTERPOLATION_NAMES)} "
        f"(default: {DEFAULT_INTERPOLATION}).",
        rich_help_panel=HOW_MANY_ELEMENTS,
    ),
]

# Where they start

Calibrate = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of images; match the network's outputs on them instead of its kernels.",
        callback=_checked(check_images),
        rich_help_panel=WHERE_THEY_START,
    ),
]
ImagesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Images to use of --calibrate, evenly spread; some are held out to compare outputs on "
        f"(default: {CALIBRATION_IMAGES}).",
        rich_help_panel=WHERE_THEY_START,
    ),
]
Mean = Annotated[
    Any,
    typer.Option(
        metavar="M,M,M",
        help="Mean by which images with values from 0 to 1 are normalised, one for all channels or "
        "one for each (default: the model's own).",
        parser=parse_numbers,
        rich_help_panel=WHERE_THEY_START,
    ),
]
Std = Annotated[
    Any,
    typer.Option(
        metavar="S,S,S",
        help="Standard deviation by which images are normalised.",
        parser=parse_numbers,
        rich_help_panel=WHERE_THEY_START,
    ),
]
InitOption = Annotated[
    Init,
    typer.Option(
        metavar="NAME",
        help="random; fit: closest to the old kernels; largest: at their largest cells; exact: at "
        "all cells, for the same outputs with more parameters; auto: fit for trained weights, else "
        "random.",
        rich_help_panel=WHERE_THEY_START,
    ),
]
PositionsOption = Annotated[
    Positions,
    typer.Option(
        metavar="normal|kernel|uniform",
        help="Random positions: normal, N(0, 0.5 cells); kernel and uniform, spread over the old "
        "kernel or the window.",
        rich_help_panel=WHERE_THEY_START,
    ),
]
AuthorsVersionOption = Annotated[
    AuthorsVersion | None,
    typer.Option(
        metavar="v0|v1",
        help="Version of the authors' layers, for a checkpoint of theirs without SIG "
        "(default: v0, as released).",
        rich_help_panel=WHERE_THEY_START,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Fit and compare on this device, such as cuda (default: cpu).",
        rich_help_panel=WHERE_THEY_START,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, help="Seed of all random values.", rich_help_panel=WHERE_THEY_START
    ),
]

# Checkpoints

CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A folder that dcls-convert wrote.",
        callback=check_folder,
        show_default=False,
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        metavar="",
        help="Import and run the code that the checkpoint names as its model, which must be your "
        "own: do not use this on folders that others made.",
    ),
]

Unconverted = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The unconverted network, for a checkpoint of your own model that does not name it: "
        "package.module:factory, which imports and runs your code.",
    ),
]

# Output

InputSize = Annotated[
    Any,
    typer.Option(
        metavar="CxHxW",
        help="Image size for MACs and exports (default: the model's own). For other inputs, "
        "use Python: convert_(model, example_inputs=...).",
        parser=parse_input_size,
        rich_help_panel=OUTPUT,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        metavar="",
        help="Replace what an earlier run wrote.",
        rich_help_panel=OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        metavar="",
        help="Print one JSON object, also for an error.",
        rich_help_panel=OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        metavar="",
        help="Print no progress and no report, only the output's name.",
        rich_help_panel=OUTPUT,
    ),
]
