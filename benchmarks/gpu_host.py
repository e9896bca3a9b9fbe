"""Measure the Python time of a converted layer's step, without a GPU.

    python benchmarks/gpu_host.py [--rounds N] [--profile]

At small batches, a GPU waits for Python. Here, kernels are compiled and launched as on an H100 that
is not there, where launches do nothing (fake_gpu.py). Needs Linux and a C compiler. All ways take
turns in each round; trust the ratios.

- layer: forward and backward of a converted depthwise layer under autocast, as in ConvNeXt-T.
- by Triton's launches: the host's work of the sketch that docs/speed.md has the numbers of, which
  is 12 launches by `kernel[grid](...)`, 14 allocations, two casts and a sum, in one
  autograd.Function.
- empty: an autograd.Function that does nothing, the least that a step can take.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from fake_gpu import COMPILER, FakeGpu
from measuring import markdown_table
from torch import Tensor
from torch.autograd import Function

CHANNELS = 96
STEPS = 50  # of each way in a round
Step = Callable[[], object]


# The sketch's launches, as the package's kernels with as many arguments.
SKETCH_FORWARD = ("pack", "pack", "pack", "convolve_blocks", "pack")
SKETCH_BACKWARD = (
    "pack",
    "pack",
    "convolve_blocks",
    "pack",
    "gradient_of_bank",
    "gradient_of_bank",
    "element_gradients_of_bank",
)


class ByTriton(Function):
    """The sketch's launches by Triton's own way, on tensors of earlier launches."""

    launches: ClassVar[dict[str, tuple[Any, tuple[Tensor, ...]]]] = {}  # by their kernels' names

    @classmethod
    def launch(cls, names: tuple[str, ...], allocations: int) -> None:
        for _ in range(allocations):
            torch.empty((CHANNELS, 1, 64), dtype=torch.bfloat16, device="cpu")
        for name in names:
            launch, tensors = cls.launches[name]
            launch.kernel[launch.grid](*tensors, *launch.arguments, **launch.options)

    @staticmethod
    def forward(ctx: Any, images: Tensor, *parameters: Tensor) -> Tensor:
        images = images.to(torch.bfloat16)
        ByTriton.launch(SKETCH_FORWARD, allocations=5)
        ctx.save_for_backward(images, *parameters)
        return torch.empty_like(images)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        _, *parameters = ctx.saved_tensors
        gradient = gradient.to(torch.float32)
        ByTriton.launch(SKETCH_BACKWARD, allocations=8)
        gradient.sum((0, 2, 3), dtype=torch.float32)
        return gradient, *parameters


class Empty(Function):
    """Nothing."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return images.view_as(images)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *ctx.saved_tensors


def make_ways(gpu: FakeGpu) -> dict[str, Step]:
    """Return a step of each way."""
    from dcls_convert.depthwise.launching import Launch
    from dcls_convert.layers.dcls_conv import DclsConv2d

    layer = DclsConv2d(
        CHANNELS, CHANNELS, groups=CHANNELS, kernel_count=34, dilated_kernel_size=17, padding=8
    )
    images = torch.randn(1, CHANNELS, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    leaves = [images, *layer.parameters()]

    def step_of(function: Callable[..., Tensor], *parameters: Tensor) -> Step:
        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                output = function(images, *parameters)
            torch.autograd.grad(output, leaves, output)

        return step

    ways = {
        "layer": step_of(layer),
        "by Triton's launches": step_of(ByTriton.apply, *leaves[1:]),
        "empty": step_of(Empty.apply, *leaves[1:]),
    }
    first_run = Launch._first_run

    def record(launch: Launch, *tensors: Tensor) -> None:
        ByTriton.launches[launch.kernel.__name__] = (launch, tensors)
        first_run(launch, *tensors)

    Launch._first_run = record
    ways["layer"]()
    Launch._first_run = first_run
    before = gpu.launches()
    ways["layer"]()
    print(f"launches of the layer's step: {gpu.launches() - before}")
    return ways


def measure(ways: dict[str, Step], rounds: int) -> str:
    """Return a table: microseconds of CPU time, and the ratio to the launches of Triton."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        step()
    for _ in range(rounds):
        for name, step in ways.items():
            start = time.thread_time()
            for _ in range(STEPS):
                step()
            times[name].append((time.thread_time() - start) / STEPS * 1e6)
    rows = []
    for name, values in times.items():
        ratios = [
            value / base for value, base in zip(values, times["by Triton's launches"], strict=True)
        ]
        median = statistics.median(values)
        rows.append([name, f"{median:.0f}", f"{statistics.median(ratios):.2f}"])
    return markdown_table(["", "microseconds", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="print where the layer's time goes")
    arguments = parser.parse_args()
    if COMPILER is None or sys.platform != "linux":
        sys.exit("error: this needs Linux and a C compiler")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        gpu = FakeGpu(Path(folder))
        gpu.take_blocks_on_cpu()
        ways = make_ways(gpu)
        print(measure(ways, arguments.rounds))
        if arguments.profile:
            with cProfile.Profile() as profile:
                for _ in range(1000):
                    ways["layer"]()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
