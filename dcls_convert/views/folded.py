"""What to say of a folded checkpoint: what was written, and how it is loaded."""

from ..depthwise.geometry import size_text
from ..export.folding import Folded
from ..export.formats import FORMATS
from ..tables import counted


def folded_lines(folded: Folded) -> list[str]:
    grown = f" → {folded.params_after:,}, since kernels are now stored with all cells of their windows"
    return [
        f"Folded {counted(folded.layers, 'layer')} of {folded.checkpoint}; parameters {folded.params_before:,}"
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
    images = f"{FORMATS[folded.format].noun} for images of {size_text(folded.input_size)}"
    if folded.batch is None:
        return f"{images}, any number at a time"
    return f"{images}, {folded.batch} at a time, because with any number {folded.note}"
