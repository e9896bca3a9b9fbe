"""Weights that are solved from what layers see in images."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn

from dcls_convert import DclsConvertError, find_convs, plan_conversion
from dcls_convert.layers.dcls_conv import DCLS_LAYERS
from dcls_convert.placing.place import make_layers
from dcls_convert.progress import ignore_messages
from dcls_convert.starts import moments as moments_module
from dcls_convert.starts import solve
from dcls_convert.starts.boxes import Box
from dcls_convert.starts.calibration import _solve_weights_, measure_inputs
from dcls_convert.starts.fit import roots_of_lines
from dcls_convert.starts.images import Calibration
from dcls_convert.starts.moments import JointMoments, LineMoments

from ..rules import rules_of

TOLERANCE = 2e-5  # the solver has a ridge, and computes in float32

CASES = {
    "depthwise": (nn.Conv2d(6, 6, 5, padding=2, groups=6), 9, ()),
    "dense": (nn.Conv2d(4, 5, 3, padding=1, bias=False), 7, ()),
    "groups, stride": (nn.Conv2d(4, 6, 3, padding=1, groups=2, stride=2), 7, ()),
    "multiplier": (nn.Conv2d(3, 6, 3, padding=1, groups=3), (7, 5), ()),
    "dilated, reflected": (
        nn.Conv2d(4, 4, 3, padding=2, dilation=2, padding_mode="reflect", groups=4),
        7,
        (),
    ),
    "not padded": (nn.Conv2d(4, 4, 3, groups=4), 7, ()),
    "even": (nn.Conv2d(4, 4, (4, 2), padding=(2, 1), groups=4), (8, 6), ()),
    "1-D": (nn.Conv1d(4, 4, 5, padding=2, groups=2), 9, ()),
    "partly dense": (nn.Conv3d(2, 3, 3, padding=1), (3, 5, 5), (0,)),
    "back": (nn.Conv1d(4, 4, 6, padding=4, groups=2), 10, (), "back"),
    "back, ahead": (
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", groups=4),
        (6, 8),
        (),
        ("back", "ahead"),
    ),
}


def make_case(name):
    """Return a conv, a layer with elements inside its kernel, its box, and inputs, in float64."""
    conv, size, dense, *sides = CASES[name]
    grow = sides[0] if sides else "both"
    conv = copy.deepcopy(conv).double()
    torch.manual_seed(0)
    conv.reset_parameters()
    dims = len(conv.kernel_size)
    layer = DCLS_LAYERS[dims].from_conv_without_values(conv, 4, size, "bilinear", dense, grow)
    window = layer.dilated_kernel_size
    box = Box(conv.kernel_size, conv.dilation, window, "bilinear", dense, layer.grow)
    with torch.no_grad():
        layer.weight.normal_()
        for positions, first, side in zip(layer.positions, box.origin, box.lengths, strict=True):
            # In another order for each kernel. None of them coincide, where the ridge would show.
            grid = torch.linspace(first, first + side - 1, layer.kernel_count)
            positions.copy_(grid[torch.rand_like(positions).argsort(-1)])
    images = torch.randn(5, conv.in_channels, *(9, 11, 12)[-dims:]) + 1
    return conv, layer.double(), box, images.double()


@pytest.mark.parametrize("name", CASES)
def test_solved_weights_bring_outputs_as_close_as_any_and_the_error_is_stated(name, monkeypatch):
    """Without the terms that favour other images, and with all places of the images."""
    monkeypatch.setattr(moments_module, "SAMPLES_PER_IMAGE", 10**6)
    monkeypatch.setattr(moments_module, "KERNEL_PRIOR", 0)
    monkeypatch.setattr(moments_module, "SHARED_CORRELATION", 0)
    monkeypatch.setattr(solve, "MAX_STEPS", 1000)
    monkeypatch.setattr(solve, "MIN_RESIDUAL", 1e-12)
    conv, layer, box, images = make_case(name)
    moments = JointMoments(layer, box)
    moments.add(images[:2])
    moments.add(images[2:])
    with torch.no_grad():
        stated = _solve_weights_(conv, layer, moments)
        old = conv(images)
        change = layer(images) - old
        assert stated == pytest.approx(float(change.norm() / old.norm()), rel=1e-6)
        layer.weight.zero_()
        without_weights = layer(images).reshape(-1, 1)
        of_each_weight = []  # outputs are linear in the weights
        for weight in torch.eye(layer.weight.numel(), dtype=torch.float64):
            layer.weight.copy_(weight.reshape(layer.weight.shape))
            of_each_weight.append(layer(images).flatten())
    matrix = torch.stack(of_each_weight, 1) - without_weights
    better = torch.linalg.lstsq(matrix, change.reshape(-1, 1)).solution
    best = change.reshape(-1, 1) - matrix @ better
    assert float(change.norm()) <= (1 + TOLERANCE) * float(best.norm())


def test_the_roots_of_a_line_measure_the_effect_of_its_error_on_the_output(monkeypatch):
    monkeypatch.setattr(moments_module, "SAMPLES_PER_IMAGE", 10**6)
    monkeypatch.setattr(moments_module, "KERNEL_PRIOR", 1e-6)
    monkeypatch.setattr(moments_module, "SHARED_CORRELATION", 0)
    monkeypatch.setattr(moments_module, "NEIGHBOURS", 0)
    torch.manual_seed(0)
    images = nn.functional.avg_pool2d(torch.randn(6, 8, 44, 44), 5, stride=1)
    images = images * torch.linspace(0.5, 2, 8).reshape(8, 1, 1) + 3
    model = nn.Sequential(nn.Conv2d(8, 8, 5, groups=2))
    rules = rules_of({"match": {"kernel_size": 5}, "padding": "any"})
    convs = find_convs(model, (8, 40, 40))
    groups = make_layers(model, plan_conversion(convs, rules, dilated_size=9, kernel_count=4))
    calibration = Calibration(batches=(images,))
    statistics = measure_inputs(model, groups, calibration, ignore_messages)
    roots = roots_of_lines(statistics.cost_roots(groups[0]), model[0].weight, 8 * 4)
    ratios = []
    for line, root in enumerate(roots.of(torch.arange(8 * 4))):
        channel = line // 16 * 4 + line % 4
        error = torch.randn(1, 1, 5, 5)
        output = nn.functional.conv2d(images[:, channel : channel + 1], error)
        cost = (error.flatten() @ root).square().sum()
        ratios.append(float(cost / output.square().mean()))
    # The ratio itself is arbitrary, since roots are scaled to a mean of 1.
    assert max(ratios) / min(ratios) < 1.1


@pytest.mark.parametrize("name", ["depthwise", "not padded", "1-D", "groups, stride"])
def test_changes_that_alternate_between_places_cost_less_than_those_of_one_sign(name, monkeypatch):
    monkeypatch.setattr(moments_module, "KERNEL_PRIOR", 0)
    monkeypatch.setattr(moments_module, "SHARED_CORRELATION", 0)
    conv, layer, box, _ = make_case(name)
    sides = [40] * layer.dims
    alternating = torch.ones(sides)
    for cells in torch.meshgrid(*map(torch.arange, sides), indexing="ij"):
        alternating *= (-1.0) ** (cells // layer.stride[0])
    costs = []
    for image in (torch.ones(sides), alternating):
        moments = LineMoments(layer, box)
        moments.add(image.expand(2, conv.in_channels, *sides).double())
        centre = moments.patch_length // 2
        costs.append(moments.costs()[:, centre, centre])
    of_one_sign = costs[0].new_tensor(1 + moments_module.NEIGHBOURS)
    assert torch.allclose(costs[0], of_one_sign, rtol=0.1)  # less where the padding is zero
    assert bool((costs[1] < 1 + 0.2 * moments_module.NEIGHBOURS).all())


@pytest.mark.parametrize("shape", [(2, 4, 1, 9, 9), (4, 2, 9, 9), (0, 4, 2, 9, 9)])
def test_short_maps_single_images_and_empty_batches_are_added(shape):
    conv = nn.Conv3d(4, 4, (1, 3, 3), padding=(0, 1, 1), groups=4)
    layer = DCLS_LAYERS[3].from_conv_without_values(conv, 4, (1, 7, 7), "bilinear", (0,), "both")
    moments = LineMoments(layer, Box(conv.kernel_size, conv.dilation, (1, 7, 7), "bilinear", (0,)))
    moments.add(torch.randn(shape))
    assert (moments.sample_count == 0) == (shape[0] == 0)
    assert not moments.sample_count or bool(moments.costs().isfinite().all())


def test_a_value_that_is_not_finite_is_found_at_each_pixel():
    _, layer, box, _ = make_case("depthwise")
    for row, column in itertools.product(range(24), repeat=2):
        image = torch.ones(1, 6, 24, 24)
        image[0, 0, row, column] = torch.nan
        moments = LineMoments(layer, box)
        moments.add(image)
        finite = bool(moments.costs().isfinite().all())
        with contextlib.nullcontext() if finite else pytest.raises(DclsConvertError, match="conv"):
            moments.check("conv")


def noise(count, size, pools):
    """Noise that is averaged over as many rows and columns as a channel's pool says."""
    channels = []
    for number, (rows, columns) in enumerate(pools):
        generator = torch.Generator().manual_seed(1000 * number + count)
        white = torch.randn(count, 1, size + rows - 1, size + columns - 1, generator=generator)
        channels.append(nn.functional.avg_pool2d(white, (rows, columns), stride=1))
    return torch.cat(channels, 1)


