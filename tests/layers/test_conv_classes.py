"""Convolution classes with a forward of their own: timm's, and those registered by users."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import nn

from dcls_convert import DclsConv2d, convert_, fold_to_dense_, register_conv
from dcls_convert.geometry import DYNAMIC_SAME
from dcls_convert.layers import conv_classes
from dcls_convert.layers.conv_classes import find_traits, settings_of, why_not_replaceable

from ..rules import rules_of
from .common import close, randn

RULES = rules_of({"match": {"kernel_size": [3, 3]}})
SIZES = [(12, 17), (11, 16), (9, 9)]  # both parities: dynamic SAME padding depends on them
SHAPES = [
    {"kernel_size": (5, 3), "stride": (2, 1)},
    {"kernel_size": (3, 4), "dilation": 2},
    {"kernel_size": 3, "stride": 3, "groups": 2},
]
CLASSES = [Conv2dSame, StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame]


def built(conv_class, shape, seed=0):
    torch.manual_seed(seed)
    conv = conv_class(6, 4, **shape).double()
    if hasattr(conv, "gain"):
        nn.init.normal_(conv.gain)
    if conv.bias is not None:
        nn.init.normal_(conv.bias)
    return conv


def converted_and_folded(conv, sizes):
    """Convert `conv` with all its cells as elements, fold the layer, and compare both with `conv`.

    Returns the layer and the folded convolution.
    """
    window = [
        (size - 1) * spacing + 5
        for size, spacing in zip(conv.kernel_size, conv.dilation, strict=True)
    ]
    layer = DclsConv2d.from_conv(
        conv, kernel_count=math.prod(conv.kernel_size), dilated_kernel_size=window
    )
    folded = layer.fuse()
    for size in sizes:
        image = randn(2, 6, *size)
        for new in (layer, folded, pickle.loads(pickle.dumps(layer))):
            close(new(image), conv(image))
    return layer, folded


@pytest.mark.parametrize("conv_class", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_dense_grid_of_elements_gives_the_outputs_and_gradients_of_the_old_layer(
    conv_class, shape
):
    conv = built(conv_class, shape)
    replaced = copy.deepcopy(conv)
    image = randn(2, 6, 9, 9)
    layer, folded = converted_and_folded(replaced, SIZES)
    assert find_traits(folded).transform_weight is None
    assert isinstance(folded, Conv2dSame) is (layer.padding == DYNAMIC_SAME)
    assert set(folded.state_dict()) <= {"weight", "bias"}
    conv(image).square().sum().backward()
    layer(image).square().sum().backward()
    torch.testing.assert_close(
        layer.weight.grad.flatten(2), conv.weight.grad.flatten(2), rtol=1e-9, atol=1e-9
    )
    for name in {"bias", "gain"} & set(dict(conv.named_parameters())):
        assert getattr(layer, name) is getattr(replaced, name)
        torch.testing.assert_close(
            getattr(layer, name).grad, getattr(conv, name).grad, rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("count", [1, 4, 9, 16])
def test_the_scale_follows_the_number_of_elements(count):
    """Scaled weight standardisation keeps the energy of a filter, gain^2 times gamma^2, for any
    fan-in.
    """
    conv = built(ScaledStdConv2d, {"kernel_size": 3})
    layer = DclsConv2d.from_conv(conv, kernel_count=count, dilated_kernel_size=7)
    nn.init.normal_(layer.weight)
    energy = layer.traits.effective_weight(layer, layer.weight).square().sum(dim=(1, 2))
    torch.testing.assert_close(energy, conv.gain.flatten().square(), rtol=1e-4, atol=0)


def test_the_elements_are_the_largest_weights_as_they_are_convolved():
    """After standardisation, a weight equal to the filter's mean is 0, however large it is."""
    conv = StdConv2d(1, 1, 3, padding=1)
    conv.weight.data = torch.tensor([5.0] * 7 + [4.0, 6.0]).reshape(1, 1, 3, 3)
    layer = DclsConv2d.from_conv(conv, kernel_count=2, dilated_kernel_size=3)
    assert layer.weight.flatten().tolist() == [4, 6]


