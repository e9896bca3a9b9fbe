"""Laws of bilinear construction in closed form: it is the form of plain operations, in every way of differentiating.

Axes: C channels, E kernel elements, A learnt axes.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from dcls_convert.layers import bilinear
from dcls_convert.layers.bilinear import bilinear_kernel, needs_plain_operations
from dcls_convert.layers.dcls_conv import DclsConv2d
from dcls_convert.layers.interpolation import bilinear_of_plain_operations, construct_kernel

# Torch compiles decompositions of its own by it when forward derivatives are first asked for.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

FLOAT64_ATOL = 1e-12  # some thousand roundings of 2e-16, of values of order 1
SIZES = [(7,), (8,), (2,), (5, 8), (4, 1), (1, 7), (1, 1), (4, 3, 6), (2, 1, 5), (3, 2, 1), (1, 1, 4)]
every_size = pytest.mark.parametrize("size", SIZES, ids=str)
every_small_size = pytest.mark.parametrize("size", [(5,), (3, 4), (1, 4), (2, 3, 4)], ids=str)


@pytest.fixture(params=[1, 7, 32768], ids=lambda elements: f"blocks of {elements}")
def _blocks(request, monkeypatch):
    monkeypatch.setattr(bilinear, "BLOCK_ELEMENTS", request.param)


def inputs(size, channels=(2, 3), count=4, seed=0):
    """weight (*C, E), positions (A, *C, E): on and between cells, inside the window, at its border, and beyond."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*channels, count, generator=generator, dtype=torch.float64)
    anywhere = torch.rand(len(size), *weight.shape, generator=generator, dtype=torch.float64) - 0.5
    anywhere *= 1.4 * torch.tensor(size).view(-1, *[1] * weight.dim())
    whole = torch.rand(anywhere.shape, generator=generator) < 0.4
    return weight, torch.where(whole, anywhere.round(), anywhere)


def uniform(shape, low=0.3, high=0.7):
    return low + (high - low) * torch.rand(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def toward(kernel, batch=()):
    return torch.randn(*batch, *kernel.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(construct, weight, positions, size):
    given = [weight.detach().requires_grad_(), positions.detach().requires_grad_()]
    kernel = construct(*given, size)
    return kernel, *torch.autograd.grad(kernel, given, toward(kernel))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=FLOAT64_ATOL)


@every_size
@pytest.mark.usefixtures("_blocks")
def test_kernel_and_gradients_are_those_of_plain_operations(size):
    given = inputs(size)
    close(gradients(bilinear_kernel, *given, size), gradients(bilinear_of_plain_operations, *given, size))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    size=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    channels=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),  # a dense axis is one channel more
    count=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_so_they_are_for_any_shape(size, channels, count, seed):
    given = inputs(size, channels, count, seed)
    close(gradients(bilinear_kernel, *given, size), gradients(bilinear_of_plain_operations, *given, size))


def test_strided_inputs_and_gradients_give_the_same():
    size = (5, 8)
    weight, positions = inputs(size)
    strided = [weight.mT.contiguous().mT, positions.movedim(0, -1).contiguous().movedim(-1, 0)]
    assert not any(tensor.is_contiguous() for tensor in strided)
    close(gradients(bilinear_kernel, *strided, size), gradients(bilinear_kernel, weight, positions, size))
    given = [tensor.requires_grad_() for tensor in strided]
    expanded = torch.autograd.grad(bilinear_kernel(*given, size).sum(), given)  # the gradient of a sum is expanded
    close(expanded, torch.autograd.grad(bilinear_of_plain_operations(*given, size).sum(), given))


