"""The kernels in Triton's interpreter, on CPU tensors. `test_depthwise_triton.py` runs it in a process of its own.

Maps, windows and batches are small, since the interpreter takes its time. It does not multiply bfloat16.
"""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dcls_convert.depthwise import triton as depthwise_triton
from dcls_convert.depthwise.choice import conv2d
from dcls_convert.depthwise.triton import depthwise, depthwise_kernel_gradient
from dcls_convert.layers.dcls_conv import DclsConv2d

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}  # of the largest value: sums in another order, rounded once
OURS = torch.ops.dcls_convert.depthwise.default


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch):
    monkeypatch.setenv("DCLS_CONVERT_DEPTHWISE", "triton")


@pytest.fixture
def new_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tensors(batch=2, channels=3, side=(9, 11), window=(5, 4), dtype=torch.float32, layout="contiguous", seed=0):
    """Maps, kernel and bias; where `layout` says so, the maps are every other row or column of larger ones."""
    generator = torch.Generator().manual_seed(seed)
    steps = [2 if part in layout else 1 for part in ("batch", "channels", "rows", "columns")]
    sizes = [step * size for step, size in zip(steps, (batch, channels, *side), strict=True)]
    maps = torch.randn(sizes, dtype=dtype, generator=generator)
    maps = maps.to(memory_format=torch.channels_last if "last" in layout else torch.contiguous_format)
    kernel = torch.randn(channels, 1, *window, dtype=dtype, generator=generator)
    bias = torch.randn(channels, dtype=dtype, generator=generator)
    return [t.requires_grad_() for t in (maps[tuple(slice(None, None, step) for step in steps)], kernel, bias)]


def values_and_gradients(function, given, weights):
    output = function(*given)
    return [output, *torch.autograd.grad((output.double() * weights).sum(), given)]


@st.composite
def geometries(draw):
    window = draw(st.tuples(st.integers(1, 13), st.integers(1, 13)))
    padding = tuple(draw(st.integers(0, size + 1)) for size in window)
    least = [max(1, size - 2 * pad) for size, pad in zip(window, padding, strict=True)]
    side = tuple(draw(st.integers(low, max(low, 18))) for low in least)
    return {
        **{"window": window, "padding": padding, "side": side},
        "batch": draw(st.integers(1, 20)),
        "channels": draw(st.integers(1, 2)),
        "dtype": draw(st.sampled_from(sorted(TOLERANCE, key=str))),
        "layout": draw(st.sampled_from(("contiguous", "last", "rows", "columns", "batch channels", "last rows"))),
        "programs": draw(st.sampled_from((1, 8))),
    }


SAME = {"window": (17, 17), "padding": (8, 8), "programs": 8}  # the case that the kernels are made for
WIDE = {"side": (6, 8), "window": (51, 50), "padding": (25, 25), "programs": 1}


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@example({**SAME, "side": (16, 24), "batch": 20, "channels": 1})
@example({**SAME, "side": (14, 13), "batch": 2, "channels": 2, "dtype": torch.float16, "layout": "last"})
@example({**SAME, "side": (7, 7), "batch": 20, "channels": 2})
@example({**WIDE, "batch": 3, "channels": 2})
@given(geometries())
@pytest.mark.usefixtures("new_memory_is_nan")
def test_values_memory_format_and_gradients_are_those_of_torch(geometry):
    padding, programs, geometry = geometry["padding"], geometry["programs"], {**geometry}
    del geometry["padding"], geometry["programs"]
    given = tensors(**geometry)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    channels = len(given[1])
    wanted = F.conv2d(*exact, padding=padding, groups=channels)
    weights = torch.randn(wanted.shape, dtype=given[0].dtype, generator=torch.Generator().manual_seed(1)).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depthwise_triton, "PROGRAMS", programs)
        ours = values_and_gradients(lambda *args: depthwise(*args, padding), given, weights)
    theirs = values_and_gradients(lambda *args: F.conv2d(*args, padding=padding, groups=channels), exact, weights)
    for mine, expected in zip(ours, theirs, strict=True):
        atol = TOLERANCE[given[0].dtype] * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(mine.double(), expected, rtol=0, atol=atol)
    if min(channels, math.prod(wanted.shape[2:])) > 1:
        assert ours[0].stride() == F.conv2d(*given, padding=padding, groups=channels).stride()


