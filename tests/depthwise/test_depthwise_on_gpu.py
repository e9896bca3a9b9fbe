"""Depthwise convolution by Triton's kernels on a GPU: its values, what torch does with it, its memory and its waits.

python -m tests.depthwise.test_depthwise_on_gpu RANK PROCESSES FOLDER is one process of the test of several GPUs.
"""

import copy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.nn.parallel import DistributedDataParallel

import dcls_convert
from dcls_convert.depthwise import triton as depthwise_triton
from dcls_convert.depthwise.choice import conv2d
from dcls_convert.depthwise.triton import depthwise, depthwise_kernel_gradient
from dcls_convert.layers.dcls_conv import DclsConv2d

from ..layers.on_gpu import MARKS, captured, never_waiting

pytestmark = MARKS

# Relative error of one value, and error as a part of the root mean square of all: a result is rounded once, and sums in
# float32 differ by some hundred roundings of 2^-23. TF32 cuts 2^-10 or less off both factors of each product; where
# their sum cancels, that is left, about 2^-10 of the root mean square. 8: standard deviations.
TOLERANCES = {
    torch.bfloat16: (2**-8, 8 * 2**-14),
    torch.float16: (2**-11, 8 * 2**-14),
    torch.float32: (2**-9, 8 * 2**-10),
}
SEVERAL_ROUNDINGS = {torch.bfloat16: 2**-6, torch.float16: 2**-8}  # of a vector's norm
FORMATS = [torch.contiguous_format, torch.channels_last]
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
every_format = pytest.mark.parametrize("memory_format", FORMATS, ids=str)


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch):
    monkeypatch.setenv("DCLS_CONVERT_DEPTHWISE", "triton")
    with torch.backends.cudnn.flags(allow_tf32=True):
        yield


@pytest.fixture
def taken():
    """Counts the convolutions that go Triton's way; torch.compile cannot trace the count."""
    with mock.patch.object(sys.modules[conv2d.__module__], "depthwise", wraps=depthwise) as counting:
        yield counting