def test_same_padding_with_a_stride_above_the_kernel_is_refused():
    """There, the old layer drops cells at the border that a larger window would see."""
    with pytest.raises(ValueError, match="at least the stride 2, not 1"):
        DclsConv2d.from_conv(Conv2dSame(6, 4, 1, stride=2), kernel_count=1, dilated_kernel_size=5)


# A class that the user registers.


class Centred(nn.Conv2d):
    """Removes the mean of every filter, and has a temperature."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, input):
        return self._conv_forward(input, centred(self, self.weight), self.bias)


def centred(conv, weight):
    return (
        weight - weight.mean(dim=tuple(range(1, weight.dim())), keepdim=True)
    ) / conv.temperature


@pytest.fixture
def registered(monkeypatch):
    """Register the class of this file for a test."""
    monkeypatch.setattr(conv_classes, "_KNOWN_CLASSES", dict(conv_classes._KNOWN_CLASSES))
    register_conv(Centred, weight=centred, parameters=["temperature"])


@pytest.mark.parametrize("conv_class", [Centred, type("Inheriting", (Centred,), {})])
def test_a_registered_class_or_one_that_inherits_its_forward_is_converted_without_loss(
    registered, conv_class
):
    model = nn.Sequential(conv_class(3, 4, 3, padding=1)).double()
    image = randn(1, 3, 8, 8)
    expected = model(image)
    temperature = model[0].temperature
    convert_(model, dilated_size=7, kernel_count=9, rules=RULES, input_size=(3, 8, 8))
    assert model[0].temperature is temperature
    close(model(image), expected)
    model(image).sum().backward()
    assert temperature.grad is not None
    fold_to_dense_(model)
    close(model(image), expected)


def doubled(conv, weight):
    return 2 * weight


class Doubled(nn.Conv2d):
    """Has the forward of its base, which calls what is overridden here."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, doubled(self, weight), bias)


def test_a_class_with_the_forward_of_its_base_can_be_registered(registered):
    conv = built(Doubled, {"kernel_size": 3})
    assert "register_conv" in why_not_replaceable(conv)
    register_conv(Doubled, weight=doubled)
    converted_and_folded(conv, SIZES)


CHANGED = {
    "a stride for all axes": {"stride": 2},
    "a dilation for all axes": {"dilation": 2, "padding": 2},
    "lists": {"stride": [1, 2], "dilation": [2, 1], "padding": [2, 1]},
    "one in a tuple": {"stride": (2,), "padding": (1,)},
    "numbers of numpy": {"stride": np.int64(2), "padding": tuple(np.array([1, 1]))},
    "padding that reflect ignores": {"padding": (3, 3), "padding_mode": "reflect"},
    "a mode of a padding by name": {"padding": "same", "padding_mode": "circular"},
}


@pytest.mark.parametrize("change", CHANGED)
def test_settings_that_were_set_after_construction_are_read_as_torch_uses_them(change):
    """An exact layer computes what the convolution does, whatever its attributes say."""
    conv = nn.Conv2d(4, 4, 3, padding=1, groups=4, dtype=torch.float64)
    for name, value in CHANGED[change].items():
        setattr(conv, name, value)
    extents = settings_of(conv).extents
    layer = DclsConv2d.from_conv(
        conv, kernel_count=9, dilated_kernel_size=[side + 4 for side in extents]
    )
    x = torch.randn(2, 4, 17, 18, dtype=torch.float64)
    torch.testing.assert_close(layer(x), conv(x))
    torch.testing.assert_close(layer.fuse()(x), conv(x))


def test_a_convolution_whose_attributes_contradict_its_weight_stays():
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    conv.weight = nn.Parameter(torch.zeros(8, 1, 5, 5))
    assert why_not_replaceable(conv) == ("its weight is 8x1x5x5, but its attributes state 8x1x3x3")


class WithDims(nn.Conv2d):
    """Has an attribute of a name that layers use."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dims = 8
        self.note = "kept"


def test_an_attribute_of_the_users_own_is_kept_unless_it_would_hide_one_of_the_layers():
    conv = WithDims(4, 4, 3, padding=1)
    layer = DclsConv2d.from_conv(conv, kernel_count=9, dilated_kernel_size=5)
    assert (layer.dims, layer.note) == (2, "kept")
    x = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close(layer(x), conv(x))
