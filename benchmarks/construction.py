"""How long kernel construction takes, forward and backward, and how much memory.

    python benchmarks/construction.py

Ours beside the authors' package (`dcls` 0.1.1: v0, v1, gauss), the listing in the paper's appendix,
and a floor: to allocate and fill a tensor of the kernel's size, and to sum its gradient once. Given
are the weights, positions inside the window, and a dense gradient of the kernel; asked for are the
kernel and the gradients of all parameters. Float32.

Every case and implementation runs in a process of its own: a small backward of something else
starts torch's threads and autograd, then memory is taken as the start, one forward and backward
warms up, and the rest are timed. Peak memory is the most of all these passes, over the start: on
Linux, of the resident memory (VmHWM in /proc/self/status, reset through /proc/self/clear_refs); on
a GPU, of what torch allocated.
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
    fresh_process,
    geometric_mean,
    markdown_table,
    peak_bytes,
    reset_peak_bytes,
    resident_bytes,
    store,
    stored_rows,
    summary,
)

SECONDS = 2.0  # of timed passes for each case and implementation
REPETITIONS = 100  # at most
WARM_UPS = 10  # of what is quick
MIN_REPETITIONS = 3
MIN_SLOW_REPETITIONS = 2  # of passes of more than SLOW seconds
SLOW = 8.0
SEED = 0
PAGE = 4096  # bytes; less than it is not seen
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


# In a process of its own. `Any` stands for tensors, since torch is not imported before.

Construct = Callable[..., Any]  # (weight, positions[, sigma]) -> kernel


def measure(case: Case, implementation: str, device: str, threads: int) -> dict[str, Any]:
    """Times of forward and backward in seconds, peak memory over the start in bytes."""
    import torch

    torch.set_num_threads(threads)
    inputs, gradient = given(case, implementation, device)
    construct = maker(implementation)(case, device)
    warm_up(device)
    start = memory(device, reset=True)
    before = sum(one_pass(construct, inputs, gradient, device))
    least = MIN_SLOW_REPETITIONS if before > SLOW else MIN_REPETITIONS
    for _ in range(WARM_UPS if before < SECONDS / REPETITIONS else 0):
        before = sum(one_pass(construct, inputs, gradient, device))
    repetitions = max(least, min(REPETITIONS, int(SECONDS / max(before, 1e-9))))
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


def given(case: Case, implementation: str, device: str) -> tuple[list[Any], Any]:
    """Weight, positions, perhaps sigma, and the kernel's gradient.

    Those with a gradient of their own are leaves.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(case.shape, generator=generator)
    cells = torch.tensor(case.size).view(2, 1, 1, 1)
    positions = torch.rand(2, *case.shape, generator=generator) * (cells - 1) - cells // 2
    gradient = torch.randn(*case.shape[:2], *case.size, generator=generator)
    inputs = [weight, positions]
    if implementation in WITH_SIGMA:
        # Both have a deviation of half a cell: the authors add 0.27 to theirs.
        sigma = 0.23 if implementation == "gauss" else 0.5
        inputs.append(torch.full_like(positions, sigma))
    return [tensor.to(device).requires_grad_() for tensor in inputs], gradient.to(device)


def warm_up(device: str) -> None:
    """Starts torch's threads, what autograd imports for given gradients (sympy, 30 MiB), and on a
    GPU its context.
    """
    import torch

    some = torch.ones(4, 100_000, device=device, requires_grad=True)
    torch.autograd.grad(some.exp(), some, torch.ones_like(some))
    if device == "cuda":
        torch.cuda.synchronize()


def one_pass(
    construct: Construct, inputs: Sequence[Any], gradient: Any, device: str
) -> tuple[float, float]:
    """Seconds of forward and backward."""
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
    """In use now, from where the peak counts again; without `reset`, the peak since."""
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


