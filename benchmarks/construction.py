"""Measure time and memory of kernel construction, forward and backward.

    python benchmarks/construction.py [--threads N] [--table]

Ours is compared with the authors' package (`dcls` 0.1.1: v0, v1, gauss), the listing in the paper's
appendix, and a floor, which allocates and fills a tensor of the kernel's size and sums its gradient
once. Inputs are the weights, positions inside the window, and a dense gradient of the kernel;
outputs are the kernel and the gradients of all parameters, in float32. Before anything is timed,
all but the floor must give the same kernels for a small case.

Every case and implementation runs in a process of its own. A small, unrelated backward pass starts
torch's threads and autograd, and the memory after it is the start. One forward and backward pass
warms up; the following passes are timed. Peak memory is the maximum over all these passes, less the
start: on Linux, of the resident memory (VmHWM in /proc/self/status, reset through
/proc/self/clear_refs); on a GPU, of the memory that torch allocated.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring import (
    MIB,
    RESULTS,
    FreshProcessError,
    Results,
    add_results_options_,
    geometric_mean,
    json_of_fresh,
    markdown_table,
    peak_bytes,
    quartiles_text,
    reset_peak_bytes,
    resident_bytes,
    run_fresh,
    script_parser,
    stored,
    stored_rows,
    summary,
)

SECONDS = 2.0  # of timed passes for each case and implementation
MAX_REPETITIONS = 100
WARM_UPS = 10  # of quick implementations
MIN_REPETITIONS = 3
MIN_SLOW_REPETITIONS = 2  # of passes that take longer than SLOW
SLOW = 8.0  # seconds
SEED = 0
PAGE = 4096  # bytes; smaller peaks cannot be measured
PACKAGES = ("torch", "dcls", "dcls-convert")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer in two dimensions."""

    shape: tuple[int, int, int]  # of its weight: out channels, in channels per group, elements
    size: tuple[int, int]  # of its window, in cells


CASES = {
    **{
        f"depthwise {channels}, 34 elements in 17x17": Case(shape=(channels, 1, 34), size=(17, 17))
        for channels in (96, 192, 384, 768)
    },
    **{
        f"dense {channels}x{channels}, 5 elements in 7x7": Case(
            shape=(channels, channels, 5), size=(7, 7)
        )
        for channels in (64, 256, 512)
    },
}
IMPLEMENTATIONS = {
    "ours": "ours, bilinear",
    "v0": "authors' v0",
    "v1": "authors' v1",
    "listing": "paper's listing",
    "ours gaussian": "ours, gaussian",
    "gauss": "authors' gauss",
    "floor": "floor",
}
AUTHORS = ("v0", "v1", "gauss")
WITH_SIGMA = ("ours gaussian", "gauss")
COLUMN_FIRST = ("v1", "gauss", "listing")  # positions[0] is the column; elsewhere it is the row
# Groups that must give the same kernels. The authors' agree with ours in square windows only.
AGREEING = (("ours", "v0", "v1", "listing"), ("ours gaussian", "gauss"))
SMALL_CASE = Case(shape=(4, 3, 5), size=(7, 7))
TOLERANCE = 1e-5  # of the largest value of a kernel


# Functions for a process of its own. `Any` stands for tensors: torch is imported there only.

Construct = Callable[..., Any]  # (weight, positions[, sigma]) -> kernel


def check_agreement(implementations: Sequence[str], device: str) -> None:
    """End the program if implementations of the same kernels differ."""
    import torch

    for group in AGREEING:
        kernels = {}
        for implementation in group:
            if implementation in implementations:
                inputs, _ = make_inputs(SMALL_CASE, implementation, device)
                with torch.no_grad():
                    construct = make_construct(SMALL_CASE, implementation, device)
                    kernels[implementation] = construct(*inputs)
        expected = kernels[group[0]]
        for implementation, kernel in kernels.items():
            error = float((kernel - expected).abs().max() / expected.abs().max())
            if not error <= TOLERANCE:
                sys.exit(f"error: kernels of {implementation} differ from ours by {error:.1e}")


