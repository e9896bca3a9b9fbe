"""Layers on a GPU give the CPU's results, the same in every run, without waiting for the GPU, and
in CUDA graphs.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from dcls_convert.depthwise import why_no_blocks
from dcls_convert.layers.dcls_conv import DCLS_LAYERS
from dcls_convert.layers.interpolation import INTERPOLATIONS
from dcls_convert.tuning import repulsive_loss

from .common import close, every_interpolation, randn

pytest.importorskip("triton", reason="Triton is not installed")

from dcls_convert.depthwise import launching
from dcls_convert.depthwise.blocks import convolve_by_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    # Compiling warns that tensor cores are available but not used.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # warns that it is a prototype
]


@pytest.fixture(autouse=True)
def _blocks_are_taken():
    """Without blocks, torch's operations would be compared with themselves."""
    assert why_no_blocks(torch.device("cuda", torch.cuda.current_device())) is None


def layer_of(size, interpolation="bilinear", *, dtype=torch.float32, count=9):
    """Return a depthwise layer on the GPU with elements on and between cells, inside the window, at
    its border and beyond.
    """
    layer = DCLS_LAYERS[len(size)](
        6,
        6,
        groups=6,
        kernel_count=count,
        dilated_kernel_size=size,
        interpolation=interpolation,
        dtype=dtype,
    )
    with torch.no_grad():
        layer.weight.copy_(randn(*layer.weight.shape))
        layer.positions.copy_(3 * randn(*layer.positions.shape, seed=1))
        layer.positions[..., ::2].round_()
    return layer.cuda()


def kernel_and_gradients(construct, parameters, grad_output):
    kernel = construct()
    return [kernel.detach(), *torch.autograd.grad(kernel, parameters, grad_output.to(kernel))]


def elements_of(layer):
    return [parameter for name, parameter in layer.named_parameters() if name != "bias"]


def grad_output(layer):
    return randn(6, 1, *layer.kernel_size, seed=2)


@every_interpolation
@pytest.mark.parametrize("size", [(9,), (7, 7), (5, 8), (1, 7), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler
def test_kernel_and_gradients_are_those_of_the_cpu(size, interpolation, compiled):
    torch.compiler.reset()
    layer = layer_of(size, interpolation, dtype=torch.float64)
    on_cpu = copy.deepcopy(layer).cpu()
    construct = torch.compile(layer.kernel, fullgraph=True) if compiled else layer.kernel
    results = kernel_and_gradients(construct, elements_of(layer), grad_output(layer))
    expected = kernel_and_gradients(on_cpu.kernel, elements_of(on_cpu), grad_output(on_cpu))
    close([tensor.cpu() for tensor in results], expected)


@every_interpolation
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_every_run_gives_the_same_bits_whether_tf32_is_allowed_or_not(interpolation, precision):
    layer = layer_of((17, 17), interpolation, count=200)  # many elements in each cell
    first = kernel_and_gradients(layer.kernel, elements_of(layer), grad_output(layer))
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(True)  # fails where an operation has no deterministic form
    try:
        with torch.autocast("cuda", torch.bfloat16):
            again = kernel_and_gradients(layer.kernel, elements_of(layer), grad_output(layer))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def network():
    sizes = itertools.cycle([(9, 9), (9, 11), (1, 7)])  # two of the three are computed in blocks
    options = zip(sizes, INTERPOLATIONS, strict=False)
    layers = [layer_of(size, interpolation) for size, interpolation in options]
    for layer in layers:
        layer.padding = tuple(side // 2 for side in layer.kernel_size)  # "same", as blocks need
    return nn.Sequential(*layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_never_waits_for_the_gpu(dtype):
    model = network()
    images = torch.randn(32, 6, 40, 40, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = model(images).float().square().mean() + repulsive_loss(model) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()  # the first use sets up libraries
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    convolves = [convolve for layer in model for convolve, _ in layer._convs.values()]
    in_blocks = [getattr(convolve, "func", None) is convolve_by_plan for convolve in convolves]
    assert set(in_blocks) == {True, False}


def test_one_call_for_a_pass_gives_the_bits_of_tritons_own_launches(monkeypatch):
    model = network()
    images = torch.randn(32, 6, 40, 40, device="cuda", requires_grad=True)
    leaves = [images, *model.parameters()]

    def step():
        return torch.autograd.grad(model(images).square().mean(), leaves)

    results = step()
    monkeypatch.setattr(launching, "launch_function", lambda: None)
    for layer in model:
        layer._convs.clear()
    assert all(torch.equal(*pair) for pair in zip(results, step(), strict=True))


def test_a_step_can_be_captured_in_a_cuda_graph():
    model = network()
    images = torch.randn(32, 6, 40, 40, device="cuda")
    parameters = list(model.parameters())

    def step():
        return torch.autograd.grad(model(images).square().mean(), parameters)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.9)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(results, step(), strict=True))
