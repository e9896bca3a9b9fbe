"""The depthwise convolution equals torch's in values, memory format and gradients of any order, in
every mode.
"""

import copy
import math
import re
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import _inductor as inductor
from torch._dynamo import lookup_backend
from torch._inductor.utils import get_code
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from dcls_convert.depthwise import choice, matmul, onednn
from dcls_convert.depthwise.choice import VARIABLE, fastest_conv2d
from dcls_convert.layers.dcls_conv import DclsConv2d

from ..dispatch_modes import UNORDERED, WAITS_FOR_HOST, AllocatedMemory, RefuseOperations
from ..layers.common import close
from ..recorded_calls import recording

FLOAT64_ATOL = 1e-11  # for sums of a few thousand products of numbers of order 1
MAX_PADDING_COLUMNS = 6
CHANNELS_LAST = torch.channels_last
every_algorithm = pytest.mark.parametrize("algorithm", ["onednn", "matmul"])


@contextmanager
def computed_by(algorithm):
    """Compute convolutions of any dtype by this algorithm inside a `with` block, on any processor.

    Yields a list of the arguments of each convolution that was computed; the last is the padding.
    """
    calls = []
    module = {"onednn": onednn, "matmul": matmul}[algorithm]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "max_padding_columns", lambda: MAX_PADDING_COLUMNS)
        patch.setattr(onednn, "DTYPES", choice.MATMUL_DTYPES)
        patch.setenv(VARIABLE, "matmul" if algorithm == "matmul" else "auto")
        patch.setattr(module, "depthwise", recording(module.depthwise, calls))
        yield calls


DEFAULTS = {
    "stride": (1, 1),
    "channels_last": False,
    "channels": 3,
    "batch": 2,
    "bias": True,
    "max_at_once": 2**29,  # 1 means a part per image or channel
    "kernels_per_channel": 1,
}


def make_case(window, padding, side, **changes):
    return {"window": window, "padding": padding, "side": side, **DEFAULTS, **changes}


@st.composite
def cases(draw, max_side=24):
    window = draw(st.tuples(st.integers(1, max_side), st.integers(1, max_side)))
    padding = tuple(draw(st.integers(0, size + 1)) for size in window)
    min_side = [max(1, size - 2 * pad) for size, pad in zip(window, padding, strict=True)]
    side = tuple(draw(st.integers(low, low + max_side)) for low in min_side)
    flags = st.booleans()
    counts = st.integers(1, 3)
    parts = st.sampled_from([1, 2**29])
    options = {
        "channels_last": flags,
        "bias": flags,
        "channels": counts,
        "batch": counts,
        "max_at_once": parts,
    }
    return make_case(window, padding, side, **draw(st.fixed_dictionaries(options)))


