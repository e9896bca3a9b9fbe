"""What layers see in images, what an error of a kernel costs there, and weights solved from this.

In most tests, all places of an image are sampled.
"""

import copy
import math

import pytest
import torch
from torch import nn

from dcls_convert import find_convs, plan_conversion
from dcls_convert.layers.dcls_conv import DCLS_LAYERS
from dcls_convert.placing.place import make_layers
from dcls_convert.planning.rule_files import parse_rules
from dcls_convert.starts import moments as moments_module
from dcls_convert.starts import solve
from dcls_convert.starts.boxes import Box
from dcls_convert.starts.calibrate import CalibrationStatistics, _solve_weights_
from dcls_convert.starts.images import Calibration
from dcls_convert.starts.moments import KERNEL_PRIOR, SHARED_CORRELATION, InputMoments

EVERY = parse_rules("format: 1\nrules:\n  - match: {kernel_size: {min: 5}}\n    padding: any\n")
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
}


@pytest.fixture
def every_place(monkeypatch):
    monkeypatch.setattr(moments_module, "SAMPLES_PER_IMAGE", 10**6)


def make_case(name, count=4):
    """Return a conv, a layer with elements inside its kernel, its box, and inputs, in float64."""
    conv, size, dense = CASES[name]
    conv = copy.deepcopy(conv).double()
    torch.manual_seed(0)
    dims = len(conv.kernel_size)
    layer = DCLS_LAYERS[dims].from_conv_without_values(conv, count, size, "bilinear", dense)
    box = Box(conv.kernel_size, conv.dilation, layer.dilated_kernel_size, "bilinear", dense)
    with torch.no_grad():
        layer.weight.normal_()
        for axis, (first, side) in enumerate(zip(box.origin, box.sides, strict=True)):
            layer.positions[axis].uniform_(first, first + side - 1)
    images = torch.randn(5, conv.in_channels, *(9, 11, 12)[-dims:]) + 1
    return conv, layer.double(), box, images.double()


def moments_of(layer, box, *batches, joint=True):
    moments = InputMoments(layer, box, joint=joint)
    for batch in batches:
        moments.add(batch)
    return moments


def all_patches(moments, images):
    """Return the patches at all places: (G, R * S, P)."""
    patches = moments._sampled_patches(moments.layer.pad_input(images))
    return patches.reshape(moments.line_groups, moments.patch_length, -1)


