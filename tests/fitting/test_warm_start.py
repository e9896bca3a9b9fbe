"""Elements fitted to trained kernels: how close they come, what is guaranteed, and where it does not matter how."""

import itertools
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import ScaledStdConv2d, StdConv2d
from torch import nn

from dcls_convert import DclsConv2d, convert_
from dcls_convert.depthwise.geometry import grid_positions
from dcls_convert.fitting.batches import lines_innermost
from dcls_convert.fitting.boxes import box_of
from dcls_convert.fitting.warm_start import fit_elements
from dcls_convert.layers.construction import construct_kernel
from dcls_convert.layers.elements import largest_elements
from dcls_convert.layers.interpolation import find_interpolation, learnt_axes, position_limits
from dcls_convert.planning.rules import parse_rules

CASES = {
    "depthwise 7x7": {"shape": (6, 1, 7, 7), "size": (17, 17), "count": 34},
    "dense 3x3": {"shape": (4, 3, 3, 3), "size": (7, 7), "count": 5},
    "not square": {"shape": (4, 2, 3, 5), "size": (9, 7), "count": 6},
    "dilated": {"shape": (4, 2, 3, 3), "size": (9, 7), "dilation": (2, 1), "count": 5},
    "even": {"shape": (4, 2, 4, 4), "size": (8, 6), "count": 7},
    "1-D": {"shape": (8, 2, 7), "size": (17,), "count": 4},
    "3-D": {"shape": (3, 2, 3, 3, 3), "size": (5, 7, 7), "count": 11},
    "partly dense": {"shape": (3, 2, 3, 3, 3), "size": (3, 7, 7), "dense_axes": (0,), "count": 5},
    "flat": {"shape": (4, 2, 1, 7), "size": (1, 13), "dense_axes": (0,), "count": 4},
}


def kernels_of(case, layers=3, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(case["shape"], generator=generator).to(dtype) for _ in range(layers)]


def options_of(case):
    return {
        "kernel_count": case["count"],
        "dilation": case.get("dilation", (1,) * len(case["size"])),
        "size": case["size"],
        "dense_axes": case.get("dense_axes", ()),
    }


