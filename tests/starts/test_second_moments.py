"""Second moments of a layer's inputs and outputs, and the weights that are solved from them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dcls_convert.layers.dcls_conv import DCLS_LAYERS
from dcls_convert.starts.boxes import Box
from dcls_convert.starts.calibration_settings import CalibrationSettings
from dcls_convert.starts.sampling import PatchSampler
from dcls_convert.starts.second_moments import SecondMoments, shared_covariance_roots
from dcls_convert.starts.solve_layer import solve_layer

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


def make_case(name, count=4):
    """Return a conv, a layer with elements inside its kernel, the layer's box, and inputs."""
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


def moments_of(layer, box, images, targets, settings=EXACT):
    moments = SecondMoments(layer, box, joint=True, settings=settings)
    for batch in (slice(0, 2), slice(2, 5)):
        moments.add(images[batch], targets[batch])
    return moments


def per_channel(outputs):
    return outputs.detach().movedim(1, 0).flatten(1)


def all_patches(layer, box, images):
    """Return the patches at all places: (G, R * S, P)."""
    sampler = PatchSampler(layer, box, joint=True, settings=EXACT)
    parts = sampler.sample(layer.pad_input(images), None, first_image=0)
    return torch.cat([sampler.rows(part) for part in parts])


@pytest.mark.parametrize("name", CASES)
def test_the_best_weights_are_those_of_regularised_least_squares(name):
    """Compare with the normal equations of each output channel, set up from patches."""
    conv, layer, box, images = make_case(name)
    targets = torch.randn_like(layer(images))
    moments = moments_of(layer, box, images, targets)
    patches = all_patches(layer, box, images)
    old_kernel = box.lines_of(conv.weight.detach().double())
    box_positions = box.to_box(layer.positions.detach())
    start = layer.weight.detach().flatten(0, -2)
    weights = solve_layer(moments, box_positions, old_kernel, start).weights
    footprint = box.footprint(box_positions)
    cells = math.prod(box.sides)
    centred = patches - patches.mean(2, keepdim=True)
    line_variances = centred.square().mean(2).unflatten(1, (-1, cells)).mean(2)  # (G, R)
    variance = line_variances.repeat_interleave(cells, 1)  # (G, R * S)
    priors = EXACT.kernel_prior * torch.diag_embed(variance)
    if patches.shape[1] == cells:  # one line for each output channel
        mean = patches.mean(2)
        scales = variance.unsqueeze(2).sqrt() * variance.unsqueeze(1).sqrt()
        samples_per_image = patches.shape[2] / len(images)
        mean_weight = EXACT.mean_patch_weight * samples_per_image
        priors += mean_weight * mean.unsqueeze(2) * mean.unsqueeze(1)
        correlation = (centred @ centred.mT / patches.shape[2] / scales).mean(0)
        priors += EXACT.shared_correlation * correlation * scales
    lines = len(weights) // layer.out_channels
    # F, M and x are those of `solve_layer.py`; x is centred.
    for channel, target in enumerate(per_channel(targets)):
        own_lines = slice(channel * lines, (channel + 1) * lines)
        group = channel // (layer.out_channels // layer.groups)
        F = torch.block_diag(*footprint[own_lines])  # (R * E, R * S)
        x = centred[group]
        prior = priors[group]
        linear_term = x @ (target - target.mean()) / len(target)
        linear_term = linear_term + prior @ old_kernel[own_lines].flatten()
        M = x @ x.T / len(target) + prior
        exact_weights = torch.linalg.solve(F @ M @ F.T + 1e-13 * torch.eye(len(F)), F @ linear_term)
        exact_kernel = exact_weights @ F
        kernel = weights[own_lines].flatten() @ F
        atol = 1e-3 * float(exact_kernel.norm())
        torch.testing.assert_close(kernel, exact_kernel, rtol=0, atol=atol)


def test_the_mean_response_counts_once_for_each_place_of_an_image():
    """Given as images of one place each, the same patches count the mean response only once."""
    conv, layer, box, images = make_case("not padded")
    by_place = images.unfold(2, 3, 1).unfold(3, 3, 1).movedim(1, 3)  # (N, rows, columns, 4, 3, 3)
    patches = by_place.flatten(0, 2)
    samples_per_image = len(patches) / len(images)
    box_positions = box.to_box(layer.positions.detach())
    old_kernel = box.lines_of(conv.weight.detach().double())
    start = layer.weight.detach().flatten(0, -2)

    def weights(images, mean_patch_weight):
        settings = replace(EXACT, mean_patch_weight=mean_patch_weight)
        moments = SecondMoments(layer, box, joint=True, settings=settings)
        moments.add(images, conv.double()(images).detach())
        return solve_layer(moments, box_positions, old_kernel, start).weights

    torch.testing.assert_close(weights(images, 0.5), weights(patches, 0.5 * samples_per_image))
    assert float((weights(images, 0.5) - weights(patches, 0.5)).norm()) > 1e-2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fixed_weights", [False, True])
def test_the_output_error_is_that_of_the_layer_with_the_bias(name, fixed_weights):
    conv, layer, box, images = make_case(name)
    targets = layer(images).detach() + 0.3 * torch.randn_like(layer(images))
    moments = moments_of(layer, box, images, targets)
    box_positions = box.to_box(layer.positions.detach())
    old_kernel = box.lines_of(conv.weight.detach().double())
    start = layer.weight.detach().flatten(0, -2)
    solution = solve_layer(moments, box_positions, old_kernel, start, fixed_weights=fixed_weights)
    with torch.no_grad():
        layer.weight.copy_(solution.weights.reshape(layer.weight.shape))
        bias = solution.bias.reshape(-1, *[1] * layer.dims)
        if layer.bias is not None:
            layer.bias.zero_()
        error = (layer(images) + bias - targets).norm() / targets.norm()
    assert solution.output_error == pytest.approx(float(error), rel=1e-6)


