"""Elements fitted to kernels: how close they come, what is guaranteed, and what must not matter."""

import math

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert import convert_
from dcls_convert.geometry import along_learnt_axes, grid_positions
from dcls_convert.layers.construction import construct_unchecked
from dcls_convert.layers.interpolation import INTERPOLATIONS
from dcls_convert.starts.boxes import Box
from dcls_convert.starts.fit import fit_elements, lines_of
from dcls_convert.starts.positions import squared_errors

CASES = {
    "depthwise 7x7": {"shape": (2, 1, 7, 7), "size": (17, 17), "count": 34},
    "dense 3x3": {"shape": (4, 3, 3, 3), "size": (7, 7), "count": 5},
    "not square": {"shape": (4, 2, 3, 5), "size": (9, 7), "count": 6},
    "dilated": {"shape": (4, 2, 3, 3), "size": (9, 7), "dilation": (2, 1), "count": 5},
    "even": {"shape": (4, 2, 4, 4), "size": (8, 6), "count": 7},
    "1-D": {"shape": (8, 2, 7), "size": (17,), "count": 4},
    "3-D": {"shape": (3, 2, 3, 3, 3), "size": (5, 7, 7), "count": 11},
    "partly dense": {"shape": (3, 2, 3, 3, 3), "size": (3, 7, 7), "dense_axes": (0,), "count": 5},
    "back": {"shape": (4, 2, 3, 5), "size": (8, 9), "grow": ("back", "both"), "count": 6},
    "ahead": {"shape": (8, 2, 7), "size": (12,), "grow": ("ahead",), "count": 3},
    "flat": {"shape": (4, 2, 1, 7), "size": (1, 13), "dense_axes": (0,), "count": 4},
}


def kernels_of(case, layers=3, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(case["shape"], generator=generator).to(dtype) for _ in range(layers)]


def box_for(case, interpolation="bilinear"):
    dilation = case.get("dilation", (1,) * len(case["size"]))
    return Box(
        case["shape"][2:],
        dilation,
        case["size"],
        interpolation,
        case.get("dense_axes", ()),
        case.get("grow", ()),
    )


def in_window(kernel, box):
    """Put the old kernel into its place in the window, in float64."""
    old_cells = []
    shapes = zip(kernel.shape[2:], box.dilation, box.size, box.grow, strict=True)
    for side, spacing, size, grow in shapes:
        old_cells.append([cell + size // 2 for cell in grid_positions(side, spacing, size, grow)])
    padded = torch.zeros(*kernel.shape[:2], *box.size, dtype=torch.double)
    padded[:, :, *torch.meshgrid(*map(torch.tensor, old_cells), indexing="ij")] = kernel.double()
    return padded


def constructed(weight, positions, box):
    """Construct the kernel on the whole window, as layers do."""
    sigma = box.interpolation.initial_sigma
    if sigma is not None:
        sigma = torch.full_like(positions, sigma, dtype=torch.double)
    learnt_size = along_learnt_axes(box.size, box.dense_axes)
    return construct_unchecked(
        weight.double(), positions.double(), sigma, learnt_size, box.dense_axes, box.interpolation
    )


def differences(kernels, weights, positions, box):
    """Return constructed - old of each layer, on the whole window: (layers, O, I, *window)."""
    pairs = zip(kernels, weights, strict=True)
    return torch.stack([constructed(w, positions, box) - in_window(k, box) for k, w in pairs])


def distances_of_lines(kernels, weights, positions, box):
    """Return |constructed - old| of each kernel line, over all layers: (lines,)."""
    difference = differences(kernels, weights, positions, box).movedim(0, -1)
    learnt_axes = [2 + axis for axis in box.axes]
    return difference.square().sum((*learnt_axes, -1)).sqrt().flatten()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_the_fit_is_least_squares_and_each_line_is_closer_than_with_the_largest_cells(
    name, interpolation
):
    """Positions lie within the old kernel's extent. Gradients by weights are nearly zero: what is
    left is the ridge's.
    """
    case = CASES[name]
    box = box_for(case, interpolation)
    kernels = kernels_of(case)
    weights, positions = fit_elements(kernels, box, kernel_count=case["count"])
    cell_weights, cell_positions = box.largest_cells(kernels, case["count"])
    assert positions.shape == cell_positions.shape
    assert [weight.shape for weight in weights] == [weight.shape for weight in cell_weights]
    fitted = distances_of_lines(kernels, weights, positions, box)
    largest = distances_of_lines(kernels, cell_weights, cell_positions, box)
    assert bool((fitted <= largest * (1 + 1e-6)).all())
    assert float(fitted.norm()) < float(largest.norm())
    largest_value = max(float(kernel.abs().max()) for kernel in kernels)
    assert max(float(weight.abs().max()) for weight in weights) < 30 * largest_value
    if interpolation != "bilinear":  # elements spread beyond the old kernel, and beyond the box
        return
    for axis_positions, axis in zip(positions, box.axes, strict=True):
        cells = grid_positions(
            case["shape"][2 + axis], box.dilation[axis], box.size[axis], box.grow[axis]
        )
        assert cells[0] <= float(axis_positions.min())
        assert float(axis_positions.max()) <= cells[-1]
    for kernel, weight in zip(kernels, weights, strict=True):
        free_weight = weight.double().requires_grad_()
        residual = constructed(free_weight, positions, box) - in_window(kernel, box)
        (gradient,) = torch.autograd.grad(residual.square().sum() / 2, free_weight)
        assert gradient.abs().max() < 0.02 * kernel.abs().max()


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("size", [(17, 17), (9, 7)])
def test_the_error_of_a_fit_is_that_of_the_kernels_on_the_whole_window(interpolation, size):
    """However far an interpolation spreads, a fit sees all cells that its elements reach."""
    case = {"shape": (6, 1, 7, 7), "size": size, "count": 12}
    kernels = kernels_of(case, dtype=torch.double)
    box = box_for(case, interpolation)
    weights, positions = fit_elements(kernels, box, kernel_count=case["count"])
    by_line = torch.stack([weight.flatten(0, -2) for weight in weights], dim=1)
    stated = squared_errors(lines_of(kernels, box), box.to_box(positions), by_line, box, None)
    found = differences(kernels, weights, positions, box).square().sum((-1, -2)).flatten(1).mT
    # A Gaussian element never ends: at its support, it has 1e-14 of its value at the centre.
    torch.testing.assert_close(stated, found, rtol=1e-7, atol=0)
    largest = differences(kernels, *box.largest_cells(kernels, case["count"]), box)
    assert float(found.sum()) < float(largest.square().sum())


def test_the_number_of_lines_that_are_fitted_together_does_not_matter(monkeypatch):
    case = CASES["dense 3x3"]
    box = box_for(case)
    kernels = kernels_of(case, dtype=torch.float64)
    together = fit_elements(kernels, box, kernel_count=5)
    monkeypatch.setattr("dcls_convert.starts.positions.FLOATS_AT_ONCE", 1)
    torch.testing.assert_close(
        fit_elements(kernels, box, kernel_count=5), together, rtol=0, atol=1e-6
    )


CELLS = st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e-20, 1e10, 0.5]), min_size=9, max_size=9)


