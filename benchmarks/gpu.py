"""Measure this package on a GPU, in three minutes: accuracy, layers, networks, the host.

    python benchmarks/gpu.py [--seconds N] [--output FILE]

Each row is measured after a warm-up of its own, and written to the JSON file as soon as it is
known. Rows that no longer fit into the time are left out. At the end, the rows are printed as
tables. Without a GPU, the script says so.

- Accuracy: relative errors of the output, the input's gradient and the window's gradient beside
  float64 on the CPU, from the same rounded inputs.
- Host: Python time of a layer's step, for maps so small that the GPU waits.
- Networks: ConvNeXt-T as it is, converted to 17x17, and folded: images a second in training
  (bfloat16 autocast, AdamW) and inference, GPU time alone and construction's share of it, kernels
  launched, peak memory. ResNet-50 and EfficientNet-B0 likewise, in channels_last, converted to
  their default windows.
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
from measuring import markdown_table
from torch import Tensor, nn

# The package is imported where it is used: without a GPU, the answer comes at once.

WINDOW = 17
STAGES = ((96, 56), (192, 28), (384, 14), (768, 7))  # of ConvNeXt-T: channels, side of the map
LAYER_WINDOWS = (5, 7, 9, 17, 31)
LAYER_BATCHES = (128, 16, 1)
NETWORK_BATCHES = (128, 64, 32, 8, 1)
ROUNDS = 5
ROUND_SECONDS = 0.05
# Kernels from elements to windows, or to banks of blocks, and back.
CONSTRUCTION_KERNELS = frozenset(
    {"construct", "gradients_of_elements", "bank_of_elements", "gradients_by_bank"}
)
SLOW_CELLS = 81  # from here on, torch's convolution takes milliseconds
Row = dict[str, Any]
Cells = dict[str, dict[str, str]]
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


def use(algorithm: str) -> None:
    """Make depthwise layers use this algorithm from now on."""
    from dcls_convert.depthwise import choice

    choice._preference = lambda: algorithm  # type: ignore[assignment]
    choice._decisions.clear()


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    from dcls_convert.depthwise.choice import fastest_conv2d

    padding = kernel.shape[-1] // 2
    channels = kernel.shape[0]
    return fastest_conv2d(images, kernel, None, (1, 1), (padding, padding), (1, 1), channels)


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
    calls = 1 if algorithm == "torch" and window**2 >= SLOW_CELLS else 8

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


def original_and_converted(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    import timm

    import dcls_convert

    torch.manual_seed(0)
    original = timm.create_model(name)
    converted = copy.deepcopy(original)
    dcls_convert.convert_(converted, init="random", input_size=(3, 224, 224), **options)
    return original.cuda(), converted.cuda()


def convnext_rows() -> Iterator[Row]:
    import dcls_convert

    name = "convnext_tiny"
    original, converted = original_and_converted(name, dilated_size=WINDOW)
    for batch, training in itertools.product(NETWORK_BATCHES, (True, False)):
        yield network_row(name, "original", original, batch, training)
        yield network_row(name, "converted", converted, batch, training)
    for algorithm in ("products", "torch"):
        yield network_row(name, "converted", converted, 64, True, algorithm)
    dcls_convert.fold_to_dense_(converted)
    yield network_row(name, "folded", converted, 64, False)


def channels_last_rows() -> Iterator[Row]:
    for name in ("resnet50", "efficientnet_b0"):
        original, converted = original_and_converted(name)
        for network in (original, converted):
            network.to(memory_format=torch.channels_last)
        for batch in (128, 32, 8):
            yield network_row(name, "original", original, batch, True)
            yield network_row(name, "converted", converted, batch, True)


def network_row(
    name: str, state: str, network: nn.Module, batch: int, training: bool, algorithm: str = "auto"
) -> Row:
    """Measure a step with a network: "original", "converted" or "folded"."""
    use(algorithm)
    network.train(training)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    if name != "convnext_tiny":  # whose own layers make its maps channels_last
        images = images.to(memory_format=torch.channels_last)
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
    gpu_ms, construction_ms, launches = gpu_time(call)
    return {
        "part": "network",
        "network": name,
        "state": state,
        "way": algorithm,
        "work": "training" if training else "inference",
        "batch": batch,
        "images_per_second": 1e3 * batch / ms,
        "ms": ms,
        "gpu_ms": gpu_ms,
        "construction_ms": construction_ms,
        "launches": launches,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def gpu_time(call: Call) -> tuple[float, float, int]:
    """Return the kernels' times in milliseconds, those of construction alone, and their number."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    gpu = torch.autograd.DeviceType.CUDA  # ROCm's too
    kernels = [event for event in profile.key_averages() if event.device_type == gpu]
    total = sum(event.self_device_time_total for event in kernels)
    construction = sum(
        event.self_device_time_total for event in kernels if event.key in CONSTRUCTION_KERNELS
    )
    return total / 1e3, construction / 1e3, sum(event.count for event in kernels)


# The host.


def host_rows() -> Iterator[Row]:
    from dcls_convert.layers.dcls_conv import DclsConv2d

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


def tables_of(rows: list[Row]) -> str:
    """Return one table for each part of the rows; a cell that was not measured is empty."""
    networks: Cells = {}
    layers: Cells = {}
    accuracy: Cells = {}
    host: Cells = {}
    for row in rows:
        if row["part"] == "network":
            line = f"{row['network']}, {row['work']}, {row['batch']}"
            text = f"{row['images_per_second']:,.0f} ({row['gpu_ms']:.1f}"
            if row["state"] == "converted":
                text += f", construction {row['construction_ms']:.1f}"
            way = "" if row["way"] == "auto" else f", by {row['way']}"
            networks.setdefault(line, {})[row["state"] + way] = text + ")"
        elif row["part"] == "layer":
            window = row["window"]
            line = f"{row['map']}, {row['batch']}"
            text = f"{row['forward_ms']:.2g} / {row['step_ms']:.2g}"
            layers.setdefault(line, {})[f"{window}x{window} {row['way']}"] = text
        elif row["part"] == "accuracy":
            line = row["dtype"] + (" with TF32" if row["tf32"] else "")
            text = ", ".join(f"{error:.1e}" for error in row["errors"])
            accuracy.setdefault(line, {})[row["way"]] = text
        else:
            host.setdefault(row["what"], {})["microseconds"] = f"{row['microseconds']:.0f}"
    parts = {
        "Images a second (GPU time of a step, ms)": networks,
        "GPU time of a layer, forward / forward and both gradients, ms": layers,
        "Relative error of output, input's gradient, window's gradient": accuracy,
        "Python time of a layer's step": host,
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

    import dcls_convert
    from dcls_convert.depthwise import choices

    clock = Clock(seconds)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dcls_convert": dcls_convert.__version__,
        "rows": [],
    }
    print(", ".join(str(value) for value in report.values() if value))
    for rows in (accuracy_rows, host_rows, convnext_rows, channels_last_rows, layer_rows):
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
    report["choices"] = [str(made) for made in choices()]
    report["complete"] = not clock.is_over()
    output.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"\n{tables_of(report['rows'])}\n\nwrote {output}")


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
