"""Measure this package on a GPU, in five minutes.

    python benchmarks/gpu.py [--seconds N] [--output FILE] [--rows TEXT]

First it says whether blocks are taken, and whether they are exact. Then it measures, in this order,
until the time is over; a part that fails prints its error, and the next one begins. Each row is
written to the JSON file as soon as it is known, and at the end all are printed as tables.

- ConvNeXt-T as it is and converted to 17x17, in training (bfloat16 autocast, AdamW; small batches
  also with the whole step in a CUDA graph), inference and float32.
- Host: time of a converted layer's step, for maps so small that the GPU waits for Python.
- Accuracy: relative errors of the output, the input's gradient and the window's gradient beside
  float64 on the CPU, from the same rounded inputs.
- Layers: GPU time of one depthwise convolution, by CUDA graphs, so that the host does not count.
- Other networks, in training: ConvNeXt-B, ResNet-50 and EfficientNet-B0.
- Compiled: the whole network by torch.compile, also with CUDA graphs.
- Kernels of the networks above: their time alone, construction's share of it (with blocks, the
  packing of maps is in it), and launches. They come last, because torch's profiler makes every
  later launch slower.

A network and its converted copy are timed in turn: 20 steps of each to warm up, then 15 rounds of
about 0.1 s, in alternating order, with the process on one core. A row has

- ratio: original / converted, the median of the rounds' ratios; more than 1 if the converted
  network is faster. ratio_quartiles are their quartiles. What slows the machine slows both networks
  of a round, so the ratio is steadier than times are;
- ms and images_per_second: of the median round of each network;
- step_gb: the peak of the memory that a step allocates beyond what is there before it: activations,
  gradients, and what layers keep for the backward pass. With a CUDA graph, this stays reserved;
- peak_gb: step_gb and what the step's own network holds between steps: parameters, buffers, the
  optimizer's state, images and labels. What other networks hold, and libraries' workspaces, are not
  counted.

`python benchmarks/gpu.py --help` lists the options.
"""

import argparse
import contextlib
import copy
import functools
import gc
import itertools
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import markdown_table
from torch import Tensor, nn

# The package is imported where it is used: without a GPU, the answer comes at once.

WINDOW = 17
STAGES = ((96, 56), (192, 28), (384, 14), (768, 7))  # of ConvNeXt-T: channels, side of the map
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATES = ("original", "converted")
KINDS_TO_COMPILE = ("bfloat16", "float16", "float32", "TF32", "31x31", "dense")
# Kernels from elements to windows, or to banks of blocks, and back.
CONSTRUCTION_KERNELS = (
    "construct",
    "element_gradients",
    "pack_and_make_bank",
)
Row = dict[str, Any]
Cells = dict[str, dict[str, str]]
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured, in images, pixels and seconds."""

    side: int = 224
    training: tuple[int, ...] = (128, 32, 8, 256)
    whole_step: tuple[int, ...] = (32, 8)
    inference: tuple[int, ...] = (128, 8, 1)
    float32: int = 64
    large: int = 64  # ConvNeXt-B
    others: int = 128  # ResNet-50, EfficientNet-B0
    compiled: int = 128
    graphed: int = 8
    layers: int = 128
    warm_up: int = 20  # steps of each network
    round_seconds: float = 0.1
    rounds: int = 15
    layer_rounds: int = 5  # of one graph alone, whose times hardly differ
    host_calls: int = 200


TINY = Sizes(
    side=32,
    training=(2,),
    whole_step=(2,),
    inference=(1,),
    float32=1,
    large=1,
    others=2,
    compiled=2,
    graphed=1,
    layers=1,
    warm_up=1,
    round_seconds=0.0,
    rounds=2,
    layer_rounds=1,
    host_calls=2,
)


@dataclass
class Run:
    """The rows of this run; no part begins after `end`."""

    output: Path
    end: float  # by time.monotonic()
    sizes: Sizes
    report: dict[str, Any]
    pattern: str = ""  # regular expression; rows without a match are not measured
    failures: list[str] = field(default_factory=list)

    def measure(
        self,
        name: str,
        function: Callable[..., Row],
        *arguments: Any,
        reserve: float = 0.0,
        **options: Any,
    ) -> None:
        """Add a row, unless fewer than `reserve` seconds are left; print its error."""
        if re.search(self.pattern, name) is None:
            return
        if time.monotonic() + reserve >= self.end:
            print(f"{name}: no time left", flush=True)
            return
        start = time.monotonic()
        try:
            row = function(*arguments, **options)
        except Exception:  # the next row may still work; time on a GPU is dear
            traceback.print_exc()
            self.failures.append(name)
            torch.cuda.empty_cache()
        else:
            row = {"row": name, **row, "seconds": round(time.monotonic() - start, 1)}
            self.report["rows"].append(row)
            print(text_of(row), flush=True)
        self.report["failures"] = self.failures
        self.output.write_text(json.dumps(self.report, indent=1), encoding="utf-8")


# Times.


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this process on one core, where the OS can; inductor's processes keep theirs."""
    if sys.platform != "linux":
        yield
        return
    cores = os.sched_getaffinity(0)
    move_threads({max(cores)})
    try:
        yield
    finally:
        move_threads(cores)


