"""The pictures: heat maps lose no elements, the kernels shown are the layer's own, and figures are
files.
"""

import functools
from pathlib import Path

import pytest
import torch
from timm.layers import StdConv2d
from torch import nn

from dcls_convert import apply_plan_, find_convs, plan_conversion
from dcls_convert.layers.construction import construct_kernel
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.planning.rule_files import parse_rules
from dcls_convert.views.elements import BINS_PER_CELL_OF_DISTANCE
from dcls_convert.views.pictures import Pictures, pictures_of_model
from dcls_convert.views.plot import FIGURES, draw

from ..checkpoints.folders import convert

FLOAT32_ATOL = 1e-6


def pictures_of(model, plan) -> Pictures:
    return pictures_of_model(model, plan, Path("folder"))


def convert_module(module, input_size, size, rule="", **options):
    rules = parse_rules(f"format: 1\nrules: [{{{rule}}}]")
    plan = plan_conversion(
        find_convs(module, input_size), dilated_size=size, rules=rules, **options
    )
    apply_plan_(
        module, plan, init="random", positions="uniform", generator=torch.Generator().manual_seed(0)
    )
    return module.eval(), plan


def depthwise():
    return [nn.Conv2d(4, 4, 7, padding=3, groups=4) for _ in range(2)]


CASES = {
    "tied": convert,
    "untied": lambda: convert_module(nn.Sequential(*depthwise()), (4, 16, 16), 9, tie="none"),
    "gaussian": lambda: convert_module(
        nn.Sequential(*depthwise()), (4, 16, 16), 9, interpolation="gaussian"
    ),
    "rectangular": lambda: convert_module(nn.Sequential(*depthwise()), (4, 16, 16), (9, 11)),
    "volume": lambda: convert_module(
        nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)),
        (2, 12, 12, 12),
        5,
    ),
    "line": lambda: convert_module(nn.Sequential(nn.Conv1d(2, 4, 5, padding=2)), (2, 32), 9),
    "standardised": lambda: convert_module(
        nn.Sequential(StdConv2d(4, 6, 3, padding=1)), (4, 16, 16), 7
    ),
    "dense": lambda: convert_module(
        nn.Sequential(nn.Conv2d(4, 4, (3, 5), padding=(1, 2))),
        (4, 16, 16),
        (3, 9),
        "dense_axes: [0]",
    ),
}


@functools.cache
def model_and_plan(name):
    return CASES[name]()


@pytest.fixture(params=CASES)
def case(request):
    return model_and_plan(request.param)


def test_a_heat_map_and_each_histogram_hold_every_element_once(case):
    model, plan = case
    pictures = pictures_of(model, plan)
    tensors = dict.fromkeys(
        layer.positions for layer in model.modules() if isinstance(layer, DclsConvNd)
    )
    for picture, positions in zip(pictures.positions, tensors, strict=True):
        assert picture.heat.sum() == picture.row.elements == positions[0].numel()
        sums = [picture.heat.sum(1), picture.heat.sum(0)][-len(picture.size) :]
        assert [tuple(counts.tolist()) for counts in sums] == list(picture.histograms[-2:])
        assert {sum(counts) for counts in picture.histograms} == {positions[0].numel()}
        assert sum(picture.distances) == positions[0].numel()
        bins = torch.arange(len(picture.distances)) / BINS_PER_CELL_OF_DISTANCE
        mean = float((bins * torch.tensor(picture.distances)).sum()) / sum(picture.distances)
        assert mean <= picture.row.mean_distance <= mean + 1 / BINS_PER_CELL_OF_DISTANCE
    assert (
        sum(picture.row.elements for picture in pictures.positions) == pictures.inspection.elements
    )


def test_elements_are_counted_where_they_are():
    model, plan = CASES["untied"]()
    layer = model.get_submodule(plan.layers[0].name)
    with torch.no_grad():
        layer.positions.zero_()
        layer.positions[0, 0, 0, 0] = -4.0
        layer.positions[1, 0, 0, 0] = 3.0
    picture = pictures_of(model, plan).positions[0]
    fine = picture.bins_per_cell
    middle = picture.bins_per_cell // 2
    expected = torch.zeros_like(picture.heat)
    expected[middle, 7 * fine + middle] = 1
    expected[4 * fine + middle, 4 * fine + middle] = layer.positions[0].numel() - 1
    assert torch.equal(picture.heat, expected)


def test_the_kernels_of_a_layer_with_the_most_energy_are_shown_first(case):
    model, plan = case
    shown = pictures_of(model, plan).kernels
    assert [layer.name for layer in shown] == [layer.name for layer in plan.layers]
    for layer in shown:
        kernels = model.get_submodule(layer.name).kernel().detach()
        if kernels.dim() == 5:
            planes = kernels.sum(2)
        elif kernels.dim() == 3:
            planes = kernels.unsqueeze(2)
        else:
            planes = kernels
        energies = kernels.square().flatten(2).sum(2)
        chosen = tuple(zip(*layer.channels, strict=True))
        assert layer.total == energies.numel()
        torch.testing.assert_close(
            energies[chosen], energies.flatten().topk(len(layer.cells)).values
        )
        assert layer.energy_share == pytest.approx(
            float(energies[chosen].sum() / energies.sum()), rel=1e-5
        )
        torch.testing.assert_close(layer.cells, planes[chosen], rtol=0, atol=FLOAT32_ATOL)


@pytest.mark.parametrize("name", ["tied", "rectangular", "line", "volume", "dense"])
def test_the_elements_of_a_shown_kernel_construct_it(name):
    """The elements are interpolated bilinearly."""
    for layer in pictures_of(*model_and_plan(name)).kernels:
        size = tuple(layer.cells.shape[1:])
        constructed = construct_kernel(
            layer.weights[None], layer.positions.movedim(-1, 0)[:, None], size
        )[0]
        torch.testing.assert_close(constructed, layer.cells, rtol=0, atol=FLOAT32_ATOL)


DRAWN = {"positions": (".svg", ".pdf", ".PNG"), "kernels": (".svg",)}


def test_every_figure_is_drawn():
    """test_history.py draws the figure of a history."""
    pictures = pictures_of(*model_and_plan("dense"))
    assert {*DRAWN, "history"} == set(FIGURES)
    for figure, suffixes in DRAWN.items():
        for suffix in suffixes:
            first_bytes = {".svg": b"<?xml", ".pdf": b"%PDF-"}.get(suffix, b"\x89PNG\r\n")
            assert draw(pictures, figure, suffix).startswith(first_bytes)
