"""Options and arguments of several commands, and their help texts."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .typer_options import OUTPUT, checkpoint_argument, image_size, option

CheckpointFolder = Annotated[
    Path, checkpoint_argument("CHECKPOINT", "A folder that dcls-convert wrote.")
]
INPUT_SIZE_HELP = "Image size for MACs, exports and training (default: the model's own)."
InputSize = Annotated[Any, image_size(OUTPUT, INPUT_SIZE_HELP)]
Json = Annotated[bool, option(OUTPUT, "Print one JSON object.", "--json")]
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

UNCONVERTED_HELP = (
    "The unconverted network, for a checkpoint of your own model that does not name it: "
    "package.module:factory, which imports and runs your code."
)