def move_threads(cores: set[int]) -> None:
    """Let all threads of this process, autograd's too, run on these cores only."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended, or may not be moved
            os.sched_setaffinity(int(task.name), cores)


def times_in_turn(calls: dict[str, Call], sizes: Sizes) -> dict[str, list[float]]:
    """Return the mean milliseconds of each call in each round.

    Each round reverses the order of the round before it, so that no call is always the first.
    """
    with one_core():
        counts = {name: calls_in_a_round(call, sizes) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(sizes.rounds):
            for name in calls if number % 2 == 0 else reversed(calls):
                times[name].append(elapsed(calls[name], counts[name]))
    return times


def calls_in_a_round(call: Call, sizes: Sizes) -> int:
    """Return how many calls take the time of a round, after some to warm up."""
    for _ in range(sizes.warm_up):
        call()
    return max(1, min(200, int(1e3 * sizes.round_seconds / max(elapsed(call, 2), 0.01))))


def ratio_row(times: dict[str, list[float]]) -> Row:
    """Return the median and the quartiles of the rounds' ratios, original / converted."""
    pairs = zip(times["original"], times["converted"], strict=True)
    ratios = [original / converted for original, converted in pairs]
    low, median, high = statistics.quantiles(ratios, method="inclusive")
    return {"ratio": median, "ratio_quartiles": [low, high]}


def elapsed(call: Call, calls: int) -> float:
    """Return the mean time of a call in milliseconds."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) / calls)


def graphed_milliseconds(call: Call, calls: int, sizes: Sizes) -> float:
    """Return the GPU time of a call, from a CUDA graph of several."""
    graph, _ = capture(call, calls)
    graph.replay()
    count = calls_in_a_round(graph.replay, sizes)
    rounds = [elapsed(graph.replay, count) for _ in range(sizes.layer_rounds)]
    return statistics.median(rounds) / calls


def capture(call: Call, calls: int = 1) -> tuple[torch.cuda.CUDAGraph, float]:
    """Return a CUDA graph of several calls, and the peak of their memory in GB.

    What the calls read must live as long as the graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()

    def record() -> None:
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()

    return graph, allocated_gb(record)


def allocated_gb(call: Call) -> float:
    """Return the peak of the memory that a call allocates, beyond what is there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def gpu_time(call: Call) -> tuple[float, float, int]:
    """Return the kernels' times in milliseconds, those of construction alone, and their number."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    gpu = torch.autograd.DeviceType.CUDA  # ROCm's too
    kernels = [event for event in profile.key_averages() if event.device_type == gpu]
    total = 0.0
    construction = 0.0
    for event in kernels:
        total += event.self_device_time_total
        if event.key.startswith(CONSTRUCTION_KERNELS):  # inductor adds a number
            construction += event.self_device_time_total
    return total / 1e3, construction / 1e3, sum(event.count for event in kernels)


# Blocks.


def new_layer(**options: Any) -> nn.Module:
    """Return a depthwise layer as in ConvNeXt-T's first stage."""
    from dcls_convert.layers.dcls_conv import DclsConv2d

    options = {"kernel_count": 34, "dilated_kernel_size": WINDOW, "groups": 96, **options}
    padding = options["dilated_kernel_size"] // 2
    return DclsConv2d(96, 96, padding=padding, **options)


