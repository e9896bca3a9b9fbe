"""What a layer's inputs and outputs have in common over many places, and the weights that follow from it."""

import pytest
import torch
from torch import nn

from dcls_convert.fitting import moments
from dcls_convert.fitting.boxes import box_of
from dcls_convert.fitting.least_squares import spread
from dcls_convert.fitting.moments import Moments, best_weights, shared_roots
from dcls_convert.layers.dcls_conv import DCLS_LAYERS

CASES = {
    "depthwise": (nn.Conv2d(6, 6, 5, padding=2, groups=6), 9, ()),
    "dense": (nn.Conv2d(4, 5, 3, padding=1, bias=False), 7, ()),
    "groups, stride": (nn.Conv2d(4, 6, 3, padding=1, groups=2, stride=2), 7, ()),
    "multiplier": (nn.Conv2d(3, 6, 3, padding=1, groups=3), (7, 5), ()),
    "dilated, reflected": (nn.Conv2d(4, 4, 3, padding=2, dilation=2, padding_mode="reflect", groups=4), 7, ()),
    "not padded": (nn.Conv2d(4, 4, 3, groups=4), 7, ()),
    "1-D": (nn.Conv1d(4, 4, 5, padding=2, groups=2), 9, ()),
    "partly dense": (nn.Conv3d(2, 3, 3, padding=1), (3, 5, 5), (0,)),
}


def layer_of(name, interpolation="bilinear", count=4):
    """A layer with elements inside the old kernel, its box, and inputs for it."""
    conv, size, dense = CASES[name]
    torch.manual_seed(0)
    dims = len(conv.kernel_size)
    layer = DCLS_LAYERS[dims].like(conv, count, size, interpolation, dense)
    box = box_of(conv.kernel_size, conv.dilation, layer.dilated_kernel_size, interpolation, dense)
    with torch.no_grad():
        layer.weight.normal_()
        for axis, (first, side) in enumerate(zip(box.origin, box.sides, strict=True)):
            layer.positions[axis].uniform_(first, first + side - 1)
    images = torch.randn(5, conv.in_channels, *(9, 11, 12)[-dims:]) + 1
    return conv, layer.double(), box, images.double()


def moments_of(layer, box, images, wanted=None):
    joint = Moments(layer, box, joint=True)
    for part in (slice(0, 2), slice(2, 5)):
        joint.add(images[part], None if wanted is None else wanted[part])
    return joint


def per_channel(outputs):
    return outputs.detach().movedim(1, 0).flatten(1)