def tensors(case, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    channels = case["channels"]
    kernels = channels * case["kernels_per_channel"]
    input = torch.randn(
        case["batch"], channels, *case["side"], dtype=torch.float64, generator=generator
    )
    kernel = torch.randn(kernels, 1, *case["window"], dtype=torch.float64, generator=generator)
    bias = []
    if case["bias"]:
        bias.append(torch.randn(kernels, dtype=torch.float64, generator=generator))
    input = input.to(
        memory_format=CHANNELS_LAST if case["channels_last"] else torch.contiguous_format
    )
    arguments = case["stride"], case["padding"], (1, 1), channels
    return [tensor.to(dtype).requires_grad_() for tensor in (input, kernel, *bias)], arguments


def call(function, inputs, arguments):
    return function(*inputs, *[None] * (3 - len(inputs)), *arguments)


def outputs_and_gradients(function, inputs, arguments):
    output = call(function, inputs, arguments)
    grad_output = torch.randn(
        output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return [output, *torch.autograd.grad((output * grad_output.to(output.dtype)).sum(), inputs)]


def strides_that_matter(tensor):
    """Return strides without those of axes of one cell, which no memory format determines."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@every_algorithm
@example(make_case((17, 17), (8, 8), (28, 30)))
@example(make_case((1, 1), (0, 0), (1, 17), channels_last=True, channels=2, batch=1))
@example(make_case((17, 17), (8, 8), (14, 7), channels_last=True))
@example(make_case((51, 49), (25, 24), (30, 15), max_at_once=1))
@example(make_case((14, 15), (7, 6), (20, 9), stride=(2, 1)))
@example(make_case((17, 17), (0, 0), (19, 18), stride=(3, 1), channels_last=True))
@example(make_case((7, 7), (9, 9), (1, 1)))
@example(make_case((17, 17), (8, 8), (9, 20), kernels_per_channel=2))
@example(make_case((7, 17), (3, 8), (5, 16), batch=0))
@given(case=cases())
def test_values_memory_format_and_gradients_are_those_of_torch(algorithm, case):
    inputs, arguments = tensors(case)
    with pytest.MonkeyPatch.context() as patch, computed_by(algorithm):
        # With 1: one channel, or one image, at a time.
        patch.setattr(matmul, "MAX_BYTES", case["max_at_once"])
        patch.setattr(onednn, "MAX_GRADIENT_FLOATS", case["max_at_once"])
        ours = outputs_and_gradients(fastest_conv2d, inputs, arguments)
    theirs = outputs_and_gradients(F.conv2d, inputs, arguments)
    close(ours, theirs, FLOAT64_ATOL)
    formats_differ = case["channels"] > 1 and ours[0].shape[2:].numel() > 1
    if formats_differ:
        assert strides_that_matter(ours[0]) == strides_that_matter(theirs[0])


@pytest.mark.slow
@every_algorithm
@given(case=cases(max_side=3))
def test_first_and_second_gradients_equal_finite_differences(algorithm, case):
    inputs, arguments = tensors({**case, "channels": 2})
    with pytest.MonkeyPatch.context() as patch, computed_by(algorithm):
        patch.setattr(onednn, "MIN_GRADIENT_CELLS", 1)
        patch.setattr(matmul, "MAX_PATCH_SIDE", 2)
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(
                lambda *tensors: call(fastest_conv2d, tensors, arguments).tanh(),
                inputs,
                fast_mode=True,
            )


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("side", [(28, 28), (14, 14)])
def test_rounding_is_little_more_than_torchs(algorithm, dtype, side):
    inputs, arguments = tensors(make_case((17, 17), (8, 8), side, channels=4, batch=4), dtype)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = outputs_and_gradients(F.conv2d, exact_inputs, arguments)
    theirs = outputs_and_gradients(F.conv2d, inputs, arguments)
    with computed_by(algorithm) as calls:
        ours = outputs_and_gradients(fastest_conv2d, inputs, arguments)
    assert calls
    # In float32, oneDNN adds in an order of its own.
    factor = 10 if (algorithm, dtype) == ("onednn", torch.float32) else 1.5
    for result, torch_result, expected in zip(ours, theirs, exact, strict=True):
        assert result.dtype == dtype
        rounding = 0.5 * torch.finfo(dtype).eps * expected.norm()
        torch_error = (torch_result - expected).norm()
        assert (result - expected).norm() <= factor * max(torch_error, rounding)


WIDE = make_case((7, 17), (3, 8), (5, 16), channels=2)


@every_algorithm
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # by torch, of its own use or ours
def test_function_transforms_tangents_and_batches_of_gradients_are_those_of_torch(algorithm):
    inputs, arguments = tensors(WIDE)
    detached = [tensor.detach() for tensor in inputs]
    tangents = tuple(torch.ones_like(tensor) for tensor in detached)

    def results(function):
        def loss(images, *others):
            images = images.reshape(-1, *images.shape[-3:])
            return function(images, *others, *arguments).tanh().sum()

        yield torch.func.jvp(torch.func.grad(loss, argnums=1), tuple(detached), tangents)[1]
        yield from torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), (0, None, None))(
            *detached
        )
        with forward_ad.dual_level():
            yield forward_ad.unpack_dual(loss(*map(forward_ad.make_dual, inputs, tangents))).tangent
        output = function(*inputs, *arguments)
        directions = torch.randn(
            3, *output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1)
        )
        yield from torch.autograd.grad(output, inputs, directions, is_grads_batched=True)

    theirs = list(results(F.conv2d))
    with computed_by(algorithm) as calls:
        close(list(results(fastest_conv2d)), theirs, FLOAT64_ATOL)
    assert calls


@every_algorithm
def test_autocast_gives_what_torch_gives_under_it(algorithm):
    inputs, arguments = tensors(WIDE, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = outputs_and_gradients(F.conv2d, inputs, arguments)
        with computed_by(algorithm) as calls:
            ours = outputs_and_gradients(fastest_conv2d, inputs, arguments)
    assert calls
    close(ours, theirs, atol=0.5)


@every_algorithm
# The shape without a batch has as many rows as channels.
@pytest.mark.parametrize("shape", [(4, 4, 20), (2, 4, 20, 20)])
def test_maps_without_a_batch_and_dense_kernels_are_left_alone(algorithm, shape):
    groups = 4 if len(shape) == 3 else 1
    arguments = (
        torch.randn(shape),
        torch.randn(4, 4 // groups, 17, 17),
        None,
        (1, 1),
        (8, 8),
        (1, 1),
        groups,
    )
    with computed_by(algorithm) as calls:
        assert torch.equal(fastest_conv2d(*arguments), F.conv2d(*arguments))
    assert not calls


@every_algorithm
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # by torch, of its own use or ours
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_layers_use_the_algorithm_and_exported_programs_contain_one_plain_convolution(algorithm):
    torch.manual_seed(0)
    layer = DclsConv2d(4, 4, kernel_count=5, dilated_kernel_size=17, padding=8, groups=4)
    images = torch.randn(1, 4, 9, 9)
    with computed_by(algorithm) as calls:
        layer(images).sum().backward()
        assert layer.positions.grad.abs().sum() > 0
        exported = torch.export.export(layer.eval(), (images,))
        traced = torch.jit.trace(layer, images, check_trace=False)
    assert [arguments[-1] for arguments in calls] == [(8, 8)]
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("conv2d" in name for name in names) == 1
    assert not any("pad" in name or "bmm" in name for name in names)
    torch.testing.assert_close(traced(images), layer(images))


@every_algorithm
def test_a_flop_counter_counts_the_convolution(algorithm):
    inputs, arguments = tensors(make_case((17, 17), (8, 8), (14, 14), channels=4))
    counts = []
    for convolve in (fastest_conv2d, F.conv2d):
        with computed_by(algorithm) as calls, FlopCounterMode(display=False) as counter:
            outputs_and_gradients(convolve, inputs, arguments)
        counts.append(counter.get_total_flops())
    assert not calls
    assert counts[0] == counts[1] > 0


# What GPUs require of matrix products.


def stage(batch):
    maps = torch.randn(batch, 96, 56, 56, requires_grad=True)
    kernel = torch.randn(96, 1, 17, 17, requires_grad=True)
    return maps, kernel, matmul.depthwise(maps, kernel, None, (1, 1), (8, 8))


def test_a_step_adds_in_a_fixed_order_and_saves_only_map_and_window():
    saved = []

    def record(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        with RefuseOperations(WAITS_FOR_HOST | UNORDERED):
            maps, kernel, output = stage(1)
            torch.autograd.grad(output, (maps, kernel), torch.ones_like(output))
    assert [tensor.data_ptr() for tensor in saved] == [maps.data_ptr(), kernel.data_ptr()]


def test_a_bank_is_written_once():
    """The bank of five channels has 81 x 81 numbers each, for maps of 9 x 9."""
    vertical, horizontal = matmul.tile_map((9, 9), (7, 7), (3, 3))
    with AllocatedMemory() as memory:
        matmul._bank(torch.randn(5, 1, 7, 7), vertical, horizontal)
    assert memory.sizes().count(5 * 81 * 81 * 4) == 1


@pytest.mark.parametrize("side", [14, 15, 30])
def test_rows_of_products_are_aligned_if_maps_are_tiled(monkeypatch, side):
    """The row of a whole map is a view of the map; padding would copy it."""
    pairs = []
    monkeypatch.setattr(torch, "bmm", recording(torch.bmm, pairs))
    maps = torch.randn(2, 3, side, side)
    matmul.convolve(maps, torch.randn(3, 1, 9, 9), (4, 4))
    matmul.weight_gradient(maps, maps, (9, 9), (4, 4))
    (patches, bank), (output_patches, same_patches) = pairs
    lengths = [patches.shape[2], bank.shape[2], output_patches.shape[1], same_patches.shape[2]]
    if side == 14:
        assert lengths == [14 * 14] * 4
        assert {patches.data_ptr(), output_patches.data_ptr()} == {maps.data_ptr()}
    else:
        assert not any(length % 8 for length in lengths)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch._prims_common:FutureWarning")  # by inductor, of itself
def test_compiled_code_writes_patches_once():
    """Memory is laid out as for GPUs, with strides that are multiples of 128 bytes."""
    maps = torch.randn(4, 6, 28, 28).to(memory_format=CHANNELS_LAST)
    kernel = torch.randn(6, 1, 17, 17)
    patches = 4 * 6 * 4 * 900  # numbers
    with inductor.config.patch(disable_padding_cpu=False, fx_graph_cache=False):
        for function in (
            lambda: matmul.convolve(maps, kernel, (8, 8), channels_last=True),
            lambda: matmul.weight_gradient(maps, maps, (17, 17), (8, 8)),
        ):
            code = get_code(torch.compile(function, fullgraph=True))[0]
            shapes = re.findall(r"= empty_strided_cpu\(\(([\d, ]+)\)", code)
            sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
            assert sum(patches <= size < 1.1 * patches for size in sizes) == 1
    torch.compiler.reset()


def test_a_step_copies_the_map_once_and_the_gradient_once():
    """This holds although the map is cast, and both are transposed. With a single patch, nothing
    else is copied: each of the two convolutions writes a product and its output.
    """
    maps = torch.randn(4, 8, 14, 14).to(memory_format=CHANNELS_LAST).requires_grad_()
    kernel = torch.randn(8, 1, 17, 17, requires_grad=True)
    grad = torch.randn_like(maps, dtype=torch.bfloat16)
    with (
        computed_by("matmul"),
        torch.autocast("cpu", dtype=torch.bfloat16),
        AllocatedMemory() as memory,
    ):
        output = fastest_conv2d(maps, kernel, None, (1, 1), (8, 8), (1, 1), 8)
        torch.autograd.grad(output, (maps, kernel), grad)
    assert memory.sizes().count(2 * maps.numel()) == 2 + 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [2**29, 2**26])
def test_the_largest_allocation_is_as_calculated_from_shapes(monkeypatch, max_bytes):
    """Stage 1 of ConvNeXt-T in float32, at a batch of 8: a map has 16 patches of 14 x 14 outputs,
    which need 30 x 30 inputs. Their rows have 200 and 904 numbers.
    """
    monkeypatch.setattr(matmul, "MAX_BYTES", max_bytes)
    patches = 4 * 8 * 16 * 904
    bank = 4 * 200 * 904  # bytes of a channel
    channels = min(96, max_bytes // (patches + 4 * 8 * 16 * 200 + bank))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        maps, kernel, output = stage(8)
        torch.autograd.grad(output, (maps, kernel), output.detach())
    allocated = [event.self_cpu_memory_usage for event in profile.events()]
    padded_maps = 4 * 8 * 96 * 72 * 72
    assert max(allocated) <= max(channels * max(patches, bank), padded_maps)


# Networks that are compiled, or wrapped by DDP and FSDP2 in a group of one process: `matmul` is
# compared with torch's algorithm.


def steps(model, images):
    """Train, and return the output and the gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results = []
    for _ in range(3):
        optimizer.zero_grad()
        output = model(images)
        output.square().mean().backward()
        results += [output.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
    return results


def network():
    torch.manual_seed(0)
    layer = DclsConv2d(
        4, 4, kernel_count=5, dilated_kernel_size=17, padding=8, groups=4, dtype=torch.float64
    )
    return torch.nn.Sequential(layer, torch.nn.GELU(), copy.deepcopy(layer))


@pytest.mark.slow
def test_a_compiled_training_step_has_no_plain_convolution_and_trains_as_with_torch(
    monkeypatch,
):
    images = torch.randn(2, 4, 20, 18, dtype=torch.float64).to(memory_format=CHANNELS_LAST)
    monkeypatch.setenv(VARIABLE, "torch")
    expected = steps(network(), images)
    monkeypatch.setenv(VARIABLE, "matmul")
    graphs = []
    torch.compiler.reset()

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return lookup_backend("aot_eager")(graph, inputs)

    close(
        steps(torch.compile(network(), fullgraph=True, backend=backend), images),
        expected,
        atol=1e-9,
    )
    assert all(
        ("bmm" in graph or "autograd_function" in graph) and "conv2d" not in graph
        for graph in graphs
    )
    assert graphs


@pytest.mark.distributed
@pytest.mark.parametrize(
    "wrap",
    [DistributedDataParallel, lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,)))],
)
def test_layers_wrapped_for_several_processes_train_as_with_torch(tmp_path, monkeypatch, wrap):
    images = torch.randn(2, 4, 20, 18, dtype=torch.float64)
    monkeypatch.setenv(VARIABLE, "torch")
    expected = steps(network(), images)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with computed_by("matmul") as calls:
            ours = [
                getattr(tensor, "to_local", tensor.detach)()
                for tensor in steps(wrap(network()), images)
            ]
    finally:
        dist.destroy_process_group()
    assert len(calls) == 6
    close(ours, expected, atol=1e-9)