def by_blocks(images: Tensor, kernel: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the convolution in blocks for tensors like these."""
    from dcls_convert.depthwise.blocks import convolver_of_windows

    window = (kernel.shape[2], kernel.shape[3])
    convolve = convolver_of_windows(images, window, (1, 1), images.dtype, has_bias=False)
    return lambda images, kernel: convolve(images, None, kernel)


def convolve_by_torch(images: Tensor, kernel: Tensor) -> Tensor:
    return F.conv2d(images, kernel, padding=kernel.shape[-1] // 2, groups=len(kernel))


def results(function: Any, images: Tensor, kernel: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the output and both gradients."""
    leaves = [images.detach().requires_grad_(), kernel.detach().requires_grad_()]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def exact_row(dtype: torch.dtype, *, channels_last: bool) -> Row:
    """Compare small integers with float64, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 16, 30, 23), (16, 1, WINDOW, WINDOW), (3, 16, 30, 23))
    integers = [torch.randint(-2, 3, shape, generator=generator).double() for shape in shapes]
    exact = results(convolve_by_torch, *integers)
    images, kernel, gradient = [tensor.to("cuda", dtype) for tensor in integers]
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    found = results(by_blocks(images, kernel), images, kernel, gradient)
    pairs = zip(found, exact, strict=True)
    return {"exact": all(torch.equal(one.cpu(), other.to(dtype)) for one, other in pairs)}


def accuracy_row(dtype: torch.dtype, *, tf32: bool, by: str) -> Row:
    """Return relative errors in Frobenius norms."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 16, 28, 28), (16, 1, WINDOW, WINDOW), (4, 16, 28, 28))
    rounded = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    exact = results(convolve_by_torch, *[tensor.double() for tensor in rounded])
    allow_tf32(tf32)
    try:
        images, kernel, gradient = [tensor.cuda() for tensor in rounded]
        function = by_blocks(images, kernel) if by == "blocks" else convolve_by_torch
        found = results(function, images, kernel, gradient)
    finally:
        allow_tf32(False)
    errors = []
    for result, expected in zip(found, exact, strict=True):
        error = (result.cpu().double() - expected).norm() / expected.norm()
        errors.append(float(error))
    return {"errors": errors}


def allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def layer_row(channels: int, side: int, window: int, sizes: Sizes) -> Row:
    """Measure one convolution, by blocks if torch is slow."""
    shape = (sizes.layers, channels, side, side)
    images = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last).requires_grad_()
    kernel = torch.randn(channels, 1, window, window, device="cuda", dtype=torch.bfloat16)
    kernel.requires_grad_()
    gradient = torch.randn_like(images)
    function = convolve_by_torch if window <= 7 else by_blocks(images, kernel)

    def forward() -> object:
        with torch.no_grad():
            return function(images, kernel)

    def step() -> object:
        return torch.autograd.grad(function(images, kernel), (images, kernel), gradient)

    return {
        "forward_ms": graphed_milliseconds(forward, 8, sizes),
        "step_ms": graphed_milliseconds(step, 8, sizes),
    }


def host_row(module: nn.Module, sizes: Sizes) -> Row:
    """Measure a step whose kernels take less time than Python."""
    module = module.cuda()
    images = torch.randn(1, 96, 8, 8, device="cuda", requires_grad=True)
    leaves = [images, *module.parameters()]

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            output = module(images)
        torch.autograd.grad(output, leaves, output)

    for _ in range(3):
        step()
    rounds = []
    with one_core():
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(sizes.host_calls):
                step()
            rounds.append((time.perf_counter() - start) / sizes.host_calls * 1e6)
    return {"microseconds": statistics.median(rounds)}


# Networks.


