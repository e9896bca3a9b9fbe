"""Laws of kernel construction, tested against plain loops that follow the paper's algorithms.

Comparisons with the authors' layers are in `conversion`. Windows are never square, so that swapped
axes are noticed.
"""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcls_convert.layers import bilinear
from dcls_convert.layers.construction import construct_kernel
from dcls_convert.layers.dcls_conv import DCLS_LAYERS
from dcls_convert.layers.interpolation import INTERPOLATIONS
from dcls_convert.layers.profiles import normalised_profile

from ..dispatch_modes import RefuseOperations
from .common import FLOAT64_ATOL, close, every_interpolation, randn
from .gpu_construction import ON_GPUS, constructed

STEP = 1e-7  # cells; step of one-sided differences, whose error is about as large as the step
# A hundred steps; the derivatives on the two sides of a kink differ by about 1.
ONE_SIDED_ATOL = 1e-5

WINDOWS = {1: (7,), 2: (5, 8), 3: (4, 3, 6)}  # odd and even cells
SMALL_WINDOWS = {1: (5,), 2: (3, 4), 3: (2, 3, 4)}
every_dims = pytest.mark.parametrize("dims", [1, 2, 3])


@dataclass(frozen=True, kw_only=True)
class Elements:
    weight: Tensor  # (O, I, *dense axes, E)
    positions: Tensor  # (A, *weight.shape), in cells from the kernel centre
    sigma: Tensor | None  # as positions
    size: tuple[int, ...]
    dense_axes: tuple[int, ...]
    interpolation: str

    @property
    def inputs(self) -> list[Tensor]:
        return [
            tensor for tensor in (self.weight, self.positions, self.sigma) if tensor is not None
        ]

    def kernel(self, *inputs: Tensor) -> Tensor:
        """Construct the kernel of the elements, or of other tensors in place of `inputs`."""
        weight, positions, *sigma = inputs or self.inputs
        return construct_kernel(
            weight,
            positions,
            self.size,
            interpolation=self.interpolation,
            sigma=sigma[0] if sigma else None,
            dense_axes=self.dense_axes,
        )

    def gradients(self, grad_output: Tensor) -> list[Tensor]:
        """Return the gradients of (grad_output * kernel).sum(), one for each of `inputs`."""
        inputs = [tensor.detach().requires_grad_() for tensor in self.inputs]
        return list(torch.autograd.grad((grad_output * self.kernel(*inputs)).sum(), inputs))


