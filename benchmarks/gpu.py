"""Measure this package on a GPU, in three minutes: accuracy, layers, networks, the host.

    python benchmarks/gpu.py [--seconds N] [--output FILE]

Each row is measured after a warm-up of its own, and written to the JSON file as soon as it is
known. Rows that no longer fit into the time are left out. Without a GPU, the script says so.

- Accuracy: relative errors of the output, the input's gradient and the window's gradient beside
  float64 on the CPU, from the same rounded inputs.
- Host: Python time of a layer's step, for maps so small that the GPU waits.
- Networks: ConvNeXt-T as it is, converted to 17x17, and folded: images a second in training
  (bfloat16 autocast, AdamW) and inference, GPU time alone, kernels launched, peak memory.
- Layers: GPU time of a depthwise convolution, by replaying CUDA graphs, so that the host does not
  count: torch's convolution and blocks, forward, and forward with both gradients.
"""

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcls_convert
from dcls_convert.depthwise import choice
from dcls_convert.layers.dcls_conv import DclsConv2d

WINDOW = 17
STAGES = ((96, 56), (192, 28), (384, 14), (768, 7))  # of ConvNeXt-T: channels, side of the map
LAYER_WINDOWS = (5, 7, 9, 17, 31)
LAYER_BATCHES = (128, 16, 1)
NETWORK_BATCHES = (128, 64, 32, 8, 1)
ROUNDS = 5
ROUND_SECONDS = 0.05
SLOW_TAPS = 81  # from here on, torch's convolution takes milliseconds
Row = dict[str, Any]
Call = Callable[[], object]


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def is_over(self) -> bool:
        return time.monotonic() >= self.end


def milliseconds(call: Call) -> float:
    """Return the median time of a call on the GPU's clock, after two calls to warm up."""
    call()
    call()
    first = elapsed(call, 1)
    calls = max(1, min(50, int(1e3 * ROUND_SECONDS / max(first, 0.01))))
    return statistics.median(elapsed(call, calls) for _ in range(ROUNDS))


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
    return start.elapsed_time(end) / calls


def graphed_milliseconds(call: Call, calls: int) -> float:
    """Return the GPU time of a call, from a CUDA graph of several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return milliseconds(graph.replay) / calls


def use(algorithm: choice.Preference) -> None:
    """Make depthwise layers use this algorithm from now on."""
    choice._preference = lambda: algorithm  # type: ignore[assignment]
    choice._decisions.clear()


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    padding = kernel.shape[-1] // 2
    channels = kernel.shape[0]
    return choice.fastest_conv2d(images, kernel, None, (1, 1), (padding, padding), (1, 1), channels)


# Accuracy.


def accuracy_rows() -> Iterator[Row]:
    settings = [(torch.bfloat16, False), (torch.float16, False)]
    settings += [(torch.float32, False), (torch.float32, True)]
    for (dtype, tf32), algorithm in itertools.product(settings, ("torch", "blocks", "products")):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        use(algorithm)
        errors = relative_errors(dtype)
        yield {
            "part": "accuracy",
            "dtype": name_of(dtype),
            "tf32": tf32,
            "way": algorithm,
            "errors": errors,
        }
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def relative_errors(dtype: torch.dtype) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 16, 28, 28), (16, 1, WINDOW, WINDOW), (4, 16, 28, 28))
    rounded = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    exact = results(convolve_by_torch, *[tensor.double() for tensor in rounded])
    ours = results(convolve, *[tensor.cuda() for tensor in rounded])
    errors = []
    for result, expected in zip(ours, exact, strict=True):
        error = (result.cpu().double() - expected).norm() / expected.norm()
        errors.append(float(error))
    return errors


def convolve_by_torch(images: Tensor, kernel: Tensor) -> Tensor:
    return F.conv2d(images, kernel, padding=kernel.shape[-1] // 2, groups=len(kernel))


def results(function: Any, images: Tensor, kernel: Tensor, gradient: Tensor) -> list[Tensor]:
    images.requires_grad_()
    kernel.requires_grad_()
    output = function(images, kernel)
    return [output.detach(), *torch.autograd.grad(output, (images, kernel), gradient)]


# Layers.


def layer_rows() -> Iterator[Row]:
    for batch, (channels, side), window in itertools.product(LAYER_BATCHES, STAGES, LAYER_WINDOWS):
        if window > 2 * side + 3:
            continue
        for algorithm in ("torch", "blocks"):
            yield layer_row(batch, channels, side, window, algorithm)


def layer_row(batch: int, channels: int, side: int, window: int, algorithm: Any) -> Row:
    use(algorithm)
    images = torch.randn(batch, channels, side, side, device="cuda", dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last).requires_grad_()
    kernel = torch.randn(channels, 1, window, window, device="cuda", dtype=torch.bfloat16)
    kernel.requires_grad_()
    gradient = torch.randn_like(images)
    calls = 1 if algorithm == "torch" and window**2 >= SLOW_TAPS else 8

    def step() -> object:
        return torch.autograd.grad(convolve(images, kernel), (images, kernel), gradient)

    with torch.no_grad():
        forward = graphed_milliseconds(lambda: convolve(images, kernel), calls)
    return {
        "part": "layer",
        "map": f"{channels} @ {side}x{side}",
        "batch": batch,
        "window": window,
        "way": algorithm,
        "forward_ms": forward,
        "step_ms": graphed_milliseconds(step, calls),
    }


# Networks.


def network_rows() -> Iterator[Row]:
    import timm

    torch.manual_seed(0)
    original = timm.create_model("convnext_tiny")
    converted = copy.deepcopy(original)
    dcls_convert.convert_(converted, dilated_size=WINDOW, init="random", input_size=(3, 224, 224))
    folded = copy.deepcopy(converted)
    dcls_convert.fold_to_dense_(folded)
    networks = [("original", original, "auto"), ("converted", converted, "auto")]
    slow = [("converted", converted, "products"), ("converted", converted, "torch")]
    for _, network, _ in networks:
        network.cuda()
    for batch, training in itertools.product(NETWORK_BATCHES, (True, False)):
        for name, network, algorithm in networks:
            yield network_row(name, network, algorithm, batch, training)
    for name, network, algorithm in slow:
        yield network_row(name, network, algorithm, 64, True)
    yield network_row("folded", folded.cuda(), "auto", 64, False)


def network_row(name: str, network: nn.Module, algorithm: Any, batch: int, training: bool) -> Row:
    use(algorithm)
    network.train(training)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def infer() -> None:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            network(images)

    call = train if training else infer
    call()  # compiles
    torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(call)
    gpu_ms, launches = gpu_time(call)
    return {
        "part": "network",
        "network": name,
        "way": algorithm,
        "work": "training" if training else "inference",
        "batch": batch,
        "images_per_second": 1e3 * batch / ms,
        "ms": ms,
        "gpu_ms": gpu_ms,
        "launches": launches,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def gpu_time(call: Call) -> tuple[float, int]:
    """Return the sum of the kernels' times in milliseconds, and their number."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in profile.key_averages() if event.device_time_total > 0]
    total = sum(event.device_time_total for event in kernels)
    return total / 1e3, sum(event.count for event in kernels)


