"""Run benchmarks/gpu.py to its end with tiny sizes, over a GPU that is not there: a program.

Its argument is a folder. What would be on the GPU is on the CPU, and times mean nothing.
"""

import contextlib
import sys
import time
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import gpu
from fake_gpu import FakeGpu


class OnCpu(TorchFunctionMode):
    """Move what is made on the GPU to the CPU."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = dict(options or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        places = [isinstance(argument, str) and argument == "cuda" for argument in arguments]
        if any(places):  # tensor.to("cuda", dtype)
            pairs = zip(arguments, places, strict=True)
            arguments = tuple("cpu" if is_place else argument for argument, is_place in pairs)
        return function(*arguments, **options)


class Event:
    def __init__(self, enable_timing):
        self.seconds = 0.0

    def record(self):
        self.seconds = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.seconds - self.seconds)


class Stream:
    def wait_stream(self, stream):
        pass


class Graph:
    def replay(self):
        pass


class Autocast(torch.autocast):
    def __init__(self, device, *arguments, **options):
        super().__init__("cpu", *arguments, **options)


def put_on_cpu():
    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda: "no GPU",
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 0,
        "Event": Event,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph": lambda graph, stream: contextlib.nullcontext(),
    }.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self: self
    torch.nn.Module.cuda = lambda self: self
    torch.autocast = Autocast
    torch.compile = lambda network, mode: network  # for GPUs; needs one
    torch.optim.Optimizer._cuda_graph_capture_health_check = lambda self: None
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None
    gpu.gpu_time = lambda call: (call(), (1.0, 0.1, 3))[1]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    FakeGpu(folder).take_blocks_on_cpu()
    put_on_cpu()
    output = str(folder / "gpu.json")
    with OnCpu():
        gpu.main(["--tiny", "--processes", "0", "--seconds", "1000", "--output", output])
