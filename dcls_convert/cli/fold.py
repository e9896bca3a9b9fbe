"""What `dcls-convert fold` prints."""

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..checkpoints.records import write_json
from ..export.formats import FORMATS, fold_checkpoint
from ..export.job import Folded
from ..layers.geometry import size_text
from ..options import FoldFormat


def run_fold(
    checkpoint: Path,
    format: FoldFormat,
    output: Path | None,
    *,
    force: bool,
    trust_code: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fold, then say what was written: as text, as JSON, or (quiet) its name alone."""
    progress = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    # What models and their loaders print is progress, and must not get into the results.
    with redirect_stdout(sys.stderr):
        folded = fold_checkpoint(
            checkpoint,
            format,
            output,
            force=force,
            trust_code=trust_code,
            step=lambda text: progress.print(Text(f"{checkpoint}: {text}")),
        )
    if as_json:
        sys.stdout.write(write_json(asdict(folded)))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in [folded.output] if quiet else _lines(folded):
        console.print(Text(line))


def _lines(folded: Folded) -> list[str]:
    grown = f" → {folded.params_after:,}, since kernels are now stored with all cells of their windows"
    return [
        f"Folded {folded.layers} layers of {folded.checkpoint}; parameters {folded.params_before:,}"
        f"{grown if folded.params_after != folded.params_before else ', as before: it was folded already'}.",
        f"Outputs equal those of the checkpoint, with a relative error of {folded.relative_error:.1e}.",
        f"Wrote {folded.output}: {_what(folded)}.",
        "",
        *[f"    {line}" if line else "" for line in folded.loading.splitlines()],
    ]


def _what(folded: Folded) -> str:
    if folded.kind == "stock timm":
        sizes = ", ".join(f"{name}={value}" for name, value in (folded.kernel_args or {}).items())
        return f"timm loads it by itself{', with ' + sizes if sizes else ''}; dcls-convert is not needed"
    if folded.kind == "dcls":
        return f"timm loads it where dcls-convert is installed, because {folded.note}"
    what, images = FORMATS[folded.format].noun, f"images of {size_text(folded.input_size)}"
    if folded.batch is None:
        return f"{what} for {images}, any number at a time"
    return f"{what} for {images}, {folded.batch} at a time, because with any number {folded.note}"
