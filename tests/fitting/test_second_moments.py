"""What a layer's inputs and outputs have in common over many places, and the weights that follow
from it.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dcls_convert.fitting.boxes import Box
from dcls_convert.fitting.calibration_settings import CalibrationSettings
from dcls_convert.fitting.sampling import PatchSampler
from dcls_convert.fitting.second_moments import SecondMoments, shared_covariance_roots
from dcls_convert.fitting.solve_layer import solve_layer
from dcls_convert.layers.dcls_conv import DCLS_LAYERS

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
    "1-D": (nn.Conv1d(4, 4, 5, padding=2, groups=2), 9, ()),
    "partly dense": (nn.Conv3d(2, 3, 3, padding=1), (3, 5, 5), (0,)),
}


EVERY_PLACE = CalibrationSettings(samples_per_image=10**6)
EXACT = CalibrationSettings(
    samples_per_image=10**6,
    ridge=1e-10,
    max_steps=1000,
    min_residual=1e-12,
    samples_of_old_kernel=0,
)


def layer_of(name, count=4):
    """A layer with elements inside the old kernel, its box, and inputs for it."""
    conv, size, dense = CASES[name]
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


def moments_of(layer, box, images, wanted, settings=EXACT):
    joint = SecondMoments(layer, box, joint=True, settings=settings)
    for part in (slice(0, 2), slice(2, 5)):
        joint.add(images[part], wanted[part])
    return joint


def per_channel(outputs):
    return outputs.detach().movedim(1, 0).flatten(1)


def all_patches(layer, box, images):
    """(G, R * S, P)."""
    sampler = PatchSampler(layer, box, joint=True, settings=EXACT)
    parts = sampler.sample(layer.pad_input(images), None, first_image=0)
    return torch.cat([sampler.rows(part) for part in parts])


@pytest.mark.parametrize("name", CASES)
def test_the_best_weights_are_those_of_least_squares(name):
    """Of images, and of what keeps the kernel close to the old one where they say little."""
    conv, layer, box, images = layer_of(name)
    wanted = torch.randn_like(layer(images))
    joint = moments_of(layer, box, images, wanted)
    patches = all_patches(layer, box, images)
    old = box.lines_of(conv.weight.detach().double())
    box_positions = box.to_box(layer.positions.detach())
    solution = solve_layer(joint, box_positions, old, layer.weight.detach().flatten(0, -2))
    weights = solution.weights
    footprint = box.footprint(box_positions)
    cells = math.prod(box.sides)
    centred = patches - patches.mean(2, keepdim=True)
    energy_of_lines = centred.square().mean(2).unflatten(1, (-1, cells)).mean(2)  # (G, R)
    energy = energy_of_lines.repeat_interleave(cells, 1)  # (G, R * S)
    priors = EXACT.kernel_prior * torch.diag_embed(energy)
    if patches.shape[1] == cells:  # one line for each output channel
        mean = patches.mean(2)
        scales = energy.unsqueeze(2).sqrt() * energy.unsqueeze(1).sqrt()
        samples_per_image = patches.shape[2] / len(images)
        mean_weight = EXACT.mean_patch_weight * samples_per_image
        priors += mean_weight * mean.unsqueeze(2) * mean.unsqueeze(1)
        correlation = (centred @ centred.mT / patches.shape[2] / scales).mean(0)
        priors += EXACT.shared_correlation * correlation * scales
    lines = len(weights) // layer.out_channels
    for channel, target in enumerate(per_channel(wanted)):
        own = slice(channel * lines, (channel + 1) * lines)
        group = channel // (layer.out_channels // layer.groups)
        into = torch.block_diag(*footprint[own])  # (R * E, R * S)
        seen = centred[group]
        prior = priors[group]
        goal = seen @ (target - target.mean()) / len(target) + prior @ old[own].flatten()
        matrix = seen @ seen.T / len(target) + prior
        exact = torch.linalg.solve(
            into @ matrix @ into.T + 1e-13 * torch.eye(len(into)), into @ goal
        )
        kernels = exact @ into
        torch.testing.assert_close(
            weights[own].flatten() @ into, kernels, rtol=0, atol=1e-3 * float(kernels.norm())
        )


def test_the_mean_response_counts_once_for_each_place_of_an_image():
    """The same patches, shown as images of one place each, count it once."""
    conv, layer, box, images = layer_of("not padded")
    by_place = images.unfold(2, 3, 1).unfold(3, 3, 1).movedim(1, 3)  # (N, rows, columns, 4, 3, 3)
    patches = by_place.flatten(0, 2)
    samples_per_image = len(patches) / len(images)
    box_positions = box.to_box(layer.positions.detach())
    old = box.lines_of(conv.weight.detach().double())
    start = layer.weight.detach().flatten(0, -2)

    def weights(images, mean_patch):
        settings = replace(EXACT, mean_patch_weight=mean_patch)
        moments = SecondMoments(layer, box, joint=True, settings=settings)
        moments.add(images, conv.double()(images).detach())
        return solve_layer(moments, box_positions, old, start).weights

    torch.testing.assert_close(weights(images, 0.5), weights(patches, 0.5 * samples_per_image))
    assert float((weights(images, 0.5) - weights(patches, 0.5)).norm()) > 1e-2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fixed", [False, True])
def test_the_output_error_is_that_of_the_layer_with_the_bias(name, fixed):
    conv, layer, box, images = layer_of(name)
    wanted = layer(images).detach() + 0.3 * torch.randn_like(layer(images))
    joint = moments_of(layer, box, images, wanted)
    box_positions = box.to_box(layer.positions.detach())
    old = box.lines_of(conv.weight.detach().double())
    solution = solve_layer(
        joint, box_positions, old, layer.weight.detach().flatten(0, -2), fixed_weights=fixed
    )
    with torch.no_grad():
        layer.weight.copy_(solution.weights.reshape(layer.weight.shape))
        bias = solution.bias.reshape(-1, *[1] * layer.dims)
        if layer.bias is not None:
            layer.bias.zero_()
        error = (layer(images) + bias - wanted).norm() / wanted.norm()
    assert solution.output_error == pytest.approx(float(error), rel=1e-6)


def test_covariances_are_symmetric_and_not_negative_where_inputs_hardly_vary():
    """Sums of squares less the square of the mean would leave rounding errors of either sign."""
    _, layer, box, _ = layer_of("not padded")
    layer.float()
    torch.manual_seed(0)
    moments = SecondMoments(layer, box, joint=True, settings=EVERY_PLACE)
    for _ in range(3):
        images = 1000 + 1e-3 * torch.rand(2, 4, 7, 7)
        moments.add(images, layer(images))
    covariance = moments.covariances().covariance
    assert torch.equal(covariance, covariance.mT)
    assert float(torch.linalg.eigvalsh(covariance).min()) > -1e-12
    assert 0 < float(covariance.diagonal(dim1=1, dim2=2).max()) < 1e-6


def test_samples_of_the_old_kernel_count_beside_those_of_the_images():
    """Seen twice as often, images have a quarter of the pull to the old kernel against them."""
    _, layer, box, images = layer_of("depthwise")
    pulls = []
    for times in (1, 2):
        moments = SecondMoments(layer, box, joint=True, settings=EVERY_PLACE)
        for _ in range(times):
            moments.add(images, layer(images))
        covariances = moments.covariances()
        pulls.append(
            covariances.prior_precision - EVERY_PLACE.kernel_prior * covariances.input_variance
        )
    torch.testing.assert_close(pulls[1], pulls[0] / 4)


def test_with_a_strong_pull_the_constructed_kernel_is_the_closest_to_the_old_one():
    torch.manual_seed(0)
    conv, layer, box, images = layer_of("depthwise")
    wanted = torch.randn_like(layer(images))  # nothing to learn from
    box_positions = box.to_box(layer.positions.detach())
    old = box.lines_of(conv.weight.detach().double())
    footprint = box.footprint(box_positions)
    closest = torch.linalg.lstsq(footprint.mT, old.unsqueeze(2)).solution.squeeze(2)
    distances = []
    for samples_of_old_kernel in (1e-2, 1, 1e2, 1e8):
        settings = replace(EXACT, samples_of_old_kernel=samples_of_old_kernel)
        joint = moments_of(layer, box, images, wanted, settings)
        solution = solve_layer(joint, box_positions, old, layer.weight.detach().flatten(0, -2))
        distances.append(float((solution.weights - closest).norm() / closest.norm()))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-3


def test_each_image_is_sampled_at_other_places():
    """So that a few images show more of what a layer sees than one grid does."""
    conv = nn.Conv2d(1, 1, 1)
    layer = DCLS_LAYERS[2].from_conv_without_values(conv, 1, 1, "bilinear", ())
    box = Box((1, 1), (1, 1), (1, 1), "bilinear")
    settings = CalibrationSettings(samples_per_image=16)
    numbers = torch.arange(32.0 * 32.0).reshape(1, 1, 32, 32).repeat(8, 1, 1, 1)
    sampler = PatchSampler(layer, box, joint=True, settings=settings)
    (part,) = sampler.sample(numbers, None, first_image=0)
    seen = [set(image.flatten().tolist()) for image in part.patches]
    assert {len(samples) for samples in seen} == {16}
    assert len(set.union(*seen)) == 8 * 16
    later = sampler.sample(numbers[:1], None, first_image=5)[0].patches[0]
    assert torch.equal(later, part.patches[5])


def test_each_image_of_a_narrow_map_has_samples():
    conv = nn.Conv2d(1, 1, 1)
    layer = DCLS_LAYERS[2].from_conv_without_values(conv, 1, 1, "bilinear", ())
    box = Box((1, 1), (1, 1), (1, 1), "bilinear")
    sampler = PatchSampler(layer, box, joint=True, settings=CalibrationSettings())
    (part,) = sampler.sample(torch.zeros(8, 1, 1, 2048), None, first_image=0)
    assert min(part.samples_of_images) > 0


@pytest.mark.parametrize("conv", [{"groups": 8}, {"groups": 2}, {}])
def test_the_root_measures_what_an_error_does_to_the_output(conv):
    """For one input channel at a time."""
    torch.manual_seed(0)
    old = nn.Conv2d(8, 8, 5, padding=2, bias=False, **conv)
    layer = DCLS_LAYERS[2].from_conv_without_values(old, 4, 9, "bilinear", ())
    images = nn.functional.avg_pool2d(torch.randn(6, 8, 44, 44), 5, stride=1)
    box = Box((5, 5), (1, 1), (9, 9), "bilinear")
    alone = SecondMoments(layer, box, joint=False, settings=EVERY_PLACE)
    alone.add(images)
    roots = shared_covariance_roots([alone])
    assert roots.shape == (8, 25, 25)
    ratios = []
    for channel in range(8):
        error = torch.randn(1, 1, 5, 5)
        error -= error.mean()  # what changes the mean alone is not counted
        leaving = nn.functional.conv2d(images[:, channel : channel + 1], error, padding=2)
        ratios.append(float((error.flatten() @ roots[channel]).square().sum() / leaving.var()))
    assert max(ratios) / min(ratios) < 1.1  # up to the energy of all inputs, which roots leave out


def test_in_the_root_that_layers_share_each_counts_alike():
    torch.manual_seed(0)
    layer = DCLS_LAYERS[2].from_conv_without_values(
        nn.Conv2d(4, 4, 3, groups=4, padding=1), 4, 7, "bilinear", ()
    )
    rough = torch.randn(2, 4, 20, 20)
    smooth = nn.functional.avg_pool2d(torch.randn(2, 4, 20, 20), 3, stride=1)

    def seeing(*batches):
        box = Box((3, 3), (1, 1), (7, 7), "bilinear")
        moments = SecondMoments(layer, box, joint=False, settings=EVERY_PLACE)
        for images in batches:
            moments.add(images)
        return moments

    cases = [[seeing(rough)], [seeing(smooth)], [seeing(rough), seeing(), seeing(9 * smooth)]]
    one, other, both = (roots @ roots.mT for roots in map(shared_covariance_roots, cases))
    torch.testing.assert_close(both, (one + other) / 2, rtol=1e-4, atol=1e-5)
    assert shared_covariance_roots([seeing()]) is None
