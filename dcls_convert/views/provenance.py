"""Where a converted network comes from, in sentences."""

from ..pipeline.provenance import Provenance
from ..text import printable, shown

DIGITS_SHOWN = 16  # of a hash; config.json has all


def provenance_sentences(provenance: Provenance) -> list[str]:
    """What the conversion started from, and by which versions it was made; not the command."""
    start = f"Start: {provenance.init}, seed {provenance.seed}"
    if provenance.positions is not None:
        start += f", positions {provenance.positions}"
    sentences = [f"{start}.", _weights(provenance)]
    images = provenance.calibration
    if images is not None:
        text = f"Calibration: {images.number:,} images"
        if images.names is not None:
            text += f" (SHA-256 of their names: {_short(images.names)})"
        sentences.append(f"{text}.")
    versions = ", ".join(f"{name} {value}" for name, value in provenance.versions.items())
    sentences.append(f"Versions: {versions}.")
    return list(map(printable, sentences))


def command_text(provenance: Provenance) -> str:
    """The command or call, on one line; without one, the options as they were stated."""
    if provenance.command is not None:
        return printable(provenance.command)
    return printable(", ".join(f"{name}={value}" for name, value in provenance.request.items()))


def _weights(provenance: Provenance) -> str:
    """The weights before the conversion."""
    text = f"Weights before the conversion: {shown(provenance.weights.source)}"
    if provenance.weights.tensors is not None:
        text += f" (SHA-256 of the tensors: {_short(provenance.weights.tensors)})"
    return f"{text}."


def _short(digest: str) -> str:
    return f"{digest[:DIGITS_SHOWN]}..."
