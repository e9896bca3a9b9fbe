"""The depthwise convolution gives what torch's gives: values, memory format, gradients of any order, in every mode."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from dcls_convert.depthwise import choice as depthwise
from dcls_convert.layers.dcls_conv import DclsConv2d

FLOAT64_ATOL = 1e-12
FLOAT32_TOLERANCE = 1e-5  # of the largest: the same sums in another order
LIMIT = 6
CHANNELS_LAST = torch.channels_last


@pytest.fixture
def any_processor(monkeypatch):
    """Its ways are gone for every dtype on every processor; yields the paddings of the convolutions carried out."""
    monkeypatch.setattr(depthwise, "_most_columns", lambda: LIMIT)
    monkeypatch.setattr(depthwise, "DTYPES", depthwise.DTYPES | {torch.float64})
    paddings = []
    original = depthwise._forward

    def noting(*args):
        paddings.append(args[4])
        return original(*args)

    monkeypatch.setattr(depthwise, "_forward", noting)
    return paddings


# window, padding, stride: both sides of every border of the rule (6 columns, 49 cells), asymmetric and even windows
GEOMETRIES = [
    ((3, 3), (1, 1), (1, 1)),
    ((5, 5), (2, 2), (2, 2)),
    ((7, 7), (3, 3), (1, 1)),
    ((13, 13), (6, 6), (1, 1)),
    ((14, 14), (7, 7), (2, 2)),
    ((15, 13), (7, 6), (1, 2)),
    ((13, 15), (6, 7), (2, 1)),
    ((17, 17), (8, 8), (1, 1)),
    ((17, 17), (0, 0), (3, 1)),
    ((1, 17), (0, 8), (1, 1)),
    ((17, 1), (8, 0), (1, 1)),
    ((1, 49), (0, 24), (1, 1)),
    ((7, 7), (9, 9), (1, 1)),
]
SIDES = [(9, 10), (1, 1), (2, 20), (19, 18)]


def cases():
    for geometry, side, channels_last, (groups, multiplier) in itertools.product(
        GEOMETRIES, SIDES, (False, True), ((3, 1), (3, 2), (1, 1))
    ):
        (window, padding, stride) = geometry
        if all(cells + 2 * around >= size for cells, around, size in zip(side, padding, window, strict=True)):
            yield window, padding, stride, side, channels_last, groups, multiplier


def tensors(case, dtype=torch.float64, batch=2):
    window, padding, stride, side, channels_last, groups, multiplier = case
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(batch, groups, *side, dtype=dtype, generator=generator)
    input = input.contiguous(memory_format=CHANNELS_LAST if channels_last else torch.contiguous_format)
    kernel = torch.randn(groups * multiplier, 1, *window, dtype=dtype, generator=generator)
    bias = torch.randn(groups * multiplier, dtype=dtype, generator=generator)
    arguments = (stride, padding, (1, 1), groups)
    return [tensor.requires_grad_() for tensor in (input, kernel, bias)], arguments


def outputs_and_gradients(function, inputs, arguments):
    output = function(*inputs, *arguments)
    weights = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_strides_and_gradients_are_those_of_torch(any_processor, dtype):
    for case in cases():
        inputs, arguments = tensors(case, dtype)
        ours = outputs_and_gradients(depthwise.conv2d, inputs, arguments)
        theirs = outputs_and_gradients(F.conv2d, inputs, arguments)
        for mine, wanted in zip(ours, theirs, strict=True):
            atol = FLOAT64_ATOL if dtype == torch.float64 else FLOAT32_TOLERANCE * wanted.abs().max().item()
            torch.testing.assert_close(mine, wanted, rtol=FLOAT64_ATOL, atol=atol)
        assert ours[0].stride() == theirs[0].stride(), case
    assert any(padding[1] > LIMIT for padding in any_processor)


def test_values_do_not_depend_on_whether_gradients_are_kept(any_processor):
    for case in cases():
        inputs, arguments = tensors(case, torch.float32)
        with torch.no_grad():
            alone = depthwise.conv2d(*inputs, *arguments)
        torch.testing.assert_close(alone, depthwise.conv2d(*inputs, *arguments), rtol=0, atol=0)


WIDE = ((7, 17), (3, 8), (1, 1), (5, 6), False, 2, 1)
SMALL = ((7, 7), (3, 3), (2, 1), (4, 3), True, 2, 1)


@pytest.mark.parametrize("case", [WIDE, SMALL])
def test_gradients_of_gradients(any_processor, case):
    inputs, arguments = tensors(case)
    assert torch.autograd.gradcheck(lambda *given: depthwise.conv2d(*given, *arguments), inputs)
    assert torch.autograd.gradgradcheck(lambda *given: depthwise.conv2d(*given, *arguments).tanh(), inputs)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # by torch, of its own use or ours
@pytest.mark.parametrize("case", [WIDE, SMALL])
def test_function_transforms_tangents_and_batches_of_gradients(any_processor, case):
    inputs, arguments = tensors(case)
    plain = [tensor.detach() for tensor in inputs]
    tangents = tuple(torch.ones_like(tensor) for tensor in plain)

    def results(function):
        def loss(*given):
            return function(*given, *arguments).tanh().sum()

        def of_one(image, kernel, bias):
            return loss(image.unsqueeze(0), kernel, bias)

        yield torch.func.jvp(torch.func.grad(loss, argnums=1), tuple(plain), tangents)[1]
        yield from torch.func.vmap(torch.func.grad(of_one, argnums=(0, 1, 2)), (0, None, None))(*plain)
        for dual in ((0, 1, 2), (2,)):
            with forward_ad.dual_level():
                given = [forward_ad.make_dual(t, torch.ones_like(t)) if i in dual else t for i, t in enumerate(inputs)]
                yield forward_ad.unpack_dual(loss(*given)).tangent
        output = function(*inputs, *arguments)
        directions = torch.randn(3, *output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
        yield from torch.autograd.grad(output, inputs, directions, is_grads_batched=True)

    for ours, theirs in zip(list(results(depthwise.conv2d)), list(results(F.conv2d)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=FLOAT64_ATOL, atol=FLOAT64_ATOL)
    assert any_processor


def test_gradients_of_a_batch_in_parts(any_processor, monkeypatch):
    inputs, arguments = tensors(WIDE, batch=5)
    monkeypatch.setattr(depthwise, "PART", 2 * inputs[1].numel())
    ours = outputs_and_gradients(depthwise.conv2d, inputs, arguments)
    for mine, wanted in zip(ours, outputs_and_gradients(F.conv2d, inputs, arguments), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=FLOAT64_ATOL, atol=FLOAT64_ATOL)


@pytest.mark.parametrize("case", [WIDE, SMALL])
def test_an_empty_batch_has_gradients_of_zero(any_processor, case):
    (input, kernel, bias), arguments = tensors(case)
    inputs = [input[:0].detach().requires_grad_(), kernel, bias]
    ours = outputs_and_gradients(depthwise.conv2d, inputs, arguments)
    for mine, wanted in zip(ours, outputs_and_gradients(F.conv2d, inputs, arguments), strict=True):
        assert mine.shape == wanted.shape
        assert not mine.any()


def test_half_precision_is_summed_in_single(any_processor):
    inputs, arguments = tensors(SMALL, batch=64)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs]
    ours = outputs_and_gradients(depthwise.conv2d, narrow, arguments)
    output = F.conv2d(*narrow, *arguments)
    weights = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    exact = [tensor.detach().double().requires_grad_() for tensor in narrow]
    loss = (F.conv2d(*exact, *arguments) * weights.double()).sum()
    for mine, wanted in zip(ours[1:], torch.autograd.grad(loss, exact), strict=True):
        assert mine.dtype == torch.bfloat16
        rounded = (wanted.bfloat16() - wanted).norm()
        assert (mine - wanted).norm() <= 1.2 * rounded


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast(any_processor, enabled):
    inputs, arguments = tensors(WIDE, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        ours = outputs_and_gradients(depthwise.conv2d, inputs, arguments)
        theirs = outputs_and_gradients(F.conv2d, inputs, arguments)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == wanted.dtype
        torch.testing.assert_close(mine, wanted, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE * 50)


def refused():
    dense = torch.randn(2, 4, 20, 20), torch.randn(4, 4, 17, 17)
    deep = torch.randn(2, 4, 20, 20), torch.randn(4, 1, 17, 17)
    yield *dense, (8, 8), (1, 1), 1
    yield *deep, "same", (1, 1), 4
    yield *deep, (16, 16), (2, 2), 4
    yield deep[0][0], deep[1], (8, 8), (1, 1), 4
    yield deep[0].to("meta"), deep[1].to("meta"), (8, 8), (1, 1), 4
    yield *(tensor.half() for tensor in deep), (8, 8), (1, 1), 4


@pytest.mark.parametrize("index", range(6))
def test_other_convolutions_are_left_alone(any_processor, index):
    input, kernel, padding, dilation, groups = list(refused())[index]
    wanted = F.conv2d(input, kernel, None, 1, padding, dilation, groups)
    found = depthwise.conv2d(input, kernel, None, (1, 1), padding, dilation, groups)
    assert not any_processor
    assert found.stride() == wanted.stride()
    if not found.is_meta:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_processors_that_were_not_measured_are_left_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    depthwise._most_columns.cache_clear()
    monkeypatch.setattr(depthwise, "_forward", None)
    inputs, arguments = tensors(WIDE, torch.float32)
    depthwise.conv2d(*inputs, *arguments).sum().backward()
    depthwise._most_columns.cache_clear()


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return DclsConv2d(4, 4, kernel_count=5, dilated_kernel_size=17, padding=8, groups=4)


def test_a_layer_takes_the_way(any_processor, layer):
    output = layer(torch.randn(1, 4, 9, 9))
    output.sum().backward()
    assert any_processor == [(8, 8)]
    assert layer.positions.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # by torch, of its own use or ours
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_programs_hold_one_plain_convolution(any_processor, layer):
    images = torch.randn(1, 4, 9, 9)
    exported = torch.export.export(layer.eval(), (images,))
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert not any_processor
    assert sum("conv2d" in name for name in names) == 1
    assert not any("pad" in name for name in names)
    traced = torch.jit.trace(layer, images, check_trace=False)
    assert not any_processor
    torch.testing.assert_close(traced(images), layer(images))
