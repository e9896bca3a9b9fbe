"""The figure: its heat maps count every element, its kernels are the layer's own and are named by
their channels, and it is a file in each format.
"""

import functools

import pytest
import torch
from torch import nn

from dcls_convert import apply_plan_, find_convs, plan_conversion
from dcls_convert.errors import CheckpointError
from dcls_convert.layers.construction import construct_kernel
from dcls_convert.planning.layer_plan import position_groups
from dcls_convert.planning.rule_files import parse_rules
from dcls_convert.views.plot import BINS_PER_CELL, MAX_KERNELS, draw, make_figure

from ..checkpoints.folders import convert

pytest.importorskip("matplotlib")
FLOAT32_ATOL = 1e-6


def convert_module(module, input_size, size, rule="", **options):
    rules = parse_rules(f"format: 1\nrules: [{{{rule}}}]")
    plan = plan_conversion(
        find_convs(module, input_size), dilated_size=size, rules=rules, **options
    )
    apply_plan_(
        module, plan, init="random", positions="uniform", generator=torch.Generator().manual_seed(0)
    )
    return module.eval(), plan


def depthwise(layers=2):
    return nn.Sequential(*[nn.Conv2d(4, 4, 7, padding=3, groups=4) for _ in range(layers)])


CASES = {
    "tied": convert,
    "gaussian": lambda: convert_module(depthwise(), (4, 16, 16), 9, interpolation="gaussian"),
    "volume": lambda: convert_module(
        nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)),
        (2, 12, 12, 12),
        5,
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


def rows_of(model, plan):
    return make_figure(plan, model.state_dict()).subfigs[:-1]  # the last has the legend


def heat_map(row):
    """The numbers of elements in a row of the figure: (rows, columns)."""
    (mesh,) = row.axes[0].collections
    return torch.as_tensor(mesh.get_array().filled(0))


def kernel_panels(row):
    """The panels of a row that show a kernel."""
    return [panel for panel in row.axes if panel.images]


def cells_of(panel):
    """The cells of the kernel that a panel shows: (rows, columns)."""
    return torch.as_tensor(panel.images[0].get_array().data)


@pytest.mark.parametrize("name", CASES)
def test_a_row_shows_all_elements_and_the_kernels_with_the_most_energy(name):
    model, plan = model_and_plan(name)
    for layers, row in zip(position_groups(plan.layers), rows_of(model, plan), strict=True):
        layer = model.get_submodule(layers[0].name)
        assert heat_map(row).sum() == layer.positions[0].numel()
        kernels = layer.kernel().detach().flatten(0, 1)
        energies = kernels.square().flatten(1).sum(1)
        strongest = energies.topk(min(MAX_KERNELS, len(kernels))).indices
        size = (1, *kernels.shape[1:])[-2:]
        planes = kernels.reshape(len(kernels), -1, *size).sum(1)
        for panel, index in zip(kernel_panels(row), strongest, strict=True):
            cells = cells_of(panel)
            torch.testing.assert_close(cells, planes[index], rtol=0, atol=FLOAT32_ATOL)
            (dots,) = panel.collections
            weights = layer.weight.detach().flatten(0, 1)[index].flatten()
            if layer.interpolation == "bilinear":
                columns, rows = torch.as_tensor(dots.get_offsets().data).float().T
                positions = torch.stack([rows, columns])[:, None, None]
                constructed = construct_kernel(weights[None, None], positions, size)[0, 0]
                torch.testing.assert_close(constructed, cells, rtol=0, atol=FLOAT32_ATOL)


def test_elements_are_counted_where_they_are():
    model, plan = convert_module(depthwise(), (4, 16, 16), 9)
    positions = model.get_submodule(plan.layers[0].name).positions
    with torch.no_grad():
        positions.zero_()
        positions[:, 0, 0, 0] = torch.tensor([-4.0, 3.0])
    row = rows_of(model, plan)[0]
    assert row.axes[0].get_ylim() == (4.5, -4.5)  # rows go down
    middle = BINS_PER_CELL // 2
    expected = torch.zeros(9 * BINS_PER_CELL, 9 * BINS_PER_CELL)
    expected[middle, 7 * BINS_PER_CELL + middle] = 1
    expected[4 * BINS_PER_CELL + middle, 4 * BINS_PER_CELL + middle] = positions[0].numel() - 1
    torch.testing.assert_close(heat_map(row).double(), expected.double())


