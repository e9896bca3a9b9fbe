"""Where a converted network comes from, in sentences."""

from ..conversion.provenance import Provenance
from ..text import printable, shortened

HASH_DIGITS = 16  # number of digits of a hash that are shown; config.json has all of them


def provenance_sentences(provenance: Provenance) -> list[str]:
    """Return sentences on the start, weights, images and versions of a conversion."""
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
    """Return the command as typed; from Python, the model and the stated options."""
    if provenance.command is not None:
        return printable(provenance.command)
    return printable(", ".join(f"{name}={value}" for name, value in provenance.request.items()))


def _weights(provenance: Provenance) -> str:
    """Say where the weights before the conversion came from."""
    text = f"Weights before the conversion: {shortened(provenance.weights.source)}"
    if provenance.weights.tensors is not None:
        text += f" (SHA-256 of the tensors: {_short(provenance.weights.tensors)})"
    return f"{text}."


def _short(digest: str) -> str:
    return f"{digest[:HASH_DIGITS]}..."