def tensors(batch, channels, side, window, dtype=torch.bfloat16, memory_format=torch.contiguous_format):
    """Maps, kernel and bias on the GPU, and a gradient of the output, padded by half of the window."""
    generator = torch.Generator().manual_seed(0)
    padding = tuple(size // 2 for size in window)
    output = [cells + 2 * pad - size + 1 for cells, pad, size in zip(side, padding, window, strict=True)]
    sizes = (batch, channels, *side), (channels, 1, *window), (channels,), (batch, channels, *output)
    maps, kernel, bias, grad = (torch.randn(size, generator=generator).to("cuda", dtype) for size in sizes)
    given = [tensor.requires_grad_() for tensor in (maps.to(memory_format=memory_format), kernel, bias)]
    return given, grad.to(memory_format=memory_format), padding


def values_and_gradients(function, given, grad, padding):
    output = function(*given, (1, 1), padding, (1, 1), given[1].shape[0])
    return [output.detach(), *torch.autograd.grad(output, given, grad)]


@pytest.mark.parametrize(
    ("window", "side", "batch"),
    [
        ((9, 9), (7, 7), 128),
        ((17, 17), (56, 56), 128),
        ((17, 17), (14, 13), 3),
        ((51, 51), (55, 56), 3),
        ((50, 12), (29, 31), 1),
        ((10, 51), (7, 9), 128),
        ((16, 9), (28, 28), 128),
    ],
    ids=str,
)
@every_dtype
@every_format
def test_values_memory_format_and_gradients_are_those_of_torch(window, side, batch, dtype, memory_format, taken):
    given, grad, padding = tensors(batch, 5, side, window, dtype, memory_format)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    ours = values_and_gradients(conv2d, given, grad, padding)
    assert taken.call_count == 1
    assert ours[0].is_contiguous(memory_format=memory_format)
    relative, of_mean = TOLERANCES[dtype]
    for mine, wanted in zip(ours, values_and_gradients(F.conv2d, exact, grad.double(), padding), strict=True):
        atol = of_mean * wanted.square().mean().sqrt().item()
        torch.testing.assert_close(mine.double(), wanted, rtol=relative, atol=atol)


@every_dtype
@every_format
def test_every_run_gives_the_same_bits(dtype, memory_format):
    runs = [values_and_gradients(conv2d, *tensors(65, 24, (28, 27), (17, 17), dtype, memory_format)) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by opcheck
@every_dtype
@every_format
def test_the_operations_are_what_torch_expects_of_operations(dtype, memory_format):
    given, grad, padding = tensors(2, 3, (7, 9), (5, 4), dtype, memory_format)
    torch.library.opcheck(depthwise, (*given, padding))
    torch.library.opcheck(depthwise_kernel_gradient, (given[0], grad.requires_grad_(), padding))


@pytest.mark.parametrize(
    ("columns", "memory_format", "maps"),
    [(56, torch.contiguous_format, 2), (56, torch.channels_last, 4), (53, torch.contiguous_format, 4)],
)
def test_memory(columns, memory_format, maps):
    """Output and input's gradient; two maps are copied at a time, if not contiguous with rows of 8 cells or more."""
    batch, channels, rows = 64, 96, 56
    given, grad, padding = tensors(batch, channels, (rows, columns), (17, 17), torch.bfloat16, memory_format)
    values_and_gradients(conv2d, given, grad, padding)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = values_and_gradients(conv2d, given, grad, padding)
    taken = torch.cuda.max_memory_allocated() - before
    map_bytes = 2 * batch * channels * rows * 56  # rows are filled up to eights
    bank = 2 * channels * 32 * (17 + 2 * 7) * 16
    parts = 2 * 4 * depthwise_triton.PROGRAMS * 128 * 8  # float32, and their sum
    assert len(kept) == 4
    assert taken <= maps * map_bytes + bank + parts + 2**20


def layer_of(device="cuda"):
    torch.manual_seed(0)
    return DclsConv2d(8, 8, groups=8, kernel_count=9, dilated_kernel_size=17, padding="same").to(device)


def images(batch=4):
    return torch.randn(batch, 8, 14, 13, generator=torch.Generator().manual_seed(1))


def flat(tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def step_of(model, given, dtype=torch.bfloat16):
    parameters = list(model.parameters())

    def step():
        with torch.autocast("cuda", dtype):
            output = model(given)
        gradients = torch.autograd.grad(output.float().square().mean(), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-0.1)
        return [output.detach(), *gradients]

    return step


def test_a_training_step_never_waits_for_the_gpu(taken):
    step = step_of(layer_of(), images().cuda())
    step()  # compiles the kernels
    with never_waiting():
        step()
    assert taken.call_count == 2


def test_a_cuda_graph_of_a_training_step():
    layer = layer_of()
    step = step_of(layer, images().cuda())
    graph, results = captured(step)
    state = copy.deepcopy(layer.state_dict())
    graph.replay()
    replayed = [tensor.clone() for tensor in [*results, *layer.parameters()]]
    layer.load_state_dict(state)
    expected = [*step(), *layer.parameters()]
    assert all(torch.equal(*pair) for pair in zip(replayed, expected, strict=True))


@pytest.mark.filterwarnings("ignore:dynamo_pgo")  # that it is among the caches
def test_a_compiled_layer():
    torch.compiler.reset()
    layer, given = layer_of(), images().cuda()
    wanted = step_of(copy.deepcopy(layer), given)()
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(step_of(torch.compile(layer, fullgraph=True), given))
    assert "dcls_convert.depthwise.default(" in codes[0]
    for mine, expected in zip(found, wanted, strict=True):
        difference = (mine.double() - expected.double()).norm()
        assert difference <= SEVERAL_ROUNDINGS[torch.bfloat16] * expected.double().norm()


def scaled_step(model, dtype):
    """The gradients, after a step under a scaler."""
    given = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cuda", init_scale=2.0**8)
    with torch.autocast("cuda", dtype):
        loss = model(given).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**8  # nothing overflowed
    return flat(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", list(SEVERAL_ROUNDINGS), ids=str)
@every_format
def test_a_converted_model_under_a_scaler(dtype, memory_format, taken, monkeypatch):
    torch.manual_seed(0)
    model = timm.create_model("test_convnext", num_classes=3, ls_init_value=0.5)
    dcls_convert.convert_(model, dilated_size=17, init="random")
    model = model.to("cuda", memory_format=memory_format)
    other = copy.deepcopy(model)
    found = scaled_step(model, dtype)
    assert taken.call_count == sum(isinstance(module, DclsConv2d) for module in model.modules())
    monkeypatch.setenv("DCLS_CONVERT_DEPTHWISE", "torch")
    wanted = scaled_step(other, dtype)
    assert (found - wanted).norm() <= SEVERAL_ROUNDINGS[dtype] * wanted.norm()
    moved = flat(model.parameters())
    assert moved.isfinite().all()


def gradients(rank, processes):
    """Of one process; of all together, where there are several."""
    layer = layer_of(f"cuda:{rank}")
    model = DistributedDataParallel(layer) if processes > 1 else layer
    part = images().chunk(processes)[rank].to(f"cuda:{rank}")
    model(part).square().mean().backward()
    return flat(parameter.grad for parameter in layer.parameters()).cpu()


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_several_gpus(tmp_path):
    command = [sys.executable, "-m", "tests.depthwise.test_depthwise_on_gpu"]
    workers = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], cwd=Path(__file__).parents[2]) for rank in range(2)
    ]
    try:
        assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(one, other)
    wanted = gradients(0, 1)
    assert (one - wanted).norm() <= 2**-8 * wanted.norm()  # some products in TF32


if __name__ == "__main__":
    rank, processes, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes)
    torch.save(gradients(rank, processes), folder / f"{rank}.pt")
    dist.destroy_process_group()
