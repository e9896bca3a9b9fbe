"""Measure the Python time of converted layers on a GPU, without a GPU.

    python benchmarks/gpu_host.py [--rounds N] [--beside CHECKOUT] [--profile]

At small batches, a GPU waits for Python. Here, kernels are compiled and launched as on an H100 that
is not there, where launches do nothing (fake_gpu.py). Needs Linux and a C compiler. A layer is a
depthwise one of ConvNeXt-T under autocast, with 34 elements in 17 x 17 cells. Microseconds of CPU
time for one layer:

- loop: one layer in a tight loop. "step" is its forward and backward pass, without what
  autograd.grad takes for nothing.
- network: 18 layers in a small ConvNeXt, where the processor's caches are cold, minus the same
  network without them. "step" is a training step without the optimizer.

--beside measures the package in another checkout, too. Both take turns, each in processes of its
own, on one core; trust the ratios.
"""

import argparse
import cProfile
import ctypes
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fake_gpu import COMPILER, FakeGpu
from measuring import markdown_table
from torch import nn

ROOT = Path(__file__).parents[1]
LAYERS = 18
STEPS = 50  # of each call of a loop in a round
NETWORK_STEPS = 3
PAIRS = 5
Step = Callable[[], object]


def layer_of(channels: int) -> nn.Module:
    from dcls_convert.layers.dcls_conv import DclsConv2d

    return DclsConv2d(
        channels, channels, groups=channels, kernel_count=34, dilated_kernel_size=17, padding=8
    )


def loops() -> dict[str, Step]:
    """Return a layer's step and forward pass, and what autograd takes for nothing."""
    layer = layer_of(96)
    images = torch.randn(1, 96, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.ones_like(images)
    leaves = [images, *layer.parameters()]

    def step() -> None:
        torch.autograd.grad(layer(images), leaves, gradient)

    def forward() -> None:
        with torch.no_grad():
            layer(images)

    def nothing() -> None:
        torch.autograd.grad(images.view_as(images), [images], gradient)

    return {"step": step, "forward": forward, "nothing": nothing}


def networks() -> dict[str, Step]:
    """Return a network's step and forward pass, with its layers and without."""
    from timm.models.convnext import ConvNeXt

    images = torch.randn(2, 3, 64, 64)
    labels = torch.zeros(2, dtype=torch.long)
    steps: dict[str, Step] = {}
    for name in ("", " without layers"):
        network: Any = ConvNeXt(depths=(3, 3, 9, 3), dims=(16, 24, 32, 40), num_classes=10)
        for stage in network.stages:
            for block in stage.blocks:
                channels = len(block.conv_dw.weight)
                block.conv_dw = nn.Identity() if name else layer_of(channels)

        def step(network: nn.Module = network) -> None:
            F.cross_entropy(network(images), labels).backward()
            network.zero_grad(set_to_none=True)

        def forward(network: nn.Module = network) -> None:
            with torch.no_grad():
                network(images)

        steps["step" + name] = step
        steps["forward" + name] = forward
    return steps


def measure(rounds: int) -> dict[str, float]:
    """Return the microseconds of a layer, by what was measured."""
    times = least(loops(), rounds, STEPS)
    layer = {
        "loop, step": times["step"] - times["nothing"],
        "loop, forward": times["forward"],
    }
    times = least(networks(), rounds, NETWORK_STEPS)
    for name in ("step", "forward"):
        layer[f"network, {name}"] = (times[name] - times[f"{name} without layers"]) / LAYERS
    return layer


def least(calls: dict[str, Step], rounds: int, steps: int) -> dict[str, float]:
    """Return the least time of each call in microseconds; all take turns in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time()
            for _ in range(steps):
                call()
            times[name].append((time.thread_time() - start) / steps * 1e6)
    return {name: min(values) for name, values in times.items()}


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, as CUDA's allocator does."""
    trim_threshold, mmap_threshold = -1, -3
    for parameter in (trim_threshold, mmap_threshold):
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def measure_in_process(checkout: Path, rounds: int) -> dict[str, float]:
    """Measure the package in a checkout, by this script."""
    command = [sys.executable, __file__, "--json", "--rounds", str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def table_beside(other: Path, rounds: int) -> str:
    """Return a table of this checkout and another one, measured in turn."""
    pairs = []
    for number in range(PAIRS):
        order = (ROOT, other) if number % 2 else (other, ROOT)
        pairs.append({checkout: measure_in_process(checkout, rounds) for checkout in order})
    rows = []
    for name in pairs[0][ROOT]:
        ratios = sorted(pair[ROOT][name] / pair[other][name] for pair in pairs)
        here, there = [
            statistics.median(pair[checkout][name] for pair in pairs) for checkout in (ROOT, other)
        ]
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([name, f"{here:.0f}", f"{there:.0f}", ratio])
    return markdown_table(["microseconds of a layer", "here", "there", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="measure this one, too")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--json", action="store_true", help="print the numbers in one line")
    arguments = parser.parse_args()
    if COMPILER is None or sys.platform != "linux":
        sys.exit("error: this needs Linux and a C compiler")
    if arguments.beside is not None:
        print(table_beside(arguments.beside.resolve(), arguments.rounds))
        return
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder, torch.autocast("cpu", torch.bfloat16):
        gpu = FakeGpu(Path(folder))
        gpu.take_blocks_on_cpu()
        if arguments.profile:
            step = loops()["step"]
            step()
            with cProfile.Profile() as profile:
                for _ in range(1000):
                    step()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            return
        layer = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(layer))
        return
    rows = [[name, f"{value:.0f}"] for name, value in layer.items()]
    print(markdown_table(["microseconds of a layer", ""], rows))


if __name__ == "__main__":
    main()
