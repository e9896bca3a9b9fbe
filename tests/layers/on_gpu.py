"""What all tests on a GPU share."""

from contextlib import contextmanager

import pytest
import torch

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # compiling: that they are available, but not used
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # that it is a prototype
]


@contextmanager
def never_waiting():
    """Fails where the CPU would wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step):
    """The CUDA graph of `step()`, which has run three times before, and what the step returns there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