def borders(size, dense_axes=()):
    """Return the first and last cells of the window along each learnt axis, from its centre.

    Computed independently of the package.
    """
    lengths = [length for axis, length in enumerate(size) if axis not in dense_axes]
    return [-(length // 2) for length in lengths], [length - 1 - length // 2 for length in lengths]


def elements(size, interpolation="bilinear", *, dense_axes=(), count=4, channels=(2, 3), seed=0):
    """Draw elements with random weights at random positions inside the window."""
    weight = randn(*channels, *[size[axis] for axis in dense_axes], count, seed=seed)
    lows, highs = borders(size, dense_axes)
    generator = torch.Generator().manual_seed(seed + 1)
    places, widths = torch.rand(
        2, len(lows), *weight.shape, generator=generator, dtype=torch.float64
    )
    low, high = (per_axis(border, places) for border in (lows, highs))
    return Elements(
        weight=weight,
        positions=low + (high - low) * places,
        sigma=1.1 + 0.8 * widths if INTERPOLATIONS[interpolation].has_sigma else None,
        size=size,
        dense_axes=dense_axes,
        interpolation=interpolation,
    )


def per_axis(values, like):
    column = torch.tensor(values, dtype=like.dtype).view(-1, *[1] * (like.dim() - 1))
    return column.expand_as(like).clone()


def random_like(tensor):
    return randn(*tensor.shape, seed=1)


# The paper's algorithms.


def algorithm_1(weights, positions, size):
    """Construct a kernel by plain loops: weights (E), positions (A, E) -> kernel (*size).

    Differentiated by autograd, it is Algorithm 2.
    """
    kernel = torch.zeros(size, dtype=torch.float64)
    for weight, *position in zip(weights, *positions, strict=True):
        cells = [
            coordinate + length // 2 for coordinate, length in zip(position, size, strict=True)
        ]
        # At the upper border there is no cell above. There, the cell below is the last but one, and
        # the fraction is 1.
        floors = [
            min(int(cell.detach().floor()), length - 2)
            for cell, length in zip(cells, size, strict=True)
        ]
        for choice in itertools.product((0, 1), repeat=len(size)):
            corner = list(zip(cells, floors, choice, strict=True))
            shares = [cell - floor if up else 1 - (cell - floor) for cell, floor, up in corner]
            kernel[tuple(floor + up for _, floor, up in corner)] += weight * math.prod(shares)
    return kernel


def placed(where, size, *, count=6, channels=(2, 3)):
    """Return elements between cells, on whole cells below the upper border, at a border, or a
    mixture of these along each axis.
    """
    inside = elements(size, count=count, channels=channels)
    low, high = (per_axis(border, inside.positions) for border in borders(size))
    places = {
        "inside": inside.positions,
        "whole": inside.positions.floor(),
        "lower": low,
        "upper": high,
    }
    chosen = torch.randint(len(places), low.shape, generator=torch.Generator().manual_seed(2))
    places["mixed"] = torch.stack(list(places.values())).gather(0, chosen[None])[0]
    return replace(inside, positions=places[where])


@every_dims
@pytest.mark.parametrize("where", ["inside", "whole", "lower", "upper", "mixed"])
def test_bilinear_is_algorithms_1_and_2(dims, where):
    drawn = placed(where, WINDOWS[dims])
    kernel = drawn.kernel()
    grad_output = random_like(kernel)
    grad_weight, grad_positions = drawn.gradients(grad_output)
    for o, i in itertools.product(range(2), range(3)):
        inputs = [drawn.weight[o, i].requires_grad_(), drawn.positions[:, o, i].requires_grad_()]
        expected = algorithm_1(*inputs, drawn.size)
        close(kernel[o, i], expected.detach())
        close(
            (grad_weight[o, i], grad_positions[:, o, i]),
            torch.autograd.grad(expected, inputs, grad_output[o, i]),
        )


@every_interpolation
@pytest.mark.parametrize(("dims", "dense_axes"), [(1, ()), (2, ()), (3, (0, 2))])
def test_gradients_are_the_derivatives_of_the_kernel(interpolation, dims, dense_axes):
    drawn = elements(
        SMALL_WINDOWS[dims], interpolation, dense_axes=dense_axes, count=2, channels=(2, 1)
    )
    assert torch.autograd.gradcheck(
        drawn.kernel, [tensor.requires_grad_() for tensor in drawn.inputs]
    )


@every_interpolation
@pytest.mark.parametrize(("dims", "dense_axes"), [(2, (0,)), (2, (1,)), (3, (1,)), (3, (0, 2))])
def test_every_cell_of_a_dense_axis_has_a_kernel_of_its_own(interpolation, dims, dense_axes):
    size = WINDOWS[dims]
    whole = elements(size, interpolation, dense_axes=dense_axes)
    kernel = whole.kernel()
    assert kernel.shape == (2, 3, *size)
    for cells in itertools.product(*[range(size[axis]) for axis in dense_axes]):
        part = Elements(
            weight=whole.weight[:, :, *cells],
            positions=whole.positions[:, :, :, *cells],
            sigma=None if whole.sigma is None else whole.sigma[:, :, :, *cells],
            size=tuple(length for axis, length in enumerate(size) if axis not in dense_axes),
            dense_axes=(),
            interpolation=interpolation,
        )
        where = dict(zip(dense_axes, cells, strict=True))
        close(kernel[:, :, *[where.get(axis, slice(None)) for axis in range(dims)]], part.kernel())


# The triangle's kinks, and minimum sigmas.


@every_dims
@pytest.mark.parametrize("where", ["whole", "lower", "upper"])
@pytest.mark.parametrize("sigma", [1.0, 2.0])  # whole sigmas: the kinks lie on cells
def test_triangle_derivatives_at_kinks_are_those_of_the_documented_side(dims, where, sigma):
    # One element per kernel, so that all can be moved at once and compared kernel by kernel.
    drawn = placed(where, WINDOWS[dims], count=1, channels=(4, 3))
    drawn = replace(drawn, interpolation="triangle", sigma=torch.full_like(drawn.positions, sigma))
    grad_output = random_like(drawn.kernel())

    def difference(name, axis, step):
        changed = getattr(drawn, name).clone()
        changed[axis] += step
        moved = replace(drawn, **{name: changed}).kernel() - drawn.kernel()
        return (grad_output * moved).flatten(2).sum(2, keepdim=True) / step

    _, grad_positions, grad_sigma = drawn.gradients(grad_output)
    step = -STEP if where == "upper" else STEP
    for axis in range(dims):
        close(grad_positions[axis], difference("positions", axis, step), ONE_SIDED_ATOL)
        close(grad_sigma[axis], difference("sigma", axis, STEP), ONE_SIDED_ATOL)


# Minimum sigmas of DCLS 0.1.1.
@pytest.mark.parametrize(("interpolation", "minimum"), [("triangle", 1.0), ("gaussian", 0.27)])
def test_sigma_below_its_minimum_counts_as_the_minimum_and_can_grow_back(interpolation, minimum):
    drawn = elements((5, 8), interpolation)
    at_minimum = replace(drawn, sigma=torch.full_like(drawn.sigma, minimum))
    below = replace(drawn, sigma=torch.full_like(drawn.sigma, minimum - 0.2))
    grad_output = random_like(drawn.kernel())
    close(below.kernel(), at_minimum.kernel())
    close(below.gradients(grad_output), at_minimum.gradients(grad_output))
    assert (below.gradients(grad_output)[2] != 0).all()


# Elements in the window.


@st.composite
def elements_anywhere(draw, min_count=1, min_channels=1):
    """Draw windows of any size, and elements of any width anywhere in or around them, on and
    between cells.
    """
    size = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dense_axes = draw(
        st.sampled_from([(), *[(axis,) for axis in range(len(size)) if len(size) > 1]])
    )
    interpolation = draw(st.sampled_from(list(INTERPOLATIONS)))
    drawn = elements(
        size,
        interpolation,
        dense_axes=dense_axes,
        count=draw(st.integers(min_count, 4)),
        channels=(1, draw(st.integers(min_channels, 3))),
    )
    coordinate = st.one_of(st.integers(-12, 12).map(float), st.floats(-12, 12))

    def numbers_like(like, values):
        """Draw a number for each axis and element, the same in all kernels."""
        axes = like.shape[0]
        count = like.shape[-1]
        numbers = draw(st.lists(values, min_size=axes * count, max_size=axes * count))
        shape = (axes, *[1] * (like.dim() - 2), count)
        return torch.tensor(numbers, dtype=torch.float64).view(shape).expand_as(like)

    sigma = None if drawn.sigma is None else numbers_like(drawn.sigma, st.floats(0, 6))
    return replace(drawn, positions=numbers_like(drawn.positions, coordinate), sigma=sigma)


@every_interpolation
def test_support_and_exactness_on_cells_are_those_of_the_profile(interpolation):
    stated = INTERPOLATIONS[interpolation]
    centre = torch.tensor([float(stated.support)])
    profile = normalised_profile(stated, centre, 2 * stated.support + 1)
    assert (int(profile.count_nonzero()) == 1) == stated.is_exact_on_cells
    assert float(profile[0, [0, -1]].abs().max()) < torch.finfo(torch.float32).eps


@given(drawn=elements_anywhere())
def test_no_weight_is_lost_wherever_the_elements_are(drawn):
    kernel = drawn.kernel()
    spatial = tuple(axis for axis in range(2, kernel.dim()) if axis - 2 not in drawn.dense_axes)
    close(kernel.sum(spatial), drawn.weight.sum(-1))
    assert kernel.shape[2:] == drawn.size


@every_interpolation
@every_dims
@pytest.mark.parametrize("side", [0, 1])
def test_elements_beyond_the_window_count_as_at_its_border_and_can_come_back(
    interpolation, dims, side
):
    size = WINDOWS[dims]
    drawn = elements(size, interpolation)
    at_border = replace(drawn, positions=per_axis(borders(size)[side], drawn.positions))
    beyond = replace(drawn, positions=at_border.positions + (-2.3, 2.3)[side])
    grad_output = random_like(drawn.kernel())
    close(beyond.kernel(), at_border.kernel())
    gradients = beyond.gradients(grad_output)
    close(gradients, at_border.gradients(grad_output))
    assert (gradients[1] != 0).all()


@every_interpolation
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("implementation", [None, *ON_GPUS])
def test_a_position_that_is_not_a_number_shows_only_in_its_kernel(
    interpolation, axis, implementation
):
    drawn = elements((5, 7), interpolation)
    positions = drawn.positions.clone()
    positions[axis, 0, 0, 1] = math.nan
    broken = replace(drawn, positions=positions)
    with constructed(implementation):
        kernel = broken.kernel()
        healthy = drawn.kernel()
        assert kernel[0, 0].isnan().any()
        kernel[0, 0] = healthy[0, 0]
        assert torch.equal(kernel, healthy)
        broken.gradients(random_like(kernel))  # does not crash


# Number formats.


@every_interpolation
def test_kernels_are_computed_in_float32_at_least_and_rounded_once(interpolation):
    drawn = elements((17, 8), interpolation)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = [tensor.to(dtype) for tensor in drawn.inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            kernel = drawn.kernel(*narrow)
        assert kernel.dtype == dtype
        assert torch.equal(kernel, drawn.kernel(*[tensor.float() for tensor in narrow]).to(dtype))


# The implementations of construction.


@pytest.mark.parametrize("implementation", [None, *ON_GPUS])
@given(
    drawn=elements_anywhere(min_count=0, min_channels=0),
    block=st.sampled_from([1, 7, 500, 1 << 26]),
    strided=st.booleans(),
    learnt=st.sampled_from([(True, True), (True, False), (False, True)]),  # weight, positions
    create_graph=st.booleans(),
)
def test_every_implementation_gives_the_kernel_and_gradients_of_plain_operations(
    drawn, implementation, block, strided, learnt, create_graph
):
    inputs = [tensor.mT.contiguous().mT if strided else tensor for tensor in drawn.inputs]
    for tensor, is_learnt in zip(inputs, learnt, strict=False):
        tensor.requires_grad_(is_learnt)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    results = []
    for way in (implementation, "plain"):
        with constructed(way), pytest.MonkeyPatch.context() as patch:
            patch.setattr(bilinear, "BLOCK_ELEMENTS", block)
            patch.setattr(bilinear, "MAX_PRODUCTS", block)
            kernel = drawn.kernel(*inputs)
            gradients = torch.autograd.grad(
                kernel, leaves, random_like(kernel), create_graph=create_graph
            )
            results.append([kernel, *gradients])
    close(*results, 10 * FLOAT64_ATOL)


@every_interpolation
@pytest.mark.parametrize("implementation", ON_GPUS)
@pytest.mark.parametrize("size", [(7, 7), (4, 7), (1, 4, 5)], ids=str)
def test_on_a_gpu_a_training_step_neither_waits_nor_adds_in_arbitrary_order_nor_rounds(
    interpolation, implementation, size
):
    layer = DCLS_LAYERS[len(size)](
        2, 3, kernel_count=4, dilated_kernel_size=size, interpolation=interpolation
    )
    with constructed(implementation), RefuseOperations():
        layer.clamp_positions_()
        layer.kernel().square().sum().backward()
    assert all(
        parameter.grad is not None for name, parameter in layer.named_parameters() if name != "bias"
    )


# Mistakes.


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"weight": torch.zeros(2, 3, 5, 4)}, "weight"),
        ({"positions": torch.zeros(2, 3, 4)}, "positions"),
        ({"interpolation": "gaussian"}, "needs a sigma"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(changes, word):
    fitting = {"weight": torch.zeros(2, 3, 4), "positions": torch.zeros(2, 2, 3, 4), "size": (5, 8)}
    with pytest.raises(ValueError, match=word):
        construct_kernel(**fitting | changes)
