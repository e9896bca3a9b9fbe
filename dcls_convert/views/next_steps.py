"""Lines below the report: what was written, how to train it, and how the outputs changed."""

import textwrap
from pathlib import Path

from rich.text import Text

from ..checkpoints.card import training_code, with_folder
from ..conversion.convert import Conversion
from ..conversion.provenance import provenance_of
from ..conversion.request import FROM_CONVERTED, FROM_ELEMENTS
from ..options import EXACT
from ..reports.outcome import outcome_sentences

NEAR_THE_CENTRE = (
    "Elements start near the centre, as in the paper, and need long training to move.",
    "In a short training, also try --positions kernel.",
)
NEAR_THE_OLD_KERNEL = (
    "Elements start near the old kernel, and need long training to move.",
    "To learn what lies far back, also try --positions uniform.",
)


def next_steps(conversion: Conversion, output: Path) -> list[str | Text]:
    """Return the lines below the report: the folder, how to train it, how outputs changed."""
    request = conversion.request
    lines: list[str | Text] = ["", f"Wrote {output}, from {_start_text(conversion)}."]
    if conversion.start_name == "random" and request.start.positions == "normal":
        is_one_sided = any(layer.grow for layer in conversion.report.layers)
        lines += NEAR_THE_OLD_KERNEL if is_one_sided else NEAR_THE_CENTRE
    trained = request.network.trained
    if conversion.start_name == FROM_CONVERTED and conversion.model is not None:
        trained = (provenance_of(conversion.model) or {}).get("weights") != "random"
    heading = "Fine-tune it:" if trained else "Train it:"
    lines.append(Text(f"{heading}\n", style="bold"))
    code = with_folder(training_code(conversion.report.model, trained=trained), output)
    lines += textwrap.indent(code, "    ").splitlines()
    outcome = conversion.report.outcome
    if outcome is None:
        return lines
    lines += ["", *outcome_sentences(outcome)]
    return lines


def _start_text(conversion: Conversion) -> str:
    """Say what the new layers start from, as part of a sentence."""
    request = conversion.request
    random_start = f"random initialisation (seed {request.network.seed})"
    if conversion.start_name == FROM_CONVERTED:
        return "the converted network; costs are relative to the unconverted one"
    if conversion.start_name == FROM_ELEMENTS:
        return "the authors' elements and positions, so the outputs are the same as their network's"
    if conversion.start_name == EXACT:
        weights = "the trained weights" if request.network.trained else random_start
        every_cell = "with one element in each cell of the old kernels"
        return f"{weights}, {every_cell}, so the outputs do not change"
    if not request.network.trained:
        return f"{random_start}, without trained weights"
    if conversion.start_name == "random":
        return "trained weights, but random elements in the new layers"
    if conversion.start_name == "largest":
        return "the trained kernels, reduced to their largest cells"
    if request.start.calibration is not None:
        return "the trained network, fitted to its outputs on your images"
    return "the trained kernels, to which the elements are fitted"