@pytest.mark.parametrize(
    ("pools", "other_factor"), [([(3, 3)] * 8, 0), ([(1, 4)] * 4 + [(4, 1)] * 4, 5)]
)
def test_what_channels_share_is_used_as_far_as_it_helps_on_other_images(
    pools, other_factor, monkeypatch
):
    """With few images, it helps where channels are alike; more would harm where they differ."""
    conv = nn.Conv2d(8, 8, 5, padding=2, groups=8)
    layer = DCLS_LAYERS[2].from_conv_without_values(conv, 4, (9, 9), "bilinear", (), "both")
    box = Box(conv.kernel_size, conv.dilation, (9, 9), "bilinear")
    few = LineMoments(layer, box)
    few.add(noise(2, 12, pools))
    many = LineMoments(layer, box)
    many.add(noise(300, 12, pools))

    def scaled(costs):
        return costs / costs.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]

    distances = []
    for factor in (moments_module.SHARED_CORRELATION, other_factor):
        monkeypatch.setattr(moments_module, "SHARED_CORRELATION", factor)
        costs = few.costs()
        monkeypatch.setattr(moments_module, "SHARED_CORRELATION", 0)
        distances.append(float((scaled(costs) - scaled(many.costs())).norm()))
    assert distances[0] < 0.97 * distances[1]