def in_window(kernel, case):
    """The old kernel in the middle of the window, in float64."""
    shapes = zip(kernel.shape[2:], options_of(case)["dilation"], case["size"], strict=True)
    places = [[cell + size // 2 for cell in grid_positions(side, step, size)] for side, step, size in shapes]
    padded = torch.zeros(*kernel.shape[:2], *case["size"], dtype=torch.double)
    padded[:, :, *torch.meshgrid(*map(torch.tensor, places), indexing="ij")] = kernel.double()
    return padded


def distances(kernels, weights, positions, case, interpolation="bilinear"):
    """|constructed - old| of each layer, by the constructor itself on the whole window."""
    sigma = find_interpolation(interpolation).initial_sigma
    found = []
    for kernel, weight in zip(kernels, weights, strict=True):
        constructed = construct_kernel(
            weight.double(),
            positions.double(),
            case["size"],
            interpolation=interpolation,
            sigma=None if sigma is None else torch.full_like(positions, sigma, dtype=torch.double),
            dense_axes=case.get("dense_axes", ()),
        )
        found.append(float((constructed - in_window(kernel, case)).norm()))
    return found


@pytest.mark.parametrize("interpolation", ["bilinear", "triangle", "gaussian"])
@pytest.mark.parametrize("name", CASES)
def test_the_fit_is_closer_than_the_largest_cells_in_every_layer(name, interpolation):
    case = CASES[name]
    kernels = kernels_of(case)
    weights, positions = fit_elements(kernels, interpolation=interpolation, **options_of(case))
    others, grid = largest_elements(kernels, **options_of(case))
    assert positions.shape == grid.shape
    assert [weight.shape for weight in weights] == [weight.shape for weight in others]
    fitted = distances(kernels, weights, positions, case, interpolation)
    largest = distances(kernels, others, grid, case, interpolation)
    for near, far in zip(fitted, largest, strict=True):
        assert near <= far * (1 + 1e-6)
    assert sum(fitted) < 0.95 * sum(largest)


@pytest.mark.parametrize("name", CASES)
def test_positions_lie_where_the_old_kernel_was_and_weights_do_not_run_away(name):
    case = CASES[name]
    kernels = kernels_of(case)
    weights, positions = fit_elements(kernels, **options_of(case))
    axes = learnt_axes(len(case["size"]), case.get("dense_axes", ()))
    for place, axis in zip(positions, axes, strict=True):
        grid = grid_positions(case["shape"][2 + axis], options_of(case)["dilation"][axis], case["size"][axis])
        assert grid[0] <= float(place.min()) <= float(place.max()) <= grid[-1]
        low, high = position_limits(case["size"][axis])
        assert low <= float(place.min()) <= float(place.max()) <= high
    largest = max(float(kernel.abs().max()) for kernel in kernels)
    assert max(float(weight.abs().max()) for weight in weights) < 30 * largest


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_least_squares_for_the_positions(name):
    """The gradient of the squared distance by each weight is that of the ridge: nearly nothing."""
    case = CASES[name]
    kernels = kernels_of(case, layers=2)
    weights, positions = fit_elements(kernels, **options_of(case))
    for kernel, weight in zip(kernels, weights, strict=True):
        free = weight.double().requires_grad_()
        constructed = construct_kernel(free, positions.double(), case["size"], dense_axes=case.get("dense_axes", ()))
        (gradient,) = torch.autograd.grad((constructed - in_window(kernel, case)).square().sum() / 2, free)
        assert gradient.abs().max() < 0.02 * kernel.abs().max()


def test_a_kernel_that_was_constructed_from_elements_is_found_again():
    """One layer, elements apart from each other: the fit has no reason to leave anything."""
    torch.manual_seed(0)
    cells = torch.tensor(list(itertools.product([-2.0, 0.0, 2.0], repeat=2)))
    positions = (cells + torch.rand(16, 9, 2)).clamp(max=3).permute(2, 0, 1).unsqueeze(2)  # (A, O, I, E)
    weights = torch.rand(16, 1, 9) + 0.5
    kernel = construct_kernel(weights, positions, (7, 7))
    case = {"shape": tuple(kernel.shape), "size": (17, 17), "count": 18}
    found, places = fit_elements([kernel], **options_of(case))
    assert distances([kernel], found, places, case)[0] < 0.02 * float(kernel.norm())


def test_smooth_kernels_are_fitted_much_better_than_by_their_largest_cells():
    torch.manual_seed(0)
    blur = torch.tensor([1.0, 2.0, 1.0]) / 4
    rough = torch.randn(3 * 32, 1, 9, 9)
    kernels = nn.functional.conv2d(rough, (blur[:, None] * blur)[None, None]).reshape(3, 32, 1, 7, 7).unbind(0)
    case = {"shape": (32, 1, 7, 7), "size": (17, 17), "count": 34}
    fitted = distances(kernels, *fit_elements(kernels, **options_of(case)), case)
    largest = distances(kernels, *largest_elements(kernels, **options_of(case)), case)
    assert sum(fitted) < 0.2 * sum(largest)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e15])
def test_the_scale_of_the_kernels_does_not_matter(scale):
    case = CASES["dense 3x3"]
    kernels = kernels_of(case)
    weights, positions = fit_elements(kernels, **options_of(case))
    scaled, places = fit_elements([scale * kernel for kernel in kernels], **options_of(case))
    one = sum(distances(kernels, weights, positions, case))
    other = sum(distances([scale * kernel for kernel in kernels], scaled, places, case)) / scale
    assert math.isclose(one, other, rel_tol=0.05)


