"""What a conversion ends with in the terminal: where the layers start from, what to do next, what changed."""

from pathlib import Path

from rich.text import Text

from ..checkpoints.save import training_code
from ..errors import filled
from ..options import EXACT
from ..pipeline import Conversion, Job
from .report import outcome_sentences


def next_steps(job: Job, done: Conversion, output: Path) -> list[str | Text]:
    """Lines for the terminal, below the report."""
    code = filled(training_code(done.report.model), output).splitlines()
    lines: list[str | Text] = ["", f"Wrote {output}, from {_start(job)}.", Text("Fine-tune it:\n", style="bold")]
    lines += [f"    {line}" if line else "" for line in code]
    outcome = done.report.outcome
    if outcome:
        lines += ["", *outcome_sentences(done.report)]
    if done.moved is not None and not (outcome and outcome.images):
        lines.append(f"Outputs for random images moved by {100 * done.moved:.2g} %.")
    return lines


def _start(job: Job) -> str:
    """What the new layers start from."""
    if job.elements is not None:
        return "the authors' elements and positions; it gives the outputs of their network"
    if job.how == EXACT:
        source = "the trained weights" if job.trained else f"random initialisation (seed {job.seed})"
        return f"{source}; every old cell is an element at its place, so that the outputs are the old ones"
    if not job.trained:
        return f"random initialisation (seed {job.seed}), as in the paper; --pretrained or --checkpoint load weights"
    if job.how == "random":
        return "trained weights, but random elements in the new layers"
    if job.how == "largest":
        return "the trained kernels, reduced to their largest cells"
    return f"the trained kernels, with elements fitted to {'what they give for images' if job.calibration else 'them'}"