@pytest.mark.parametrize(
    ("count", "side", "pool", "other_prior"), [(1, 5, 1, 0.0), (20, 16, 7, 0.1)]
)
def test_the_old_kernel_counts_as_far_as_it_helps_on_other_images(
    count, side, pool, other_prior, monkeypatch
):
    """It helps where images show little; more would harm where they show much."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 4, 5, padding=2).double()
    layer = DCLS_LAYERS[2].from_conv_without_values(conv, 9, (9, 9), "bilinear", (), "both")
    layer = layer.double()
    box = Box(conv.kernel_size, conv.dilation, (9, 9), "bilinear")
    moments = JointMoments(layer, box)
    pools = [(pool, pool)] * 4
    moments.add(noise(count, side, pools).double())
    other_images = noise(30, side, pools).double()
    (weights,), positions = box.largest_cells([conv.weight.detach()], 9)
    positions += torch.rand_like(positions) / 2
    errors = []
    for prior in (moments_module.KERNEL_PRIOR, other_prior):
        monkeypatch.setattr(moments_module, "KERNEL_PRIOR", prior)
        with torch.no_grad():
            layer.weight.copy_(weights)
            layer.positions.copy_(positions)
            _solve_weights_(conv, layer, moments)
            old = conv(other_images)
            errors.append(float((layer(other_images) - old).norm() / old.norm()))
    assert errors[0] < 0.98 * errors[1]


def test_channels_with_hardly_any_input_do_not_count_in_what_channels_share():
    conv = nn.Conv2d(8, 8, 5, padding=2, groups=8)
    layer = DCLS_LAYERS[2].from_conv_without_values(conv, 4, (9, 9), "bilinear", (), "both")
    box = Box(conv.kernel_size, conv.dilation, (9, 9), "bilinear")
    images = noise(50, 12, [(3, 3)] * 4 + [(1, 1)] * 4)
    costs = []
    for scale in (1e-5, 0):
        moments = LineMoments(layer, box)
        moments.add(torch.cat([images[:, :4], scale * images[:, 4:]], 1))
        costs.append(moments.costs()[:4])
    torch.testing.assert_close(*costs, rtol=1e-4, atol=0)