def measure(case: Case, implementation: str, device: str, threads: int) -> dict[str, Any]:
    """Return times of forward and backward in seconds, and peak memory over the start in bytes."""
    import torch

    torch.set_num_threads(threads)
    inputs, gradient = make_inputs(case, implementation, device)
    construct = make_construct(case, implementation, device)
    warm_up(device)
    start = memory(device, reset=True)
    seconds = sum(one_pass(construct, inputs, gradient, device))
    min_repetitions = MIN_SLOW_REPETITIONS if seconds > SLOW else MIN_REPETITIONS
    if seconds < SECONDS / MAX_REPETITIONS:
        for _ in range(WARM_UPS):
            seconds = sum(one_pass(construct, inputs, gradient, device))
    repetitions = max(min_repetitions, min(MAX_REPETITIONS, int(SECONDS / max(seconds, 1e-9))))
    passes = [one_pass(construct, inputs, gradient, device) for _ in range(repetitions)]
    peak = memory(device, reset=False) - start
    forward, backward = zip(*passes, strict=True)
    return {
        "forward_seconds": summary(forward),
        "backward_seconds": summary(backward),
        "seconds": summary([sum(both) for both in passes]),
        "peak_bytes": peak,
        "kernel_bytes": gradient.numel() * gradient.element_size(),
    }