def test_covariances_are_symmetric_and_not_negative_where_inputs_hardly_vary():
    """Sums of squares minus the squared mean would leave rounding errors of either sign."""
    _, layer, box, _ = make_case("not padded")
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


def test_the_pull_to_the_old_kernel_falls_with_the_square_of_the_number_of_samples():
    """With twice as many samples, it is a quarter."""
    _, layer, box, images = make_case("depthwise")
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


def test_a_strong_pull_to_the_old_kernel_gives_the_closest_constructed_kernel():
    torch.manual_seed(0)
    conv, layer, box, images = make_case("depthwise")
    targets = torch.randn_like(layer(images))  # unrelated to the images
    box_positions = box.to_box(layer.positions.detach())
    old_kernel = box.lines_of(conv.weight.detach().double())
    start = layer.weight.detach().flatten(0, -2)
    footprint = box.footprint(box_positions)
    closest = torch.linalg.lstsq(footprint.mT, old_kernel.unsqueeze(2)).solution.squeeze(2)
    distances = []
    for samples_of_old_kernel in (1e-2, 1, 1e2, 1e8):
        settings = replace(EXACT, samples_of_old_kernel=samples_of_old_kernel)
        moments = moments_of(layer, box, images, targets, settings)
        weights = solve_layer(moments, box_positions, old_kernel, start).weights
        distances.append(float((weights - closest).norm() / closest.norm()))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-3


def test_each_image_is_sampled_at_different_places():
    """So a few images show more of what a layer sees than a single grid of places would."""
    conv = nn.Conv2d(1, 1, 1)
    layer = DCLS_LAYERS[2].from_conv_without_values(conv, 1, 1, "bilinear", ())
    box = Box((1, 1), (1, 1), (1, 1), "bilinear")
    settings = CalibrationSettings(samples_per_image=16)
    numbers = torch.arange(32.0 * 32.0).reshape(1, 1, 32, 32).repeat(8, 1, 1, 1)
    sampler = PatchSampler(layer, box, joint=True, settings=settings)
    (part,) = sampler.sample(numbers, None, first_image=0)
    places = [set(image.flatten().tolist()) for image in part.patches]
    assert {len(places_of_image) for places_of_image in places} == {16}
    assert len(set.union(*places)) == 8 * 16
    later = sampler.sample(numbers[:1], None, first_image=5)[0].patches[0]
    assert torch.equal(later, part.patches[5])


def test_each_image_of_a_narrow_map_has_samples():
    conv = nn.Conv2d(1, 1, 1)
    layer = DCLS_LAYERS[2].from_conv_without_values(conv, 1, 1, "bilinear", ())
    box = Box((1, 1), (1, 1), (1, 1), "bilinear")
    sampler = PatchSampler(layer, box, joint=True, settings=CalibrationSettings())
    (part,) = sampler.sample(torch.zeros(8, 1, 1, 2048), None, first_image=0)
    assert min(part.samples_of_images) > 0


@pytest.mark.parametrize("groups", [8, 2, 1])
def test_the_root_measures_the_effect_of_an_error_on_the_output(groups):
    """Each input channel has an error in turn."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, 5, padding=2, bias=False, groups=groups)
    layer = DCLS_LAYERS[2].from_conv_without_values(conv, 4, 9, "bilinear", ())
    images = nn.functional.avg_pool2d(torch.randn(6, 8, 44, 44), 5, stride=1)
    box = Box((5, 5), (1, 1), (9, 9), "bilinear")
    moments = SecondMoments(layer, box, joint=False, settings=EVERY_PLACE)
    moments.add(images)
    roots = shared_covariance_roots([moments])
    assert roots.shape == (8, 25, 25)
    ratios = []
    for channel in range(8):
        error = torch.randn(1, 1, 5, 5)
        error -= error.mean()  # the root does not count a change of the mean
        output = nn.functional.conv2d(images[:, channel : channel + 1], error, padding=2)
        cost = (error.flatten() @ roots[channel]).square().sum()
        ratios.append(float(cost / output.var()))
    # The ratio itself is arbitrary, since roots are scaled to a mean variance of 1.
    assert max(ratios) / min(ratios) < 1.1


def test_every_layer_has_the_same_weight_in_shared_roots():
    torch.manual_seed(0)
    layer = DCLS_LAYERS[2].from_conv_without_values(
        nn.Conv2d(4, 4, 3, groups=4, padding=1), 4, 7, "bilinear", ()
    )
    rough = torch.randn(2, 4, 20, 20)
    smooth = nn.functional.avg_pool2d(torch.randn(2, 4, 20, 20), 3, stride=1)

    def moments_of_batches(*batches):
        box = Box((3, 3), (1, 1), (7, 7), "bilinear")
        moments = SecondMoments(layer, box, joint=False, settings=EVERY_PLACE)
        for images in batches:
            moments.add(images)
        return moments

    def covariance(*layers):
        roots = shared_covariance_roots(layers)
        return roots @ roots.mT

    without_images = moments_of_batches()
    of_rough = moments_of_batches(rough)
    of_smooth = moments_of_batches(smooth)
    of_larger_smooth = moments_of_batches(9 * smooth)
    expected = (covariance(of_rough) + covariance(of_smooth)) / 2
    shared = covariance(of_rough, without_images, of_larger_smooth)
    torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-5)
    assert shared_covariance_roots([without_images]) is None