def test_gradients_of_gradients():
    def second(function):
        given = tensors(side=(6, 7))
        first = torch.autograd.grad(function(*given).tanh().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(gradient.sin().sum() for gradient in first), given)

    ours = second(lambda *given: depthwise(*given, (2, 1)))
    for mine, wanted in zip(ours, second(lambda *given: F.conv2d(*given, padding=(2, 1), groups=3)), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by opcheck
@pytest.mark.parametrize("layout", ["contiguous", "last"])
def test_the_operations_are_what_torch_expects_of_operations(layout):
    maps, kernel, bias = tensors(batch=1, channels=2, side=(3, 4), window=(3, 2), layout=layout)
    torch.library.opcheck(depthwise, (maps, kernel, bias if layout == "last" else None, (1, 0)))
    grad = torch.ones(1, 2, 3, 3, requires_grad=True)
    torch.library.opcheck(depthwise_kernel_gradient, (maps, grad, (1, 0)))


def counting(graphs):
    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    return backend


def test_a_layer_takes_the_way_also_in_a_compiled_program_and_under_autocast():
    torch.manual_seed(0)
    layer = DclsConv2d(2, 2, kernel_count=5, dilated_kernel_size=9, padding="same", groups=2)
    compiled, graphs = torch.compile(layer, fullgraph=True, backend="aot_eager"), []
    torch.compile(layer, fullgraph=True, backend=counting(graphs))(torch.randn(2, 2, 7, 8))
    assert graphs[0].count(OURS) == 1
    parameters = list(layer.parameters())
    for batch, autocast in ((2, False), (3, False), (5, True)):  # the second makes the batch's size dynamic
        images = torch.randn(batch, 2, 7, 8)
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            outputs = [layer(images), compiled(images), F.conv2d(images, layer.kernel(), layer.bias, 1, 4, 1, 2)]
        gradients = [torch.autograd.grad(output.float().sin().sum(), parameters) for output in outputs]
        assert len({output.dtype for output in outputs}) == 1
        atol = 20 * TOLERANCE[outputs[0].dtype]
        for output, gradient in zip(outputs[:2], gradients[:2], strict=True):
            torch.testing.assert_close(output, outputs[2], rtol=0, atol=atol)
            for mine, wanted in zip(gradient, gradients[2], strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=20 * atol)


def test_what_was_measured_decides_in_a_program_of_any_sizes(monkeypatch):
    monkeypatch.delenv("DCLS_CONVERT_DEPTHWISE")
    from_4_images = torch.compiler.assume_constant_result(lambda *_: ((1, 1, 4, True),))
    monkeypatch.setattr("dcls_convert.depthwise.choice.measurements", from_4_images)
    monkeypatch.setattr("dcls_convert.depthwise.choice._most_columns", lambda: None)
    kernel, graphs = torch.ones(2, 1, 3, 3), []
    compiled = torch.compile(conv2d, fullgraph=True, dynamic=True, backend=counting(graphs))
    for batch, memory_format in itertools.product((3, 4), (torch.contiguous_format, torch.channels_last)):
        images = torch.randn(batch, 2, 4, 5).to(memory_format=memory_format)
        compiled(images, kernel, None, (1, 1), (1, 1), (1, 1), 2)
        assert graphs[-1].count(OURS) == (batch == 4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch, for forward derivatives
def test_exported_and_transformed_programs_hold_torchs_convolution():
    layer = DclsConv2d(2, 2, kernel_count=3, dilated_kernel_size=3, padding=1, groups=2).eval()
    images = torch.randn(1, 2, 4, 5)
    for strict in (True, False):
        nodes = torch.export.export(layer, (images,), strict=strict).graph.nodes
        assert OURS not in [node.target for node in nodes]

    def tangent(images):
        return torch.func.jvp(layer, (images,), (images,))[1]

    torch.testing.assert_close(torch.compile(tangent, backend="aot_eager")(images), tangent(images))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_would_be_read_beyond_its_end_is_refused(backend):
    maps, kernel, bias = (tensor.detach() for tensor in tensors(side=(4, 4), window=(3, 3)))
    function = torch.compile(depthwise, backend=backend) if backend else depthwise
    for wrong in ((maps, kernel[:2], bias), (maps, kernel, bias[:1]), (maps, kernel, bias.to("meta"))):
        with pytest.raises(RuntimeError, match=r"each channel|one device"):
            function(*wrong, (1, 1))


def test_strides_of_more_than_32_bits():
    far = torch.empty(8 * 2**28 + 1, dtype=torch.float16)  # 4 GiB, of which hardly any is touched
    maps = far.as_strided((1, 1, 1, 9), (1, 1, 1, 2**28)).normal_()
    one = torch.ones(1, 1, 1, 1, dtype=torch.float16)
    torch.testing.assert_close(depthwise(maps, one, None, (0, 0)), maps.contiguous(), rtol=0, atol=0)


def test_other_convolutions_go_torchs_way():
    maps, kernel, bias = (tensor.detach() for tensor in tensors(side=(9, 9), window=(3, 3)))
    for stride, padding, dilation, dtype in (
        ((2, 2), (1, 1), (1, 1), torch.float32),
        ((1, 1), "same", (2, 2), torch.float64),
    ):
        given = [tensor.to(dtype) for tensor in (maps, kernel, bias)]
        found = conv2d(*given, stride, padding, dilation, 3)
        torch.testing.assert_close(found, F.conv2d(*given, stride, padding, dilation, 3), rtol=0, atol=0)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_spread_tensors_go_torchs_way(process_group):
    mesh = init_device_mesh("cpu", (1,))
    given = [distribute_tensor(tensor.detach(), mesh, [Replicate()]) for tensor in tensors(side=(4, 4), window=(3, 3))]
    compiled = torch.compile(conv2d, backend="aot_eager")
    found, wanted = (function(*given, (1, 1), (1, 1), (1, 1), 3).full_tensor() for function in (compiled, conv2d))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "spread", [DistributedDataParallel, lambda layer: fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))]
)
def test_spread_layers(process_group, spread):
    torch.manual_seed(0)
    layer = DclsConv2d(2, 2, kernel_count=5, dilated_kernel_size=7, padding=3, groups=2)
    images = torch.randn(2, 2, 7, 8)
    layer(images).sum().backward()
    wanted = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    spread(layer)(images).sum().backward()
    for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
        found = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(found, gradient)