# The host.


def host_rows() -> Iterator[Row]:
    layer = DclsConv2d(
        96, 96, groups=96, kernel_count=34, dilated_kernel_size=WINDOW, padding=WINDOW // 2
    ).cuda()
    conv = nn.Conv2d(96, 96, 7, padding=3, groups=96).cuda()
    images = torch.randn(1, 96, 8, 8, device="cuda", requires_grad=True)
    gradient = torch.randn_like(images)
    for name, module in (("converted layer", layer), ("nn.Conv2d, 7x7", conv)):
        use("auto")
        leaves = [images, *module.parameters()]

        def step(module: nn.Module = module, leaves: Any = leaves) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                output = module(images)
            torch.autograd.grad(output, leaves, gradient.to(output.dtype))

        yield {"part": "host", "what": name, "microseconds": host_microseconds(step)}


def host_microseconds(call: Call, calls: int = 200) -> float:
    for _ in range(3):
        call()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(rounds)


# The run.


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def text_of(row: Row) -> str:
    cells = []
    for key, value in row.items():
        if isinstance(value, float):
            value = f"{value:.4g}"
        elif isinstance(value, list):
            value = " ".join(f"{number:.1e}" for number in value)
        cells.append(f"{key}={value}")
    return "  ".join(cells)


def run(output: Path, seconds: float) -> None:
    """Measure, and write every row to the file and to stdout."""
    import triton

    clock = Clock(seconds)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dcls_convert": dcls_convert.__version__,
        "rows": [],
    }
    print(", ".join(str(value) for value in report.values() if value))
    for rows in (accuracy_rows, host_rows, network_rows, layer_rows):
        steps = rows()
        while not clock.is_over():
            try:
                row = next(steps)
            except StopIteration:
                break
            except torch.OutOfMemoryError as error:  # a generator ends with its error
                print(f"{rows.__name__}: out of memory: {error}", file=sys.stderr)
                break
            report["rows"].append(row)
            print(text_of(row), flush=True)
            output.write_text(json.dumps(report, indent=1), encoding="utf-8")
    report["choices"] = [str(made) for made in choice.choices()]
    report["complete"] = not clock.is_over()
    output.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"wrote {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="no row begins after this")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU here (CUDA or ROCm)")
    run(arguments.output, arguments.seconds)


if __name__ == "__main__":
    main()
