"""The pictures as data: nothing is lost in a heat map, and a montage shows the layer's own kernels."""

import math
from pathlib import Path

import pytest
import torch
from timm.layers import StdConv2d
from torch import nn

from dcls_convert import apply_plan_, find_convs, plan_conversion, predict_report
from dcls_convert.layers.construction import construct_kernel
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.layers.position_statistics import border_share
from dcls_convert.planning.rules import parse_rules
from dcls_convert.views.kernels import KernelPicture
from dcls_convert.views.pictures import Pictures, pictures_of_model
from dcls_convert.views.positions import even_border_share

from ..checkpoints.folders import convert

FLOAT32_ATOL = 1e-6


def pictures_of(model, plan) -> Pictures:
    return pictures_of_model(model, plan, Path("folder"), predict_report(plan))


def of_module(module, input_size, size, rule=""):
    rules = parse_rules(f"format: 1\nrules: [{{{rule}}}]")
    plan = plan_conversion(find_convs(module, input_size), dilated_size=size, rules=rules)
    apply_plan_(module, plan, init="random", positions="uniform", generator=torch.Generator().manual_seed(0))
    return module.eval(), plan


def standardised():
    return of_module(nn.Sequential(StdConv2d(4, 6, 3, padding=1)), (4, 16, 16), 7)


CASES = {
    "tied": lambda: convert(),
    "untied": lambda: convert(tie="none"),
    "gaussian": lambda: convert(interpolation="gaussian"),
    "rectangular": lambda: convert(size=(9, 11)),
    "volume": lambda: of_module(nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv3d(4, 4, 3)), (2, 12, 12, 12), 5),
    "line": lambda: of_module(nn.Sequential(nn.Conv1d(2, 4, 5, padding=2)), (2, 32), 9),
    "dense": lambda: of_module(nn.Sequential(nn.Conv2d(4, 4, (3, 5))), (4, 16, 16), (3, 9), "dense_axes: [0]"),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]()


def tensors_of(model):
    """Every positions tensor once, in the order of the layers."""
    layers = [module for module in model.modules() if isinstance(module, DclsConvNd)]
    return list({id(layer.positions): layer.positions for layer in layers}.values())


def test_a_heat_map_and_each_histogram_hold_every_element_once(case):
    model, plan = case
    pictures = pictures_of(model, plan)
    for picture, positions in zip(pictures.positions, tensors_of(model), strict=True):
        assert sum(map(sum, picture.heat)) == picture.row.elements == positions[0].numel()
        assert [sum(counts) for counts in picture.histograms] == [positions[0].numel()] * len(picture.size)
        columns = [sum(column) for column in zip(*picture.heat, strict=True)]
        assert tuple(columns) == picture.histograms[-1]
        if len(picture.size) > 1:
            assert tuple(map(sum, picture.heat)) == picture.histograms[-2]
    assert sum(picture.row.elements for picture in pictures.positions) == pictures.inspection.elements


def test_elements_are_counted_where_they_are():
    model, plan = convert(tie="none")
    layer = model.get_submodule(plan.layers[0].name)
    with torch.no_grad():
        layer.positions.zero_()
        layer.positions[0, 0, 0, 0], layer.positions[1, 0, 0, 0] = -4.0, 3.0
    picture = pictures_of(model, plan).positions[0]
    fine = picture.bins_per_cell
    found = {(i, j): n for i, row in enumerate(picture.heat) for j, n in enumerate(row) if n}
    middle = (4 * fine + fine // 2,) * 2
    assert found == {(fine // 2, 7 * fine + fine // 2): 1, middle: layer.positions[0].numel() - 1}


@pytest.mark.parametrize("size", [(9,), (9, 11), (1, 7)])
def test_the_even_share_is_that_of_evenly_spread_positions(size):
    limits = [(-(side // 2), (side - 1) // 2) for side in size]
    generator = torch.Generator().manual_seed(0)
    places = torch.rand(len(size), 1, 1, 200_000, generator=generator)
    for axis, (low, high) in zip(places, limits, strict=True):
        axis.mul_(high - low).add_(low)
    assert even_border_share(size) == pytest.approx(border_share(places, size), abs=0.01)


def test_a_montage_shows_the_layers_kernels_with_the_most_energy_first(case):
    model, plan = case
    shown = pictures_of(model, plan).kernels
    assert [layer.name for layer in shown] == [layer.name for layer in plan.layers]
    for layer in shown:
        module = model.get_submodule(layer.name)
        kernels = module.kernel().detach()
        planes = kernels.sum(2) if kernels.dim() == 5 else kernels.unsqueeze(2) if kernels.dim() == 3 else kernels
        energies = kernels.square().flatten(2).sum(2)
        assert layer.total == energies.numel()
        found = [kernel.energy for kernel in layer.kernels]
        assert found == sorted(found, reverse=True)
        assert found == pytest.approx(energies.flatten().topk(len(found)).values.tolist(), rel=1e-5)
        assert layer.energy_share == pytest.approx(sum(found) / float(energies.sum()), rel=1e-5)
        for kernel in layer.kernels:
            torch.testing.assert_close(torch.tensor(kernel.cells), planes[kernel.channels], rtol=0, atol=FLOAT32_ATOL)


def test_a_montage_shows_standardised_weights():
    model, plan = standardised()
    layer = pictures_of(model, plan).kernels[0]
    kernels = model.get_submodule(layer.name).kernel().detach()
    for kernel in layer.kernels:
        torch.testing.assert_close(torch.tensor(kernel.cells), kernels[kernel.channels], rtol=0, atol=1e-5)


def kernel_again(kernel: KernelPicture):
    """From the elements alone, by bilinear interpolation."""
    rows, columns, weights = map(torch.tensor, zip(*kernel.elements, strict=True))
    size = (len(kernel.cells), len(kernel.cells[0]))
    return construct_kernel(weights[None, None], torch.stack([rows, columns])[:, None, None], size)[0, 0]


@pytest.mark.parametrize("name", ["tied", "rectangular", "line", "volume", "dense"])
def test_the_elements_behind_a_kernel_make_it(name):
    for layer in pictures_of(*CASES[name]()).kernels:
        for kernel in layer.kernels[:4]:
            torch.testing.assert_close(kernel_again(kernel), torch.tensor(kernel.cells), rtol=0, atol=FLOAT32_ATOL)


def test_costs_by_stage_sum_to_the_reports():
    model, plan = convert()
    pictures = pictures_of(model, plan)
    for unit in ("params", "macs"):
        for when in ("before", "after"):
            total = sum(getattr(getattr(cost, unit), when) for cost in pictures.costs)
            assert total == sum(getattr(layer, f"{unit}_{when}") for layer in pictures.report.layers)
    assert math.isfinite(pictures.inspection.share("border_share"))