@pytest.mark.parametrize(
    ("rule", "size", "rows", "columns"),
    [
        ("", (9, 11), (-3.5, 3.5), (-3.5, 3.5)),
        ("grow: [back, both]", (10, 11), (-2.5, 4.5), (-3.5, 3.5)),
        ("grow: [both, ahead]", (9, 12), (-3.5, 3.5), (-6.5, 0.5)),
    ],
)
def test_the_old_kernel_is_drawn_where_it_lies(rule, size, rows, columns):
    model, plan = convert_module(depthwise(), (4, 16, 16), size, rule)
    row = rows_of(model, plan)[0]
    for panel in (row.axes[0], *kernel_panels(row)):
        (old,) = panel.patches  # once, though two layers share the positions
        assert (old.get_y(), old.get_y() + old.get_height()) == rows
        assert (old.get_x(), old.get_x() + old.get_width()) == columns


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_kernels_are_named_by_their_channels(groups):
    model, plan = convert_module(
        nn.Sequential(nn.Conv2d(6, 12, 3, padding=1, groups=groups)), (6, 16, 16), 7
    )
    kernels = {}
    for output, of_output in enumerate(model[0].kernel().detach()):  # (6 / groups, 7, 7)
        group = output // (12 // groups)
        for place, kernel in enumerate(of_output):
            title = f"out {output}, in {group * len(of_output) + place}"
            kernels[title if groups < 6 else f"out {output}"] = kernel
    panels = kernel_panels(rows_of(model, plan)[0])
    assert len({panel.get_title() for panel in panels}) == MAX_KERNELS
    for panel in panels:
        expected = kernels[panel.get_title()]
        torch.testing.assert_close(cells_of(panel), expected, rtol=0, atol=FLOAT32_ATOL)


def test_the_colours_of_a_row_mean_the_same_in_all_its_kernels():
    model, plan = model_and_plan("tied")
    for row in rows_of(model, plan):
        panels = kernel_panels(row)
        ((low, high),) = {panel.images[0].get_clim() for panel in panels}
        assert -low == high == torch.stack([*map(cells_of, panels)]).abs().max()
        (bar,) = [axes for axes in row.axes if axes.get_title() == "weight"]
        assert bar.get_ylim() == (low, high)


@pytest.mark.parametrize(("width", "kernels"), [(20, 4), (6.75, 4), (3.3, 2), (3, 1)])
def test_there_are_as_many_panels_as_fit_and_none_is_empty(width, kernels):
    model, plan = convert_module(depthwise(), (4, 16, 16), 9)
    figure = make_figure(plan, model.state_dict(), width=width)
    assert figure.get_figwidth() == width
    row = figure.subfigs[0]
    assert len(kernel_panels(row)) == kernels
    assert len(row.axes) == kernels + 3  # a heat map and two colour bars


@pytest.mark.parametrize("suffix", [".PNG", ".svg", ".pdf"])
def test_a_figure_is_a_file_without_a_date(suffix):
    model, plan = model_and_plan("dense")
    first_bytes = {".svg": b"<?xml", ".pdf": b"%PDF-", ".PNG": b"\x89PNG\r\n"}[suffix]
    file = draw(plan, model.state_dict(), suffix)
    assert file.startswith(first_bytes)
    assert file == draw(plan, model.state_dict(), suffix)


def test_a_weight_that_does_not_fit_the_plan_is_refused():
    model, plan = model_and_plan("gaussian")
    state = model.state_dict()
    with pytest.raises(CheckpointError, match=r"0\.weight is missing"):
        make_figure(plan, {name: state[name] for name in state if name != "0.weight"})
    with pytest.raises(CheckpointError, match=r"0\.weight is \(2, 1, "):
        make_figure(plan, state | {"0.weight": state["0.weight"][:2]})