def maker(implementation: str) -> Callable[[Case, str], Construct]:
    """What makes the implementation for a case on a device; nothing of that is timed."""
    if implementation in AUTHORS:
        return lambda case, device: by_authors(case, implementation)
    return {"ours": ours, "ours gaussian": ours, "listing": by_listing, "floor": floor}[
        implementation
    ]


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
    """The listing's algorithm: a mask over window x elements for each of four corners, their
    interpolation, a sum.
    """
    import torch

    height, width = case.size
    rows = torch.arange(height, device=device).view(-1, 1, 1, 1, 1)
    columns = torch.arange(width, device=device).view(1, -1, 1, 1, 1)
    centre = torch.tensor([width // 2, height // 2], device=device).view(
        2, 1, 1, 1
    )  # its first axis is the column

    def construct(weight: Any, positions: Any) -> Any:
        places = positions + centre
        below = places.detach().floor()
        across, down = places - below
        across, down = (one.expand(height, width, *weight.shape) for one in (across, down))
        left, right = columns == below[0], columns == below[0] + 1
        top, bottom = rows == below[1], rows == below[1] + 1
        corner, lower, beside, opposite = (
            torch.where(one * other, 1.0, 0.0)
            for one, other in [(left, top), (left, bottom), (right, top), (right, bottom)]
        )
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
    available, _, _ = fresh_process("-c", code)
    if available:
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
    return [one for one in IMPLEMENTATIONS if one not in AUTHORS]


def run(output: Path, threads: int) -> None:
    settings = {
        "threads": threads,
        "dtype": "float32",
        "seconds_each": SECONDS,
        "repetitions_at_most": REPETITIONS,
        "peak": "CPU: VmHWM over VmRSS at the start, after clear_refs; "
        "CUDA: max_memory_allocated over the start",
    }
    command = f"python benchmarks/construction.py --threads {threads}"
    rows = stored_rows(output, settings=settings)
    done = {(row["case"], row["implementation"], row["device"]) for row in rows}
    here = implementations_here()
    for device in devices_here():
        for case in CASES:
            for implementation in here:
                if (case, implementation, device) in done:
                    continue
                row = {"case": case, "implementation": implementation, "device": device}
                arguments = ["--one", case, implementation, device, "--threads", str(threads)]
                try:
                    measured, _, _ = fresh_process(__file__, *arguments)
                except FreshProcessError as error:  # as where memory is short
                    print(f"{case}, {implementation}, {device}: {error}", file=sys.stderr)
                    continue
                rows.append({**row, **measured})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                store(output, command=command, settings=settings, rows=rows, packages=PACKAGES)


# The tables.

Measured = dict[tuple[str, str], dict[str, Any]]  # by case and implementation


def tables(result: dict[str, Any]) -> Iterator[str]:
    hardware = result["hardware"]
    for device in dict.fromkeys(row["device"] for row in result["rows"]):
        name = hardware.get("gpu", "CUDA") if device == "cuda" else "CPU"
        rows = {
            (row["case"], row["implementation"]): row
            for row in result["rows"]
            if row["device"] == device
        }
        yield from ["", f"Forward + backward on {name}, ms: median (quartiles)", "", times(rows)]
        yield from ["", "Peak memory over the start, MiB", "", memories(rows)]
        yield from [
            "",
            "How many times less ours takes (floor: how many times more than it)",
            "",
            ratios(rows),
        ]


def _by_case(rows: Measured, cell: Callable[[dict[str, Any]], str]) -> str:
    shown = [one for one in IMPLEMENTATIONS if any(key[1] == one for key in rows)]
    body = [
        [case, *(cell(rows[case, one]) if (case, one) in rows else "" for one in shown)]
        for case in dict.fromkeys(case for case, _ in rows)
    ]
    return markdown_table(["case", *(IMPLEMENTATIONS[one] for one in shown)], body)


def times(rows: Measured) -> str:
    def cell(row: dict[str, Any]) -> str:
        low, middle, high = (
            row["seconds"][key] * 1e3 for key in ("first_quartile", "median", "third_quartile")
        )
        return f"{middle:.3g} ({low:.3g} to {high:.3g})"

    return _by_case(rows, cell)


def memories(rows: Measured) -> str:
    return _by_case(rows, lambda row: f"{row['peak_bytes'] / MIB:.1f}")


RATIOS = {  # heading: of what, by what
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
    def value(case: str, quantity: str, one: str, other: str) -> float | None:
        if (case, one) not in rows or (case, other) not in rows:
            return None
        pair = [rows[case, name][quantity] for name in (one, other)]
        top, bottom = (
            float(number["median"]) if isinstance(number, dict) else max(number, PAGE)
            for number in pair
        )
        return top / bottom

    cases = list(dict.fromkeys(case for case, _ in rows))
    found = {heading: [value(case, *what) for case in cases] for heading, what in RATIOS.items()}
    body = [
        [case, *(_times(found[heading][index]) for heading in RATIOS)]
        for index, case in enumerate(cases)
    ]
    means = [
        geometric_mean(known) if (known := [one for one in found[h] if one]) else None
        for h in RATIOS
    ]
    return markdown_table(["case", *RATIOS], [*body, ["geometric mean", *map(_times, means)]])


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS / "construction.json",
        help="goes on from what it holds",
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="print the tables of the stored results, measure nothing",
    )
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, implementation, device = options.one
        print(json.dumps(measure(CASES[case], implementation, device, options.threads)))
        return
    if not options.table:
        run(options.output, options.threads)
    print("\n".join(tables(json.loads(options.output.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
