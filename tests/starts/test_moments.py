"""What layers see in images, what an error of a kernel costs there, and weights solved from this.

In most tests, all places of an image are sampled.
"""

import copy
import math

import pytest
import torch
from torch import nn

from dcls_convert.layers.dcls_conv import DCLS_LAYERS
from dcls_convert.starts import moments as moments_module
from dcls_convert.starts import solve
from dcls_convert.starts.boxes import Box
from dcls_convert.starts.calibrate import _solve_weights_
from dcls_convert.starts.moments import KERNEL_PRIOR, SHARED_CORRELATION, InputMoments

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
