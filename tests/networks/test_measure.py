"""A convolution stays where other code uses it; what computes the same may be replaced."""

import random
import re

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from dcls_convert import convert_, find_convs
from dcls_convert.networks.measure import Measured

from ..planning.nets import depthwise

IMAGE = (4, 9, 14)


class User(nn.Module):
    """An ordinary convolution, and another one that is used by a function."""

    def __init__(self, use, conv=None):
        super().__init__()
        self.ordinary = depthwise()
        self.conv = conv or depthwise(3)
        self.use = use

    def forward(self, x):
        return self.use(self.conv, self.ordinary(x))


def deformable(conv, x):
    offset = x.new_zeros(len(x), 18, *x.shape[2:])
    return torchvision.ops.deform_conv2d(x, offset, conv.weight, conv.bias, padding=1)


def at_two_dilations(conv, x):
    return conv(x) + F.conv2d(x, conv.weight, padding=2, dilation=2, groups=4)


def set_dilation(conv, x):
    conv.dilation = (2, 2)
    return conv(x)


def set_weight(conv, x):
    conv.weight = nn.Parameter(0.5 * conv.weight.detach())
    return conv(x)


def scaled_in_place(conv, x):
    conv.weight.data.clamp_(-0.1, 0.1)
    return conv(x)


def padded_by_size(conv, x):
    sides = [(side - 1) // 2 for side in conv.kernel_size for _ in range(2)]
    return conv(F.pad(x, sides))[..., 1:-1, 1:-1]


def by_own_method(conv, x):
    return conv._conv_forward(x, conv.weight * 0.5, conv.bias)


def by_a_hypernetwork(conv, x):
    weight = x.mean().expand(4, 1, 3, 3)
    return torch.func.functional_call(conv, {"weight": weight}, (x,))


def scaled_by_class(conv, x):
    return conv(x) * (2 if isinstance(conv, nn.Conv2d) else 3)


def beside_large_numbers(conv, x):
    y = conv(x)
    return torch.cat([1000 + y, 0.1 * y * len(conv.weight[0, 0])], 1)


CHANGED = (
    "the outputs would change although the DCLS layer computes the same function: "
    "other code uses this convolution's weight or attributes"
)
FAILS = "forward would fail with a DCLS layer in its place ("
NOT_CALLED = "does not call it"
USES = {
    "by a hypernetwork": (by_a_hypernetwork, CHANGED),
    "by an operator": (deformable, NOT_CALLED),
    "at two dilations": (at_two_dilations, FAILS),
    "in place": (scaled_in_place, "other code changes its weight"),
    "weight set": (set_weight, CHANGED),
    "dilation set": (set_dilation, CHANGED),
    "size read": (padded_by_size, CHANGED),
    "shape read": (lambda conv, x: conv(x) * conv.weight.shape[-1], CHANGED),
    "class asked": (scaled_by_class, CHANGED),
    "beside large numbers": (beside_large_numbers, CHANGED),
    "own method": (by_own_method, NOT_CALLED),
    "never called": (lambda conv, x: x, NOT_CALLED),
}


@pytest.mark.parametrize("name", USES)
def test_a_convolution_that_other_code_uses_stays_with_the_reason(name):
    use, reason = USES[name]
    model = User(use).eval()
    image = torch.randn(1, *IMAGE)
    expected = User(use).eval()
    expected.load_state_dict(model.state_dict())
    report = convert_(model, kernel_count="exact", init="exact", dilated_size=7, input_size=IMAGE)
    assert [layer.name for layer in report.layers] == ["ordinary"]
    (skip,) = report.skipped
    assert skip.name == "conv"
    assert reason in skip.reason
    torch.testing.assert_close(model(image), expected(image))


HARMLESS = {
    "dtype": lambda conv, x: conv(x.to(conv.weight.dtype)),
    "first parameter": lambda conv, x: conv(x.to(next(conv.parameters()).device)),
    "channels": lambda conv, x: conv(x) + x.new_zeros(conv.out_channels, 1, 1),
    "stride": lambda conv, x: conv(x) * conv.stride[0],
    "bias": lambda conv, x: conv(x) - conv.bias.view(-1, 1, 1),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_the_same_for_the_new_layer_may_be_read(name):
    model = User(HARMLESS[name])
    report = convert_(model, dilated_size=7, input_size=IMAGE)
    assert [layer.name for layer in report.layers] == ["ordinary", "conv"]
    model(torch.randn(1, *IMAGE))


@pytest.mark.parametrize("scale", [1e-6, 0])
def test_a_use_behind_a_scale_that_starts_near_zero_is_found(scale):
    model = User(lambda conv, x: x + model.scale * conv(x) * conv.weight.shape[-1])
    model.scale = nn.Parameter(torch.full((4, 1, 1), float(scale)))
    (skip,) = find_convs(model, IMAGE).skipped
    assert (skip.name, skip.reason) == ("conv", CHANGED)
    assert (model.scale == scale).all()


def test_convolutions_that_other_code_uses_together_stay():
    """Alone, each of them may be replaced."""

    def use(conv, x):
        return conv(x) * any(isinstance(module, nn.Conv2d) for module in model.modules())

    model = User(use)
    convs = find_convs(model, IMAGE)
    assert [skip.reason for skip in convs.skipped] == [CHANGED, CHANGED]


NOT_MEASURABLE = {
    "random": (lambda x: x + torch.rand_like(x) * NUMBERS.random(), "differ from run to run"),
    "no tensors": (lambda x: {"mean": x.mean().item()}, "no tensor that can be compared"),
    "not finite": (lambda x: x / 0, "no finite numbers"),
    "fails": (lambda x: x @ x.new_ones(3), "forward fails at 1x4x9x14: RuntimeError: "),
}
NUMBERS = random.Random(0)  # whose state is not the process's


@pytest.mark.parametrize("name", NOT_MEASURABLE)
def test_what_cannot_be_measured_is_said(name):
    use, reason = NOT_MEASURABLE[name]
    model = User(lambda conv, x: use(conv(x * conv.weight.shape[-1])))
    convs = find_convs(model, IMAGE)
    assert reason in convs.not_measured
    assert len(convs.sites) == 2
    if name != "fails":
        with pytest.warns(UserWarning, match="was not measured: .*" + re.escape(reason)):
            report = convert_(model, dilated_size=7, input_size=IMAGE)
        assert report.not_measured == convs.not_measured
        assert "It was not measured whether the network allows" in " ".join(str(report).split())


def test_networks_of_libraries_are_not_measured_unless_they_have_hooks(monkeypatch):
    measured = []
    monkeypatch.setattr(
        "dcls_convert.networks.measure.measure",
        lambda *_: measured.append(1) or Measured(),
    )
    model = timm.create_model("test_convnext")
    find_convs(model)
    assert not measured
    model.norm_pre.register_forward_hook(lambda *_: None)
    find_convs(model)
    assert measured


def test_where_changed_cells_have_no_effect_the_network_is_not_measured():
    convs = find_convs(User(lambda conv, x: conv(x)[..., -1]), IMAGE)
    assert convs.not_measured == (
        "along axes 2 and 3 of input 0, most changed cells change no output"
    )
    assert len(convs.sites) == 2
