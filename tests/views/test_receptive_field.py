"""Effective receptive fields of networks with known fields."""

import pytest
import torch
from torch import nn

from dcls_convert.errors import ModelError
from dcls_convert.views.receptive_field import (
    MAX_MAP_SIDE,
    central_side,
    receptive_field,
    receptive_field_map,
)


def noise(*size, count=2):
    return list(torch.randn(count, *size, generator=torch.Generator().manual_seed(0)))


def conv_of_ones(kernel_size, dims=2, **options):
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](
        1, 1, kernel_size, padding="same", bias=False, **options
    )
    with torch.no_grad():
        conv.weight.fill_(-0.5)
    return nn.Sequential(conv).eval()


def test_the_field_of_one_convolution_is_its_kernel():
    field = receptive_field(conv_of_ones((5, 3), dilation=(2, 1)), "0", noise(1, 21, 15))
    expected = torch.zeros(21, 15, dtype=torch.float64)
    expected[6:15:2, 6:9] = 0.5
    assert torch.equal(field, expected)


@pytest.mark.parametrize("dims", [1, 3])
def test_fields_of_one_and_three_dimensions_become_pictures(dims):
    field = receptive_field(conv_of_ones(3, dims), "0", noise(1, *[9] * dims))
    assert field.shape == ((1, 9) if dims == 1 else (9, 9))
    assert float(field.sum()) == pytest.approx(0.5 * 3**dims)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(conv_of_ones(3), nn.BatchNorm2d(1)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    receptive_field(model, "0.0", noise(1, 9, 9))
    assert model.training
    assert not model[0][0]._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("side", "square"), [(9, 1), (9, 5), (10, 2), (10, 6)])
def test_the_central_square_has_the_smallest_sufficient_side(side, square):
    field = torch.zeros(side, side, dtype=torch.float64)
    first = (side - square) // 2
    field[first : first + square, first : first + square] = 1.0
    assert central_side(field, 1.0) == square
    assert central_side(torch.ones(side, side, dtype=torch.float64), 1.0) == side


@pytest.mark.parametrize(
    ("channels", "weight", "message"),
    [
        (3, 0.5, "cannot calculate"),
        (1, float("nan"), "is not finite"),
        (1, float("inf"), "is not finite"),
    ],
)
def test_a_model_without_a_field_is_refused(channels, weight, message):
    model = nn.Sequential(nn.Conv2d(channels, 1, 1))
    nn.init.constant_(model[0].weight, weight)
    with pytest.raises(ModelError, match=message):
        receptive_field(model, "0", noise(1, 5, 5))


def test_a_picture_is_scaled_to_its_largest_pixel_and_bounded():
    field = torch.rand(700, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    picture = receptive_field_map(field, "After", "what")
    assert picture.size == (700, 300)
    assert picture.logs.shape == (MAX_MAP_SIDE, MAX_MAP_SIDE)
    assert picture.logs.max() == 0.0