@pytest.mark.usefixtures("every_place")
@pytest.mark.parametrize("name", CASES)
def test_solved_kernels_are_those_of_the_normal_equations(name, monkeypatch):
    """Each output channel has its own, which are set up here from patches."""
    monkeypatch.setattr(solve, "MAX_STEPS", 1000)
    monkeypatch.setattr(solve, "MIN_RESIDUAL", 1e-12)
    conv, layer, box, images = make_case(name)
    moments = moments_of(layer, box, images[:2], images[2:])
    old = box.lines_of(conv.weight.detach())
    footprint = box.footprint(box.to_box(layer.positions.detach()))
    start = layer.weight.detach().flatten(0, -2)
    weights = solve.solve_weights(moments.costs(), footprint, old, start)

    patches = all_patches(moments, images)
    cells = math.prod(box.sides)
    squares = patches.square().mean(2).unflatten(1, (-1, cells)).mean(2)  # (G, R)
    squares = squares.repeat_interleave(cells, 1)  # (G, R * S)
    M = patches @ patches.mT / patches.shape[2] + KERNEL_PRIOR * torch.diag_embed(squares)
    if patches.shape[1] == cells:  # one line for each output channel
        x = patches - patches.mean(2, keepdim=True)
        covariance = x @ x.mT / x.shape[2]
        shared = (covariance / squares.unsqueeze(2)).mean(0)
        M = M + SHARED_CORRELATION * shared * squares.unsqueeze(2)
    lines = len(weights) // layer.out_channels
    for channel in range(layer.out_channels):
        own_lines = slice(channel * lines, (channel + 1) * lines)
        own_M = M[channel // (layer.out_channels // layer.groups)]
        F = torch.block_diag(*footprint[own_lines])  # (R * E, R * S)
        system = F @ own_M @ F.T
        mean_diagonals = system.diagonal().reshape(lines, -1).mean(1)
        ridge = solve.RIDGE * mean_diagonals.repeat_interleave(footprint.shape[1])
        right_side = F @ own_M @ old[own_lines].flatten() + ridge * start[own_lines].flatten()
        expected = torch.linalg.solve(system + torch.diag(ridge), right_side)
        tolerance = 1e-9
        if lines > 1:  # products with M are computed in float32
            tolerance = 1e-3
        error = (weights[own_lines].flatten() - expected) @ F
        kernel = expected @ F
        assert float(error @ own_M @ error) < tolerance**2 * float(kernel @ own_M @ kernel)


@pytest.mark.usefixtures("every_place")
@pytest.mark.parametrize("name", CASES)
def test_the_output_error_of_a_layer_is_that_of_its_outputs(name):
    conv, layer, box, images = make_case(name)
    with torch.no_grad():
        stated = _solve_weights_(conv, layer, moments_of(layer, box, images[:2], images[2:]))
        old = conv(images)
        error = (layer(images) - old).norm() / old.norm()
    assert stated == pytest.approx(float(error), rel=1e-6)


@pytest.mark.usefixtures("every_place")
def test_covariances_are_right_where_inputs_hardly_vary_beside_their_mean():
    """Sums of squares minus the squared mean would leave rounding errors of either sign."""
    _, layer, box, _ = make_case("not padded")
    torch.manual_seed(0)
    batches = (1000 + 1e-3 * torch.rand(6, 4, 7, 7)).split(2)
    moments = moments_of(layer, box, *batches)
    patches = all_patches(moments, torch.cat(batches).double())
    centred = patches - patches.mean(2, keepdim=True)
    expected = centred @ centred.mT / patches.shape[2]
    assert 0 < float(expected.diagonal(dim1=1, dim2=2).max()) < 1e-6
    atol = 1e-5 * float(expected.max())
    torch.testing.assert_close(moments.covariance(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("joint", [False, True])
def test_images_of_one_batch_or_of_several_have_the_same_moments(name, joint):
    _, layer, box, images = make_case(name)
    together = moments_of(layer, box, images, joint=joint)
    one_by_one = moments_of(layer, box, *images, joint=joint)
    assert together.sample_count == one_by_one.sample_count
    torch.testing.assert_close(together.mean, one_by_one.mean)
    torch.testing.assert_close(together.costs(), one_by_one.costs())


def group_of(*convs):
    """Return the tie group of these convolutions of a 5x5 kernel, within a 9x9 window."""
    model = nn.Sequential(nn.Sequential(*convs))
    plan = plan_conversion(
        find_convs(model, (8, 24, 24)), dilated_size=9, kernel_count=4, tie="stage", rules=EVERY
    )
    (group,) = make_layers(model, plan)
    return group


def statistics_of(group, batches_of_layers):
    """Return statistics in which each layer of a group has seen batches of its own."""
    box = Box.of(group.layer_plans[0])
    moments = {}
    for conv, layer, batches in zip(group.convs, group.layers, batches_of_layers, strict=True):
        moments[conv] = moments_of(layer, box, *batches, joint=False)
    return CalibrationStatistics(calibration=Calibration(batches=()), moments=moments)


@pytest.mark.usefixtures("every_place")
@pytest.mark.parametrize("groups", [8, 2, 1])
def test_the_root_measures_the_effect_of_an_error_on_the_output(groups, monkeypatch):
    """Each input channel has an error in turn."""
    monkeypatch.setattr(moments_module, "KERNEL_PRIOR", 1e-6)
    monkeypatch.setattr(moments_module, "SHARED_CORRELATION", 0)
    torch.manual_seed(0)
    images = nn.functional.avg_pool2d(torch.randn(6, 8, 44, 44), 5, stride=1)
    images = images * torch.linspace(0.5, 2, 8).reshape(8, 1, 1) + 3
    group = group_of(nn.Conv2d(8, 8, 5, groups=groups))
    roots = statistics_of(group, [[images]]).covariance_roots(group)
    assert roots.shape == (8, 25, 25)
    ratios = []
    for channel in range(8):
        error = torch.randn(1, 1, 5, 5)
        output = nn.functional.conv2d(images[:, channel : channel + 1], error)
        cost = (error.flatten() @ roots[channel]).square().sum()
        ratios.append(float(cost / output.square().mean()))
    # The ratio itself is arbitrary, since roots are scaled to a mean of 1.
    assert max(ratios) / min(ratios) < 1.1


def test_every_layer_has_the_same_weight_in_shared_roots():
    torch.manual_seed(0)
    convs = [nn.Conv2d(8, 8, 5, groups=8, padding=2) for _ in range(3)]
    group = group_of(*convs)
    rough = torch.randn(2, 8, 20, 20)
    smooth = nn.functional.avg_pool2d(torch.randn(2, 8, 24, 24), 5, stride=1)

    def covariance(*batches_of_layers):
        roots = statistics_of(group, batches_of_layers).covariance_roots(group)
        return roots @ roots.mT

    expected = (covariance([rough], [], []) + covariance([smooth], [], [])) / 2
    shared = covariance([rough], [], [9 * smooth])
    torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-5)
    assert statistics_of(group, [[], [], []]).covariance_roots(group) is None
