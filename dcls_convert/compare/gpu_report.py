"""The results of a GPU check: its rows, its report, and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..depthwise.choice import VARIABLE, Preference
from ..errors import is_out_of_memory
from ..records import Record
from ..text import one_line

# proof: accuracy of the matrix products; network, layer: times.
Part = Literal["proof", "network", "layer"]
Work = Literal["inference", "training"]

MIN_GAIN = 1.1  # the verdict names another algorithm only if it is this many times as fast
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRow:
    """One measurement. None means not measured, or not applicable."""

    part: Part
    what: str
    # The requested algorithm; None if the layers are not computed by this package.
    way: Preference | None = None
    work: Work | None = None
    batch: int
    error: float | None = None  # largest relative error of the output and the gradients
    ms: float | None = None  # median time of a call
    images_per_second: float | None = None
    peak_mib: float | None = None  # peak memory allocated by torch, weights included
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport(Record):
    """All rows, and the environment in which they were measured."""

    format: int = 1
    model: str
    device: str  # name
    torch: str  # version
    backend: str | None  # version of CUDA or ROCm
    dtype: str  # autocast dtype of networks and layers
    rows: tuple[GpuRow, ...]
    not_begun: int  # timings that did not fit into the time limit
    choices: tuple[str, ...]  # algorithms that the package itself chose in the networks
    verdict: str


def verdict(rows: Sequence[GpuRow]) -> str:
    """Return one line of advice: do nothing, or override the package's choice of algorithms."""
    for row in rows:
        if row.part == "proof" and row.problem is not None:
            return f"matrix products are wrong or fail here; export {VARIABLE}=torch, and report it"
    timed = [row for row in rows if row.ms is not None]
    # By kind, since a retry with a smaller batch can give a batch size several rows.
    own_choices = {}
    for row in timed:
        if row.what == "converted" and row.way == "auto":
            own_choices[row.what, row.work, row.batch] = row
    if not own_choices:
        return "no converted network was timed"
    advice = []
    for kind, own in own_choices.items():
        rivals = [own]
        for row in timed:
            if row.way != own.way and (row.what, row.work, row.batch) == kind:
                rivals.append(row)
        best = min(rivals, key=_ms)
        gain = _ms(own) / _ms(best)
        if gain >= MIN_GAIN:
            advice.append(f"{best.way} for {own.work} at batch {own.batch} ({gain:.1f} x as fast)")
    if not advice:
        return "nothing to do: no algorithm is clearly faster than the package's own choice"
    return f"export {VARIABLE} as {', '.join(advice)}"


def _ms(row: GpuRow) -> float:
    assert row.ms is not None
    return row.ms


def failure_text(failure: Exception) -> str:
    """Return what a row says about a measurement that failed."""
    if is_out_of_memory(failure):
        return OUT_OF_MEMORY
    return f"{type(failure).__name__}: {one_line(failure)[:200]}"