def boxed(layer, box):
    """The constructed kernel in its box, (G, Q, R * S)."""
    kernel = layer.kernel().detach()
    for axis, first, side in zip(box.axes, box.origin, box.sides, strict=True):
        kernel = kernel.narrow(2 + axis, first + layer.kernel_size[axis] // 2, side)
    order = [2 + axis for axis in (*layer.dense_axes, *box.axes)]
    return kernel.permute(0, 1, *order).reshape(layer.groups, layer.out_channels // layer.groups, -1)


def without_bias(layer, images):
    """(O, P)"""
    outputs = per_channel(layer(images))
    return outputs if layer.bias is None else outputs - layer.bias.detach().unsqueeze(1)


@pytest.mark.parametrize("interpolation", ["bilinear", "gaussian"])
@pytest.mark.parametrize("name", CASES)
def test_means_and_covariances_give_those_of_the_layers_outputs(name, interpolation):
    _, layer, box, images = layer_of(name, interpolation)
    joint = moments_of(layer, box, images)
    kernel = boxed(layer, box)
    mean = (kernel @ (joint.sums[0] / joint.places).unsqueeze(2)).flatten()
    variance = (kernel @ joint.covariance() * kernel).sum(-1).flatten()
    outputs = without_bias(layer, images)
    if interpolation == "bilinear":  # a Gaussian reaches beyond its box
        torch.testing.assert_close(mean, outputs.mean(1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(variance, outputs.var(1, correction=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_best_weights_are_those_of_least_squares(name, monkeypatch):
    """With a penalty for the distance of the kernel from the old one."""
    for setting, value in (("RIDGE", 1e-10), ("MOST_STEPS", 1000), ("LEAST_RESIDUAL", 1e-12)):
        monkeypatch.setattr(moments, setting, value)
    conv, layer, box, images = layer_of(name)
    old = box.lines_of(conv.weight.detach().double())
    wanted = torch.randn(per_channel(layer(images)).shape, dtype=torch.double)
    shape = layer(images).movedim(1, 0).shape
    joint = moments_of(layer, box, images, wanted.reshape(shape).movedim(0, 1))
    places = (layer.positions.flatten(1, -2).movedim(0, -1) - torch.tensor(box.origin)).detach()
    start = layer.weight.detach().flatten(0, -2)
    found = best_weights(joint, places, old, start)
    footprint = spread([box.profile(places[..., axis], side)[0] for axis, side in enumerate(box.sides)])
    penalty = joint.penalty(joint.covariance())
    patches, lines = patches_of(layer, box, images), len(start) // layer.out_channels
    for channel in range(layer.out_channels):
        own = slice(channel * lines, (channel + 1) * lines)
        group = channel // (layer.out_channels // layer.groups)
        into = torch.block_diag(*footprint[own])  # (R * E, R * S)
        matrix = joint.covariance()[group] + torch.diag(penalty[group])
        seen = wanted[channel] - wanted[channel].mean()
        goal = (patches[group] - patches[group].mean(1, keepdim=True)) @ seen / len(seen) + penalty[group] * old[
            own
        ].flatten()
        exact = torch.linalg.solve(into @ matrix @ into.T + 1e-13 * torch.eye(len(into)), into @ goal)
        weights = found.weights[own].flatten()
        scale = (weights @ exact) / (exact @ exact)  # to the wanted variance
        kernel, best = (vector @ into for vector in (weights / scale, exact))
        torch.testing.assert_close(kernel, best, rtol=0, atol=1e-3 * float(best.norm()))


def patches_of(layer, box, images):
    """(G, R * S, P)"""
    seen = Moments(layer, box, joint=True)
    parts = [
        torch.cat([part.patches.reshape(part.shape) for part in seen._groups(image, None)])
        for image in layer.padded(images)
    ]
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_means_bring_each_channel_to_the_wanted_mean_and_variance(name):
    conv, layer, box, images = layer_of(name, count=12)
    wanted = conv.double()(images).detach()
    places = (layer.positions.flatten(1, -2).movedim(0, -1) - torch.tensor(box.origin)).detach()
    joint = moments_of(layer, box, images, wanted)
    found = best_weights(joint, places, box.lines_of(conv.weight.detach()), layer.weight.detach().flatten(0, -2))
    with torch.no_grad():
        layer.weight.copy_(found.weights.reshape(layer.weight.shape))
    outputs = without_bias(layer, images) + found.means.unsqueeze(1)
    torch.testing.assert_close(outputs.mean(1), per_channel(wanted).mean(1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(outputs.var(1), per_channel(wanted).var(1), rtol=1e-6, atol=0)
    error = float(
        (outputs - per_channel(wanted)).norm()
        / (wanted - wanted.mean((0, *range(2, wanted.dim())), keepdim=True)).norm()
    )
    assert abs(found.error - error) < 1e-6


@pytest.mark.parametrize("conv", [{"groups": 8}, {"groups": 2}, {}])
def test_the_root_measures_what_an_error_does_to_the_output(conv):
    """For one input channel at a time."""
    torch.manual_seed(0)
    old = nn.Conv2d(8, 8, 5, padding=2, bias=False, **conv)
    layer = DCLS_LAYERS[2].like(old, 4, 9, "bilinear", ())
    images = nn.functional.avg_pool2d(torch.randn(6, 8, 44, 44), 5, stride=1)
    alone = Moments(layer, box_of((5, 5), (1, 1), (9, 9), "bilinear"), joint=False)
    alone.add(images)
    energy = alone.by_channel().diagonal(dim1=1, dim2=2).mean().sqrt()
    roots = shared_roots([alone]) * energy
    assert roots.shape == (8, 25, 25)
    for channel in range(8):
        error = torch.randn(1, 1, 5, 5)
        error -= error.mean()  # what changes the mean alone is not counted
        leaving = nn.functional.conv2d(images[:, channel : channel + 1], error, padding=2)
        found = (error.flatten() @ roots[channel]).square().sum()
        assert abs(float(found / leaving.var()) - 1) < 0.05


def test_in_the_root_that_layers_share_each_counts_alike():
    torch.manual_seed(0)
    layer = DCLS_LAYERS[2].like(nn.Conv2d(4, 4, 3, groups=4, padding=1), 4, 7, "bilinear", ())
    rough, smooth = torch.randn(2, 4, 20, 20), nn.functional.avg_pool2d(torch.randn(2, 4, 20, 20), 3, stride=1)

    def seeing(*batches):
        moments = Moments(layer, box_of((3, 3), (1, 1), (7, 7), "bilinear"), joint=False)
        for images in batches:
            moments.add(images)
        return moments

    cases = [[seeing(rough)], [seeing(smooth)], [seeing(rough), seeing(), seeing(9 * smooth)]]
    one, other, both = (roots @ roots.mT for roots in map(shared_roots, cases))
    torch.testing.assert_close(both, (one + other) / 2, rtol=1e-4, atol=1e-5)
    assert shared_roots([seeing()]) is None