def test_windows_of_more_cells_than_float32_can_count():
    size = (1, 2, 2**23 + 9)  # float32 knows each place along an axis, but not each cell of the window
    positions = torch.tensor([0.0, 0.0, 2.0**22]).view(3, 1, 1)
    kernel = bilinear_kernel(torch.ones(1, 1), positions, size)
    assert kernel.flatten().nonzero().tolist() == [[2**23 + 9 + (2**23 + 9) // 2 + 2**22]]


# Ways of differentiating.


@every_small_size
def test_second_derivatives_are_exact(size):
    weight, positions = inputs(size, channels=(2,), count=2)
    lowest = [
        place.floor().clamp(-(length // 2), max(length - 2, 0) - length // 2)
        for place, length in zip(positions, size, strict=True)
    ]
    between = torch.stack(lowest) + uniform(positions.shape)
    given = [tensor.requires_grad_() for tensor in (weight, between)]

    def kernel(weight, positions):
        return bilinear_kernel(weight, positions, size)

    assert torch.autograd.gradcheck(kernel, given, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(kernel, given)


TRANSFORMED = {
    "grad": lambda f: grad(lambda *given: f(*given).sin().sum(), (0, 1)),
    "jacrev": lambda f: jacrev(f, (0, 1)),
    "jacfwd": lambda f: jacfwd(f, (0, 1)),
    "hessian": lambda f: hessian(lambda *given: f(*given).sin().sum(), (0, 1)),
    "third": lambda f: jacrev(hessian(lambda *given: f(*given).sin().sum(), 1), 1),
    "vmap": lambda f: vmap(f, in_dims=(1, 2), out_dims=1),
    "vmap over weights": lambda f: lambda weight, positions: vmap(lambda one: f(one, positions[:, 0]))(weight),
    "vmap of grad": lambda f: vmap(grad(lambda *given: f(*given).sin().sum(), (0, 1)), in_dims=(1, 2)),
}


@every_small_size
@pytest.mark.parametrize("transform", list(TRANSFORMED))
def test_function_transforms_give_what_they_give_for_plain_operations(transform, size):
    given = inputs(size, channels=(2, 2), count=2)
    ours, plain = (
        TRANSFORMED[transform](lambda *given, construct=construct: construct(*given, size))(*given)
        for construct in (bilinear_kernel, bilinear_of_plain_operations)
    )
    close(ours, plain)


@every_small_size
def test_one_weight_at_many_places_is_one_kernel_for_each(size):
    weight, positions = inputs(size)
    kernels = vmap(lambda one: bilinear_kernel(weight[0], one, size), 1)(positions)
    close(kernels, torch.stack([bilinear_kernel(weight[0], one, size) for one in positions.unbind(1)]))


@every_small_size
def test_batches_of_gradients_are_the_single_ones(size):
    weight, positions = (tensor.requires_grad_() for tensor in inputs(size))
    kernel = bilinear_kernel(weight, positions, size)
    several = toward(kernel, batch=(3,))
    batched = torch.autograd.grad(kernel, (weight, positions), several, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(kernel, (weight, positions), one, retain_graph=True) for one in several]
    close(batched, tuple(torch.stack(ones) for ones in zip(*single, strict=True)))


def test_forward_derivatives_of_one_input_alone():
    size = (5, 8)
    weight, positions = inputs(size)
    for moving in (0, 1):
        tangents = []
        for construct in (bilinear_kernel, bilinear_of_plain_operations):
            with forward_ad.dual_level():
                given = [weight, positions]
                given[moving] = forward_ad.make_dual(given[moving], given[moving].cos())
                tangents.append(forward_ad.unpack_dual(construct(*given, size)).tangent)
        close(*tangents)


@pytest.mark.parametrize("frozen", [0, 1], ids=["weight", "positions"])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_same(frozen):
    size = (5, 8)
    given = inputs(size)
    _, *both = gradients(bilinear_kernel, *given, size)
    part = [tensor.requires_grad_(index != frozen) for index, tensor in enumerate(given)]
    kernel = bilinear_kernel(*part, size)
    kernel.backward(toward(kernel))
    assert part[frozen].grad is None
    close(part[1 - frozen].grad, both[1 - frozen])


# Beside the numbers.


def test_without_gradients_no_graph_is_made():
    size = (5, 8)
    weight, positions = inputs(size)
    assert bilinear_kernel(weight, positions, size).grad_fn is None
    weight.requires_grad_()
    with torch.no_grad():
        assert bilinear_kernel(weight, positions, size).grad_fn is None
    with torch.inference_mode():
        assert bilinear_kernel(weight, positions, size).is_inference()


def test_positions_may_be_clamped_between_forward_and_backward():
    layer = DclsConv2d(2, 2, kernel_count=3, dilated_kernel_size=(4, 5), bias=False).double()
    images = torch.randn(2, 1, 2, 6, 6, dtype=torch.float64)
    parts = []
    for image in images:
        layer.zero_grad()
        layer(image).sum().backward()
        parts.append([parameter.grad for parameter in layer.parameters()])
    layer.zero_grad()
    sum(layer(image).sum() for image in images).backward()  # the second forward clamps in place
    close([parameter.grad for parameter in layer.parameters()], [a + b for a, b in zip(*parts, strict=True)])


class Sizes(TorchDispatchMode):
    """Numbers in all memory that is taken inside, a number for each piece."""

    def __init__(self, given):
        super().__init__()
        self.given, self.kept = {tensor.untyped_storage().data_ptr() for tensor in given}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return result

    @property
    def pieces(self):
        return [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in self.kept.values()]


@pytest.mark.parametrize("size", [(9,), (5, 8), (4, 3, 6)], ids=str)
def test_all_that_grows_with_the_layer_is_kernel_places_and_gradients(size, monkeypatch):
    monkeypatch.setattr(bilinear, "BLOCK_ELEMENTS", 64)
    given = [tensor.requires_grad_() for tensor in inputs(size, channels=(40, 25))]
    weight, positions = given
    kernel_gradient = toward(torch.empty(40, 25, *size))
    kept_for_backward = []
    with Sizes([*given, kernel_gradient]) as sizes:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: kept_for_backward.append(one) or one, lambda one: one
        ):
            kernel = bilinear_kernel(*given, size)
        gradients = torch.autograd.grad(kernel, given, kernel_gradient)
    block = 64 * torch.get_num_threads() * len(size)
    large = sorted(pieces for pieces in sizes.pieces if pieces > block)
    assert large == sorted(one.numel() for one in (kernel, positions, *gradients))
    own = [one for one in kept_for_backward if one.data_ptr() != weight.data_ptr()]
    assert [one.numel() for one in own] == [positions.numel()]


def test_deterministic_algorithms_are_the_same_ones():
    size = (5, 8)
    given = inputs(size, channels=(40, 25))
    free = gradients(bilinear_kernel, *given, size)
    torch.use_deterministic_algorithms(True)
    try:
        for one, other in zip(gradients(bilinear_kernel, *given, size), free, strict=True):
            assert torch.equal(one, other)
    finally:
        torch.use_deterministic_algorithms(False)


class Kernel(nn.Module):
    def forward(self, weight, positions):
        return construct_kernel(weight, positions, (5, 8))


def test_graphs_of_operations_hold_plain_ones_that_know_no_number_of_elements():
    torch.compiler.reset()
    compiled = torch.compile(Kernel(), fullgraph=True, dynamic=True, backend="aot_eager")
    for channels, count in itertools.product([(2, 3), (4, 5)], [3, 6]):
        given = inputs((5, 8), channels, count)
        close(compiled(*given), Kernel()(*given))
    program = torch.export.export(Kernel(), inputs((5, 8)))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(name.startswith(("aten.", "<built-in", "wrap_")) for name in called), called
    assert math.prod(program.module()(*inputs((5, 8), seed=5)).shape) == 2 * 3 * 5 * 8


def test_tensors_with_operations_of_their_own_get_plain_ones():
    ordinary = torch.ones(1)
    assert not needs_plain_operations(ordinary)
    assert not needs_plain_operations(nn.Parameter(ordinary))
    with FakeTensorMode() as mode:
        assert needs_plain_operations(mode.from_tensor(ordinary))