class Networks:
    """A network, and the same network converted; made on the CPU."""

    def __init__(self, name: str, sizes: Sizes, **options: Any) -> None:
        import timm

        import dcls_convert

        torch.manual_seed(0)
        self.sizes = sizes
        original = timm.create_model(name)
        converted = copy.deepcopy(original)
        shape = (3, sizes.side, sizes.side)
        dcls_convert.convert_(converted, init="random", input_size=shape, **options)
        self.channels_last = "convnext" not in name  # whose own layers make their maps so
        self.states = {"original": original.cuda(), "converted": converted.cuda()}
        if self.channels_last:
            for network in self.states.values():
                network.to(memory_format=torch.channels_last)

    def _steps(
        self,
        batch: int,
        *,
        training: bool,
        half: bool = True,
        capturable: bool = False,
        **options: Any,
    ) -> dict[str, "Step"]:
        """Return a step of each network; options are those of torch.compile."""
        images = torch.randn(batch, 3, self.sizes.side, self.sizes.side, device="cuda")
        if self.channels_last:
            images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(0, 1000, (batch,), device="cuda")
        steps = {}
        for state, network in self.states.items():
            network.train(training)
            function = torch.compile(network, **options) if options else network
            steps[state] = Step(network, function, images, labels, half=half, capturable=capturable)
        return steps

    def row(self, batch: int, *, whole_step: bool = False, **options: Any) -> Row:
        """Measure both networks in turn; with `whole_step`, a CUDA graph of each one's step."""
        steps = self._steps(batch, capturable=whole_step, **options)
        calls: dict[str, Call] = {}
        memory: dict[str, dict[str, float]] = {}
        for state, step in steps.items():
            if not whole_step:
                step()  # compiles, and makes the optimizer's state
            # Garbage that is freed later would lower the peak. An old autograd graph would also
            # run its part of the backward pass on its own stream, which no capture allows.
            gc.collect()
            if whole_step:
                graph, step_gb = capture(step)
                calls[state] = graph.replay
            else:
                step_gb = allocated_gb(step)
                calls[state] = step
            memory[state] = {"peak_gb": step.held_gb() + step_gb, "step_gb": step_gb}
        times = times_in_turn(calls, self.sizes)
        row = ratio_row(times)
        for state in steps:
            ms = statistics.median(times[state])
            row[state] = {"images_per_second": 1e3 * batch / ms, "ms": ms, **memory[state]}
        return row

    def kernels_row(self, batch: int, *, training: bool, half: bool = True) -> Row:
        """Profile a step of both networks."""
        row: Row = {}
        for state, call in self._steps(batch, training=training, half=half).items():
            call()
            gpu_ms, construction_ms, launches = gpu_time(call)
            row[state] = {
                "gpu_ms": gpu_ms,
                "construction_ms": construction_ms,
                "launches": launches,
            }
        return row