def make_inputs(case: Case, implementation: str, device: str) -> tuple[list[Any], Any]:
    """Return the inputs (weight, positions and, for some, sigma), and the kernel's gradient.

    Each input is a leaf. Positions are the same for all implementations, but each gets the order of
    axes that it expects.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(case.shape, generator=generator)
    cells = torch.tensor(case.size).view(2, 1, 1, 1)
    positions = torch.rand(2, *case.shape, generator=generator) * (cells - 1) - cells // 2
    gradient = torch.randn(*case.shape[:2], *case.size, generator=generator)
    if implementation in COLUMN_FIRST:
        positions = positions.flip(0)
    inputs = [weight, positions]
    if implementation in WITH_SIGMA:
        # The deviation is half a cell for both: the authors add 0.27 to theirs.
        sigma = 0.23 if implementation == "gauss" else 0.5
        inputs.append(torch.full_like(positions, sigma))
    return [tensor.to(device).requires_grad_() for tensor in inputs], gradient.to(device)


def warm_up(device: str) -> None:
    """Start torch's threads and, on a GPU, its context.

    A backward pass with a given gradient also makes autograd import sympy (30 MiB).
    """
    import torch

    tensor = torch.ones(4, 100_000, device=device, requires_grad=True)
    torch.autograd.grad(tensor.exp(), tensor, torch.ones_like(tensor))
    if device == "cuda":
        torch.cuda.synchronize()


def one_pass(
    construct: Construct, inputs: Sequence[Any], gradient: Any, device: str
) -> tuple[float, float]:
    """Return the seconds of forward and backward."""
    import torch

    def backward() -> None:
        if kernel.requires_grad:
            torch.autograd.grad(kernel, inputs, gradient)
        else:
            gradient.sum()

    if device == "cuda":
        event: Any = torch.cuda.Event
        marks = [event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        kernel = construct(*inputs)
        marks[1].record()
        backward()
        marks[2].record()
        torch.cuda.synchronize()
        return marks[0].elapsed_time(marks[1]) / 1e3, marks[1].elapsed_time(marks[2]) / 1e3
    start = time.perf_counter()
    kernel = construct(*inputs)
    middle = time.perf_counter()
    backward()
    return middle - start, time.perf_counter() - middle


def memory(device: str, *, reset: bool) -> int:
    """With `reset`, reset the peak and return the bytes in use; without, return the peak."""
    import torch

    if device == "cuda":
        if not reset:
            return torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not reset:
        return peak_bytes()
    reset_peak_bytes()
    return resident_bytes()


def make_construct(case: Case, implementation: str, device: str) -> Construct:
    """Prepare an implementation for a case on a device; this is not timed."""
    if implementation in AUTHORS:
        return by_authors(case, implementation)
    makers = {"ours": ours, "ours gaussian": ours, "listing": by_listing, "floor": floor}
    return makers[implementation](case, device)


def ours(case: Case, device: str) -> Construct:
    from dcls_convert.layers.construction import construct_kernel

    def construct(weight: Any, positions: Any, sigma: Any = None) -> Any:
        interpolation = "bilinear" if sigma is None else "gaussian"
        return construct_kernel(
            weight, positions, case.size, interpolation=interpolation, sigma=sigma
        )

    return construct


def by_authors(case: Case, version: str) -> Construct:
    import DCLS.construct.modules as authors  # type: ignore[import-untyped]

    out_channels, in_channels, count = case.shape
    constructor = authors.ConstructKernel2d(out_channels, in_channels, 1, count, case.size, version)

    def construct(weight: Any, positions: Any, sigma: Any = None) -> Any:
        return constructor(weight, positions, sigma)

    return construct


def by_listing(case: Case, device: str) -> Construct:
    """Return the listing's algorithm: it makes a mask over window x elements for each of four
    corners, interpolates between them, and sums over the elements.
    """
    import torch

    height, width = case.size
    rows = torch.arange(height, device=device).view(-1, 1, 1, 1, 1)
    columns = torch.arange(width, device=device).view(1, -1, 1, 1, 1)
    centre = torch.tensor([width // 2, height // 2], device=device).view(2, 1, 1, 1)

    def construct(weight: Any, positions: Any) -> Any:
        places = positions + centre
        below = places.detach().floor()
        across, down = places - below
        across = across.expand(height, width, *weight.shape)
        down = down.expand(height, width, *weight.shape)
        left = columns == below[0]
        right = columns == below[0] + 1
        top = rows == below[1]
        bottom = rows == below[1] + 1
        corner = torch.where(left * top, 1.0, 0.0)
        lower = torch.where(left * bottom, 1.0, 0.0)
        beside = torch.where(right * top, 1.0, 0.0)
        opposite = torch.where(right * bottom, 1.0, 0.0)
        parts = corner + across * down * (corner - lower - beside + opposite)
        parts = parts + across * (beside - corner) + down * (lower - corner)
        return (weight * parts).sum(4).permute(2, 3, 0, 1)

    return construct


def floor(case: Case, device: str) -> Construct:
    import torch

    def construct(weight: Any, positions: Any) -> Any:
        return torch.empty(*case.shape[:2], *case.size, device=device).fill_(0.0)

    return construct


# The run.


def devices_here() -> Iterator[str]:
    yield "cpu"
    code = "import torch; print(str(torch.cuda.is_available()).lower())"
    if json_of_fresh(["-c", code]):
        yield "cuda"
    else:
        print("CUDA skipped: torch sees no GPU here", file=sys.stderr)


def implementations_here() -> list[str]:
    if find_spec("DCLS") is not None:
        return list(IMPLEMENTATIONS)
    print(
        "the authors' package is not installed (pip install dcls): its rows are left out",
        file=sys.stderr,
    )
    return [name for name in IMPLEMENTATIONS if name not in AUTHORS]


def run(output: Path, threads: int) -> None:
    """Measure and store what is not stored yet."""
    settings = {
        "threads": threads,
        "dtype": "float32",
        "seconds_each": SECONDS,
        "repetitions_at_most": MAX_REPETITIONS,
        "peak": "CPU: VmHWM over VmRSS at the start, after clear_refs; "
        "CUDA: max_memory_allocated over the start",
    }
    results = Results(
        path=output,
        command=f"python benchmarks/construction.py --threads {threads}",
        settings=settings,
        rows=stored_rows(output, settings=settings),
        packages=PACKAGES,
    )
    done = {(row["case"], row["implementation"], row["device"]) for row in results.rows}
    here = implementations_here()
    for device in devices_here():
        run_fresh([sys.executable, __file__, "--check", device, *here])
        for case in CASES:
            for implementation in here:
                if (case, implementation, device) in done:
                    continue
                row = {"case": case, "implementation": implementation, "device": device}
                arguments = ["--one", case, implementation, device, "--threads", str(threads)]
                try:
                    measured = json_of_fresh([__file__, *arguments])
                except FreshProcessError as error:  # for example, if memory is short
                    print(f"{case}, {implementation}, {device}: {error}", file=sys.stderr)
                    continue
                results.add_(row | measured)


# The tables.

Measured = dict[tuple[str, str], dict[str, Any]]  # by case and implementation


def tables(result: dict[str, Any]) -> Iterator[str]:
    hardware = result["hardware"]
    for device in dict.fromkeys(row["device"] for row in result["rows"]):
        name = hardware.get("gpu", "CUDA") if device == "cuda" else "CPU"
        rows: Measured = {}
        for row in result["rows"]:
            if row["device"] == device:
                rows[row["case"], row["implementation"]] = row
        yield from ["", f"Forward + backward on {name}, ms: median (quartiles)", "", times(rows)]
        yield from ["", "Peak memory over the start, MiB", "", memories(rows)]
        yield from [
            "",
            "How many times less ours takes (floor: how many times more than it)",
            "",
            ratios(rows),
        ]


def _by_case(rows: Measured, cell: Callable[[dict[str, Any]], str]) -> str:
    measured = {implementation for _, implementation in rows}
    shown = [implementation for implementation in IMPLEMENTATIONS if implementation in measured]
    lines = []
    for case in _cases(rows):
        line = [case]
        for implementation in shown:
            row = rows.get((case, implementation))
            line.append("" if row is None else cell(row))
        lines.append(line)
    return markdown_table(["case", *(IMPLEMENTATIONS[name] for name in shown)], lines)


def _cases(rows: Measured) -> list[str]:
    return list(dict.fromkeys(case for case, _ in rows))


def times(rows: Measured) -> str:
    return _by_case(rows, lambda row: quartiles_text(row["seconds"], ".3g", scale=1e3))


def memories(rows: Measured) -> str:
    return _by_case(rows, lambda row: f"{row['peak_bytes'] / MIB:.1f}")


RATIOS = {  # heading: quantity, implementation in the numerator, one in the denominator
    "time, v0": ("seconds", "v0", "ours"),
    "time, v1": ("seconds", "v1", "ours"),
    "time, listing": ("seconds", "listing", "ours"),
    "time, gauss": ("seconds", "gauss", "ours gaussian"),
    "memory, v0": ("peak_bytes", "v0", "ours"),
    "memory, v1": ("peak_bytes", "v1", "ours"),
    "memory, gauss": ("peak_bytes", "gauss", "ours gaussian"),
    "time, floor": ("seconds", "ours", "floor"),
}


def ratios(rows: Measured) -> str:
    lines = [[case] for case in _cases(rows)]
    means = ["geometric mean"]
    for quantity, numerator, denominator in RATIOS.values():
        known = []
        for line in lines:
            case = line[0]
            if (case, numerator) not in rows or (case, denominator) not in rows:
                line.append("")
                continue
            numerator_amount = _amount(rows[case, numerator], quantity)
            ratio = numerator_amount / _amount(rows[case, denominator], quantity)
            line.append(_times(ratio))
            known.append(ratio)
        means.append(_times(geometric_mean(known)) if known else "")
    return markdown_table(["case", *RATIOS], [*lines, means])


def _amount(row: dict[str, Any], quantity: str) -> float:
    """Return the median seconds, or the bytes, but at least one page."""
    if quantity == "seconds":
        return float(row["seconds"]["median"])
    return float(max(row[quantity], PAGE))


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    add_results_options_(parser, RESULTS / "construction.jsonl")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # case, implementation, device
    parser.add_argument("--check", nargs="+", help=argparse.SUPPRESS)  # device, implementations
    options = parser.parse_args()
    if options.check:
        device, *implementations = options.check
        check_agreement(implementations, device)
        return
    if options.one:
        case, implementation, device = options.one
        print(json.dumps(measure(CASES[case], implementation, device, options.threads)))
        return
    if not options.table:
        run(options.output, options.threads)
    print("\n".join(tables(stored(options.output))))


if __name__ == "__main__":
    main()