@pytest.mark.parametrize("name", ["depthwise 7x7", "dense 3x3"])
def test_lines_are_fitted_alike_however_many_are_fitted_together(name, monkeypatch):
    case = CASES[name]
    kernels = kernels_of(case, dtype=torch.float64)
    weights, positions = fit_elements(kernels, **options_of(case))
    monkeypatch.setattr("dcls_convert.fitting.warm_start.FLOATS_AT_ONCE", 1)
    alone, places = fit_elements(kernels, **options_of(case))
    torch.testing.assert_close(places, positions, rtol=0, atol=1e-6)
    torch.testing.assert_close(alone, weights, rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e-20, 1e10, 0.5]), min_size=18, max_size=18),
    st.integers(1, 8),
    st.sampled_from(["bilinear", "gaussian"]),
)
def test_odd_kernels_give_finite_elements_no_worse_than_the_largest(values, count, interpolation):
    """Zeros, equal cells, cells that drown others."""
    kernels = list(torch.tensor(values).reshape(2, 1, 1, 3, 3))
    case = {"shape": (1, 1, 3, 3), "size": (7, 7), "count": count}
    weights, positions = fit_elements(kernels, interpolation=interpolation, **options_of(case))
    assert positions.isfinite().all()
    assert all(weight.isfinite().all() for weight in weights)
    fitted = distances(kernels, weights, positions, case, interpolation)
    largest = distances(kernels, *largest_elements(kernels, **options_of(case)), case, interpolation)
    for near, far, kernel in zip(fitted, largest, kernels, strict=True):
        assert near <= far * (1 + 1e-5) + 1e-6 * float(kernel.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_kernels_of_other_dtypes_give_elements_of_that_dtype(dtype):
    case = CASES["dense 3x3"]
    kernels = kernels_of(case, dtype=dtype)
    weights, positions = fit_elements(kernels, **options_of(case))
    assert {tensor.dtype for tensor in (*weights, positions)} == {dtype}


@pytest.mark.parametrize("interpolation", ["bilinear", "triangle", "gaussian"])
def test_the_profile_is_that_of_the_constructor_and_its_derivative_is_right(interpolation):
    """Where the box is the window."""
    box = box_of((5,), (1,), (5,), interpolation)
    places = torch.linspace(0, 4, 41, dtype=torch.double)[:-1].reshape(1, -1)
    value, slope = box.profile(places, 5)
    sigma = find_interpolation(interpolation).initial_sigma
    for index, place in enumerate(places[0]):
        kernel = construct_kernel(
            torch.ones(1, 1, 1, dtype=torch.double),
            (place - 2).reshape(1, 1, 1, 1),
            (5,),
            interpolation=interpolation,
            sigma=None if sigma is None else torch.full((1, 1, 1, 1), sigma, dtype=torch.double),
        )
        torch.testing.assert_close(value[0, index], kernel[0, 0], rtol=1e-12, atol=1e-12)
    step = 1e-6
    beyond, _ = box.profile(places + step, 5)
    torch.testing.assert_close(slope, (beyond - value) / step, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rooted", [False, True])
def test_the_curvature_is_that_of_what_the_weights_leave(rooted):
    """Kaufman's gradient is exact: the cost's derivative by the places, weights following."""
    from dcls_convert.fitting.least_squares import _Problem, _step

    torch.manual_seed(0)
    box = box_of((5, 5), (1, 1), (9, 9), "bilinear")
    roots = torch.randn(1, 25, 25).double() / 5 if rooted else None
    problem = _Problem.of(torch.randn(1, 3, 25).double(), (5, 5), box.profile, roots)
    places = torch.rand(1, 6, 2).double() * 3.9
    state = problem.at(places)
    gradient = torch.zeros(12, dtype=torch.double)
    for index in range(12):
        moved = places.clone()
        moved.view(-1)[index] += 1e-6
        gradient[index] = (problem.at(moved).cost - state.cost)[0] / 1e-6
    torch.testing.assert_close(-2 * state.downhill.mT.flatten(), gradient, rtol=1e-3, atol=1e-3)
    for name, value in asdict(problem.lines_innermost().at(lines_innermost(places))).items():
        torch.testing.assert_close(value, getattr(state, name), msg=lambda text, name=name: f"{name}: {text}")
    step = _step(state, torch.full((1,), 1e6, dtype=torch.double)).flatten()  # so damped that it is steepest descent
    assert float(step @ gradient) < 0


def test_a_root_that_is_the_identity_changes_nothing_and_one_that_weighs_cells_moves_the_error():
    case = CASES["dense 3x3"]
    kernels = kernels_of(case)
    plain = fit_elements(kernels, **options_of(case))
    roots = torch.eye(9).expand(3, 9, 9)
    same = fit_elements(kernels, roots=roots, **options_of(case))
    assert math.isclose(sum(distances(kernels, *plain, case)), sum(distances(kernels, *same, case)), rel_tol=0.03)
    heavy = torch.diag(torch.tensor([10.0, 1, 1, 1, 1, 1, 1, 1, 1]))
    weighed = fit_elements(kernels, roots=heavy.expand(3, 9, 9), **options_of(case))

    def corner(weights, positions):
        return sum(
            float((construct_kernel(weight, positions, (7, 7))[..., 2, 2] - kernel[..., 0, 0]).square().sum())
            for kernel, weight in zip(kernels, weights, strict=True)
        )

    assert corner(*weighed) < 0.2 * corner(*plain)


# In a model.


def depthwise_net():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Conv2d(6, 6, 5, padding=2, groups=6), nn.ReLU())  # noqa: E731
    return nn.Sequential(nn.Conv2d(3, 6, 1), nn.Sequential(block(), block(), block()))


@pytest.mark.parametrize("init", ["auto", "fit", "largest", "exact"])
def test_the_report_states_each_layers_relative_kernel_error(init):
    model = depthwise_net()
    old = {name: module.weight.detach() for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    report = convert_(model, init=init, dilated_size=9, input_size=(3, 16, 16))
    for layer in report.layers:
        left = model.get_submodule(layer.name).kernel().detach()
        left[..., 2:7, 2:7] -= old[layer.name]
        assert math.isclose(layer.fit_error, float(left.norm() / old[layer.name].norm()), rel_tol=1e-4, abs_tol=1e-6)
    assert (init == "exact") == all(layer.fit_error < 1e-6 for layer in report.layers)
    assert report.to_dict()["layers"][0]["fit_error"] == report.layers[0].fit_error


@pytest.mark.parametrize(("device", "init"), [("cpu", "random"), ("meta", "fit")])
def test_random_elements_and_models_on_meta_have_no_error_to_state(device, init):
    with torch.device(device):
        model = depthwise_net()
    report = convert_(model, init=init, dilated_size=9, input_size=(3, 16, 16))
    assert [layer.fit_error for layer in report.layers] == [None] * 3


@pytest.mark.parametrize("conv_class", [StdConv2d, ScaledStdConv2d])
def test_where_elements_are_standardised_the_start_is_no_worse_than_the_largest(conv_class):
    rules = parse_rules("format: 1\nrules:\n  - match: {kernel_size: [3, 3]}\n")

    def errors(init):
        torch.manual_seed(0)
        model = nn.Sequential(conv_class(3, 8, 3, padding=1), nn.ReLU(), conv_class(8, 8, 3, padding=1))
        report = convert_(model, init=init, rules=rules, dilated_size=7, input_size=(3, 8, 8))
        return [layer.fit_error for layer in report.layers]

    assert all(fit <= largest for fit, largest in zip(errors("fit"), errors("largest"), strict=True))


def test_positions_get_a_gradient_after_the_fit():
    model = depthwise_net()
    convert_(model, dilated_size=9, input_size=(3, 16, 16))
    layers = [module for module in model.modules() if isinstance(module, DclsConv2d)]
    for layer in layers:
        positions = layer.positions
        (gradient,) = torch.autograd.grad((layer.kernel() * torch.randn(6, 1, 9, 9)).sum(), positions)
        assert (gradient != 0).all()


@pytest.mark.parametrize("degenerate", ["no kernel", "one kernel", "one layer", "no input", "flat input", "one cell"])
def test_kernels_and_roots_of_nothing_give_finite_elements_no_worse_than_the_largest(degenerate):
    """As real networks have them: kernels that are all zero, and channels in which nothing is ever seen."""
    case = CASES["dense 3x3"]
    kernels = kernels_of(case, layers=2)
    roots = torch.randn(3, 9, 9)
    if degenerate == "no kernel":
        kernels = [torch.zeros_like(kernel) for kernel in kernels]
    elif degenerate == "one kernel":
        for kernel in kernels:
            kernel[1, 2] = 0
    elif degenerate == "one layer":
        kernels[0].zero_()
    elif degenerate == "no input":
        roots[0] = 0
    elif degenerate == "flat input":
        roots[..., 1:] = 0
    else:
        kernels = [torch.nn.functional.pad(kernel[..., 1:2, 1:2], (1, 1, 1, 1)) for kernel in kernels]
    weights, positions = fit_elements(kernels, roots=roots, **options_of(case))
    assert positions.isfinite().all()
    assert all(weight.isfinite().all() for weight in weights)

    def seen(weights, positions, layer):
        error = construct_kernel(weights[layer], positions, (7, 7))[..., 2:5, 2:5] - kernels[layer]
        return float((error.flatten(2).unsqueeze(2) @ roots).norm())

    largest = largest_elements(kernels, **options_of(case))
    for layer in range(2):
        assert seen(weights, positions, layer) <= seen(*largest, layer) * (1 + 1e-4) + 1e-6