class Step:
    """A step of a network, of training or inference, always with the same images and labels."""

    def __init__(
        self,
        network: nn.Module,
        function: Callable[[Tensor], Tensor],
        images: Tensor,
        labels: Tensor,
        *,
        half: bool,
        capturable: bool,
    ) -> None:
        self.network = network
        self.function = function  # the network, or the network compiled
        self.images = images
        self.labels = labels
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=1e-4, fused=True, capturable=capturable
        )
        # Inside and outside of a CUDA graph, autocast must not share cached casts of parameters.
        self.autocast = functools.partial(
            torch.autocast, "cuda", torch.bfloat16, enabled=half, cache_enabled=not capturable
        )

    def __call__(self) -> None:
        if not self.network.training:
            with torch.no_grad(), self.autocast():
                self.function(self.images)
            return
        with self.autocast():
            loss = F.cross_entropy(self.function(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        # Also for a capture: backward then makes the gradients anew, in the graph's memory.
        self.optimizer.zero_grad(set_to_none=True)

    def held_gb(self) -> float:
        """Return the memory of what lives between steps."""
        states = self.optimizer.state.values()
        held = [self.images, self.labels, *self.network.parameters(), *self.network.buffers()]
        held += [tensor for state in states for tensor in state.values()]
        return sum(tensor.nbytes for tensor in held) / 1e9


# The run.


def compile_kernels(kind: str) -> str:
    """Run what compiles the kernels of a kind, into Triton's cache on disk."""
    from dcls_convert.layers.gpu_construction import construct_windows

    if kind == "dense":
        weight = torch.randn(64, 64, 5, device="cuda", requires_grad=True)
        positions = torch.randn(2, 64, 64, 5, device="cuda", requires_grad=True)
        construct_windows(weight, positions, (7, 7)).sum().backward()
        return kind
    allow_tf32(kind == "TF32")
    dtypes = {"float16": torch.float16, "float32": torch.float32, "TF32": torch.float32}
    dtype = dtypes.get(kind, torch.bfloat16)
    window = 31 if kind == "31x31" else WINDOW
    kernel = torch.randn(96, 1, window, window, device="cuda", dtype=dtype)
    for size in (32, 8):  # of 3 x 3 taps or more, and of one
        images = torch.randn(2, 96, size, size, device="cuda")
        for format in (torch.channels_last, torch.contiguous_format):
            maps = images.to(dtype).contiguous(memory_format=format)
            results(by_blocks(maps, kernel), maps, kernel, maps)
        if window == WINDOW:
            maps = images.contiguous(memory_format=torch.channels_last).requires_grad_()
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                output = new_layer().cuda()(maps)
            output.backward(torch.ones_like(output))
    return kind


def measure_all(run: Run) -> None:
    """Measure the rows, the most important ones first."""
    for dtype, channels_last in itertools.product(DTYPES, (True, False)):
        name = f"exact: {name_of(dtype)}, {'channels_last' if channels_last else 'contiguous'}"
        run.measure(name, exact_row, dtype, channels_last=channels_last)
    for name, make, batch, options in tiny_rows(run.sizes):
        run.measure(name, network_row, make, batch, reserve=10, **options)
    conv = nn.Conv2d(96, 96, 7, padding=3, groups=96)
    run.measure("host: converted layer", host_row, new_layer(), run.sizes)
    run.measure("host: nn.Conv2d, 7x7", host_row, conv, run.sizes)
    for dtype, by in itertools.product(DTYPES, ("blocks", "torch")):
        run.measure(f"accuracy: {name_of(dtype)}, {by}", accuracy_row, dtype, tf32=False, by=by)
    for by in ("blocks", "torch"):
        run.measure(f"accuracy: TF32, {by}", accuracy_row, torch.float32, tf32=True, by=by)
    for (channels, side), window in itertools.product(STAGES, (7, WINDOW, 31)):
        name = f"layer: {channels} @ {side}x{side}, {window}x{window}"
        run.measure(name, layer_row, channels, side, window, run.sizes)
    for name, make, batch, options in other_rows(run.sizes):
        run.measure(name, network_row, make, batch, reserve=10, **options)
    for name, make, batch, options in compiled_rows(run.sizes):
        run.measure(name, network_row, make, batch, reserve=70, **options)
    for name, make, batch, options in [*tiny_rows(run.sizes), *other_rows(run.sizes)]:
        if "whole_step" not in options:  # whose kernels are those of the same batch without it
            run.measure(f"kernels: {name}", kernels_row, make, batch, **options)


@functools.cache
def networks_of(name: str, sizes: Sizes, **options: Any) -> Networks:
    """Make both networks once; they stay on the GPU."""
    return Networks(name, sizes, **options)


def network_row(make: Callable[[], Networks], batch: int, **options: Any) -> Row:
    return make().row(batch, **options)


def kernels_row(make: Callable[[], Networks], batch: int, **options: Any) -> Row:
    return make().kernels_row(batch, **options)


NetworkRow = tuple[str, Callable[[], Networks], int, dict[str, Any]]  # name, networks, batch


def tiny_networks(sizes: Sizes) -> Callable[[], Networks]:
    return functools.partial(networks_of, "convnext_tiny", sizes, dilated_size=WINDOW)


def tiny_rows(sizes: Sizes) -> Iterator[NetworkRow]:
    tiny = tiny_networks(sizes)
    for batch in sizes.training:
        yield f"ConvNeXt-T, training, {batch}", tiny, batch, {"training": True}
    for batch in sizes.whole_step:
        name = f"ConvNeXt-T, training, whole step as a CUDA graph, {batch}"
        yield name, tiny, batch, {"training": True, "whole_step": True}
    for batch in sizes.inference:
        yield f"ConvNeXt-T, inference, {batch}", tiny, batch, {"training": False}
    name = f"ConvNeXt-T, training in float32, {sizes.float32}"
    yield name, tiny, sizes.float32, {"training": True, "half": False}


def other_rows(sizes: Sizes) -> Iterator[NetworkRow]:
    others: tuple[tuple[str, int, dict[str, int]], ...] = (
        ("convnext_base", sizes.large, {"dilated_size": WINDOW}),
        ("resnet50", sizes.others, {"dilated_size": 5}),
        ("resnet50", sizes.others, {"dilated_size": 7}),
        ("efficientnet_b0", sizes.others, {}),
    )
    for name, batch, window in others:
        make = functools.partial(networks_of, name, sizes, **window)
        title = name
        if name == "resnet50":
            size = window["dilated_size"]
            title = f"{name}, {size}x{size} windows"
        yield f"{title}, training, {batch}", make, batch, {"training": True}


def compiled_rows(sizes: Sizes) -> Iterator[NetworkRow]:
    for mode, batch in (("default", sizes.compiled), ("reduce-overhead", sizes.graphed)):
        name = f"ConvNeXt-T, training, compiled ({mode}), {batch}"
        yield name, tiny_networks(sizes), batch, {"training": True, "mode": mode}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tables_of(rows: list[Row]) -> str:
    """Return the rows as tables."""
    networks: Cells = {}
    kernels: Cells = {}
    others: Cells = {}
    for row in rows:
        name = row["row"]
        if "ratio" in row:
            low, high = row["ratio_quartiles"]
            ratio = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
            cells = networks[name] = {"converted / original": ratio}
            for state in STATES:
                cells[state] = f"{row[state]['images_per_second']:,.0f}"
                cells[f"GB, {state}"] = f"{row[state]['peak_gb']:.2f}"
                cells[f"GB of a step, {state}"] = f"{row[state]['step_gb']:.2f}"
        elif name.startswith("kernels: "):
            cells = kernels[name.removeprefix("kernels: ")] = {}
            for state in STATES:
                cells[state] = f"{row[state]['gpu_ms']:.1f}"
                cells[f"launches, {state}"] = str(row[state]["launches"])
            cells["construction"] = f"{row['converted']['construction_ms']:.1f}"
        else:
            values = {key: value for key, value in row.items() if key not in ("row", "seconds")}
            others[name] = {"": ", ".join(f"{key} {text_of_value(values[key])}" for key in values)}
    parts = {
        "Images a second": networks,
        "GPU time of a step, ms": kernels,
        "Other rows": others,
    }
    return "\n\n".join(f"{title}:\n\n{table_of(cells)}" for title, cells in parts.items() if cells)


def table_of(cells: Cells) -> str:
    """Return a table: line -> column -> text."""
    columns = list(dict.fromkeys(column for line in cells.values() for column in line))
    lines = []
    for name, line in cells.items():
        lines.append([name, *[line.get(column, "") for column in columns]])
    return markdown_table(["", *columns], lines)


def text_of(row: Row) -> str:
    return "  ".join(f"{key}={text_of_value(value)}" for key, value in row.items())


def text_of_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(text_of_value(number) for number in value)
    if isinstance(value, dict):
        return f"({text_of(value)})"
    return str(value)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=290.0, help="no row begins after this")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument(
        "--processes", type=int, default=len(KINDS_TO_COMPILE), help="that compile kernels"
    )
    parser.add_argument("--rows", default="", metavar="TEXT", help="regular expression of rows")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as a test of this script")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU here (CUDA or ROCm)")
    import triton

    import dcls_convert
    from dcls_convert.depthwise import why_no_blocks

    reason = why_no_blocks(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        sys.exit(f"error: this GPU takes no blocks: {reason}")
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dcls_convert": dcls_convert.__version__,
        "rows": [],
    }
    print(", ".join(str(value) for value in report.values() if value), flush=True)
    if options.processes:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.processes, spawn) as pool:
            for kind in pool.map(compile_kernels, KINDS_TO_COMPILE):
                print(f"compiled kernels: {kind}", flush=True)
    run = Run(
        output=options.output,
        end=end,
        sizes=TINY if options.tiny else Sizes(),
        report=report,
        pattern=options.rows,
    )
    allow_tf32(False)
    measure_all(run)
    print(f"\n{tables_of(report['rows'])}\n\nwrote {options.output}")
    inexact = [row["row"] for row in report["rows"] if row.get("exact") is False]
    if inexact:
        print(f"BLOCKS ARE NOT EXACT: {'; '.join(inexact)}")
    if run.failures:
        sys.exit(f"error: {len(run.failures)} rows failed: {'; '.join(run.failures)}")


if __name__ == "__main__":
    main()