@given(
    st.lists(CELLS | st.just([0.0] * 9), min_size=2, max_size=2),
    st.integers(1, 8),
    st.sampled_from(["bilinear", "gaussian"]),
    st.sampled_from([None, "any", "no input"]),
)
def test_awkward_kernels_and_roots_give_finite_elements_no_worse_than_the_largest(
    layers, count, interpolation, roots_case
):
    """Kernels have only zeros, equal cells, or cells that dwarf others; channels have no input."""
    kernels = [torch.tensor(layer).reshape(1, 1, 3, 3) for layer in layers]
    box = Box((3, 3), (1, 1), (7, 7), interpolation)
    cells = math.prod(box.lengths)
    roots = None
    if roots_case is not None:
        roots = torch.randn(1, cells, cells, generator=torch.Generator().manual_seed(0))
    if roots_case == "no input":
        roots[:] = 0
    weights, positions = fit_elements(kernels, box, kernel_count=count, cost_roots=roots)
    assert all(tensor.isfinite().all() for tensor in (*weights, positions))

    def error(weights, positions):
        """Return the error in the box, where the fit measures it."""
        footprint = box.footprint(box.to_box(positions.double()))
        by_layer = torch.stack(weights).double().flatten(1)  # (layers, E)
        errors = lines_of(kernels, box)[0].double() - by_layer @ footprint[0]
        if roots is not None:
            errors = errors @ roots[0].double()
        return float(errors.norm())

    error_of_largest = error(*box.largest_cells(kernels, count))
    size = float(torch.stack(kernels).norm())
    assert error(weights, positions) <= error_of_largest * (1 + 1e-4) + 1e-5 * size


# In a model.


def depthwise_net():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(6, 6, 5, padding=2, groups=6), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 6, 1), nn.Sequential(*blocks))


@pytest.mark.parametrize("init", ["fit", "largest", "exact", "random"])
def test_the_report_states_each_layers_relative_kernel_error(init):
    """It is None if elements are random. Fitted positions get a gradient from the first step on."""
    model = depthwise_net()
    old_kernels = model.state_dict()
    report = convert_(model, init=init, dilated_size=9, input_size=(3, 16, 16))
    assert len(report.layers) == 3
    for layer in report.layers:
        if init == "random":
            assert layer.fit_error is None
            continue
        old_kernel = old_kernels[f"{layer.name}.weight"]
        difference = model.get_submodule(layer.name).kernel().detach()
        difference[..., 2:7, 2:7] -= old_kernel
        expected = float(difference.norm() / old_kernel.norm())
        assert math.isclose(layer.fit_error, expected, rel_tol=1e-4, abs_tol=1e-6)
        assert (init == "exact") == (layer.fit_error < 1e-6)
        if init == "fit":
            layer = model.get_submodule(layer.name)
            loss = (layer.kernel() * torch.randn(6, 1, 9, 9)).sum()
            (gradient,) = torch.autograd.grad(loss, layer.positions)
            assert (gradient != 0).all()


def test_with_standardised_weights_a_fit_comes_closer_than_the_largest_cells():
    errors = {}
    for init in ("fit", "largest"):
        torch.manual_seed(0)
        model = timm.create_model("test_nfnet")
        report = convert_(model, dilated_size="+2", init=init, input_size=(3, 64, 64), budget=60)
        errors[init] = sum(layer.fit_error for layer in report.layers)
    assert errors["fit"] < 0.95 * errors["largest"]
