"""Options and arguments that several commands share, with their help.

Imports no torch: --help reads this file.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..file_checks import check_folder
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
from .parsing import (
    parse_budget,
    parse_count,
    parse_input_size,
    parse_numbers,
    parse_window,
)

# Options in the groups of --help.
model_option = partial(typer.Option, rich_help_panel="What to convert")
elements_option = partial(typer.Option, rich_help_panel="How many elements")
start_option = partial(typer.Option, rich_help_panel="Where they start")
output_option = partial(typer.Option, rich_help_panel="Output")


def _load_rules(name: str) -> Any:
    """Load rules before the model, so that a mistake in them is reported at once."""
    if name == AUTO:
        return name
    from ..planning.rule_files import load_rules

    return load_rules(name)


# What to convert

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="convnext_tiny (timm first, then torchvision), timm:NAME, torchvision:NAME, "
        "hf-hub:REPO, local-dir:FOLDER, or package.module:factory, which imports and runs your "
        "own code; or a folder of dcls-convert, for a larger window.",
        show_default=False,
    ),
]
Pretrained = Annotated[
    bool,
    model_option(
        "--pretrained",
        metavar="",
        help="Start from timm's or torchvision's trained weights.",
    ),
]
WeightsFile = Annotated[
    Path | None,
    model_option(
        "--checkpoint",
        metavar="FILE",
        help="Start from a safetensors or torch file (also of the DCLS authors).",
    ),
]
CheckpointKey = Annotated[
    str | None,
    model_option(
        metavar="KEY",
        help="Which weights of the file, if it holds several: ema, state_dict, encoder_q, ...",
    ),
]
NumClasses = Annotated[
    int | None,
    model_option(metavar="N", min=0, help="Classes of the model's head."),
]
InChans = Annotated[
    int | None,
    model_option(metavar="N", min=1, help="Input channels."),
]
ModelKwargs = Annotated[
    list[str] | None,  # for `parse_keywords`
    model_option(
        metavar="KEY=VALUE ...",
        help="More arguments of the model's function, stored in the folder: "
        "ls_init_value=0.1 drop_path_rate=0.2",
    ),
]
Rules = Annotated[
    str,
    model_option(
        metavar="FILE|NAME|auto",
        help="Rule file or built-in set; auto: the first of depthwise, conv3x3, dense3x3x3 and "
        "conv1d that matches.",
        callback=_load_rules,
    ),
]
Strict = Annotated[
    bool,
    model_option(
        "--strict",
        metavar="",
        help="Fail if a layer cannot take the size, instead of skipping the layer.",
    ),
]
PlanFolder = Annotated[
    Path | None,
    model_option(
        "--plan",
        metavar="FOLDER",
        help="Apply the plan of a folder to other weights of the same model.",
    ),
]

# How many elements

DilatedSize = Annotated[
    Any,
    elements_option(
        metavar="N|HxW|+N|auto",
        help="Window in which elements move: 17 or 17x9 cells; +4: each side four cells longer "
        f"than the kernel's; auto: the largest growth that adds at most "
        f"{MAX_ADDED_COST_PERCENT:g} % to the MACs, with windows of up to {MAX_WINDOW} cells, of "
        "which at least half fit their maps.",
        parser=parse_window,
    ),
]
KernelCount = Annotated[
    Any,
    elements_option(
        metavar="N|auto",
        help="Elements in a kernel; auto: as many as the budget allows.",
        parser=parse_count,
    ),
]
ScopeOption = Annotated[
    Scope,
    elements_option(
        metavar="model|error|auto",
        help="model: one element count for all layers; error: more elements where kernels need "
        "them; auto: error with --calibrate, else model.",
    ),
]
TieOption = Annotated[
    Tie,
    elements_option(metavar="stage|none", help="Which layers share their positions."),
]
Budget = Annotated[
    float,
    elements_option(
        metavar="PERCENT",
        help="Parameters for the new kernels, in percent of the weights that they replace.",
        parser=parse_budget,
    ),
]
InterpolationOption = Annotated[
    InterpolationName | None,
    elements_option(
        metavar="NAME",
        help=f"How an element spreads over the cells: {', '.join(INTERPOLATION_NAMES)} "
        f"(default: {DEFAULT_INTERPOLATION}).",
    ),
]

# Where they start

Calibrate = Annotated[
    Path | None,
    start_option(
        "--calibrate",
        metavar="FOLDER",
        help="Folder of images; match the network's outputs on them instead of its kernels.",
        exists=True,
        file_okay=False,
    ),
]
ImagesOption = Annotated[
    int | None,
    start_option(
        "--images",
        metavar="N",
        min=1,
        help="Images to use of --calibrate, evenly spread; some are held out to compare outputs on "
        f"(default: {CALIBRATION_IMAGES}).",
    ),
]
Mean = Annotated[
    Any,
    start_option(
        metavar="M,M,M",
        help="Mean by which images with values from 0 to 1 are normalised, one for all channels or "
        "one for each (default: the model's own).",
        parser=parse_numbers,
    ),
]
Std = Annotated[
    Any,
    start_option(
        metavar="S,S,S",
        help="Standard deviation by which images are normalised.",
        parser=parse_numbers,
    ),
]
InitOption = Annotated[
    Init,
    start_option(
        metavar="NAME",
        help="random; fit: closest to the old kernels; largest: at their largest cells; exact: at "
        "all cells, for the same outputs with more parameters; auto: fit for trained weights, else "
        "random.",
    ),
]
PositionsOption = Annotated[
    Positions,
    start_option(
        metavar="normal|kernel|uniform",
        help="Random positions: normal: N(0, 0.5 cells); kernel: uniform over the old kernel; "
        "uniform: uniform over the window.",
    ),
]
AuthorsVersionOption = Annotated[
    AuthorsVersion | None,
    start_option(
        metavar="v0|v1",
        help="Version of the authors' layers, for one of their files whose layers have no "
        "SIG (default: v0, as released).",
    ),
]
Device = Annotated[
    str | None,
    start_option(
        metavar="NAME",
        help="Fit and compare on this device, such as cuda (default: cpu).",
    ),
]
Seed = Annotated[
    int,
    start_option(metavar="N", min=0, help="Seed of all random values."),
]

# Folders that dcls-convert wrote

FolderArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
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
        help="Import and run the code that the folder names as its model, which must be your "
        "own: do not use this on folders that others made.",
    ),
]

Unconverted = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The unconverted network, if the folder does not say how to build it: "
        "package.module:factory, which imports and runs your code.",
    ),
]

# Output

InputSize = Annotated[
    Any,
    output_option(
        metavar="CxHxW",
        help="Image size for MACs and exports (default: the model's own). For other inputs, "
        "use Python: convert_(model, example_inputs=...).",
        parser=parse_input_size,
    ),
]
Force = Annotated[
    bool,
    output_option("--force", metavar="", help="Replace what an earlier run wrote."),
]
Json = Annotated[
    bool,
    output_option("--json", metavar="", help="Print one JSON object, also for an error."),
]
Quiet = Annotated[
    bool,
    output_option(
        "--quiet",
        "-q",
        metavar="",
        help="Print no progress and no report, only the output's name.",
    ),
]
