"""A class whose forward is its base's with other padding is seen by running it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcls_convert.geometry import DYNAMIC_SAME
from dcls_convert.layers.conv_classes import settings_of, why_not_replaceable
from dcls_convert.layers.own_forward import padding_seen


class Left(nn.Conv1d):
    def forward(self, input):
        left = (self.kernel_size[0] - 1) * self.dilation[0]
        return super().forward(F.pad(input, (left, 0)))


class ByFunction(nn.Conv1d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.left = (self.kernel_size[0] - 1) * self.dilation[0]

    def forward(self, x):
        x = F.pad(x, (self.left, 0))
        return F.conv1d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class Cut(nn.Conv1d):
    def forward(self, input):
        return super().forward(input)[..., : -self.padding[0]]


class StaticSame(nn.Conv2d):
    """As efficientnet_pytorch's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.static_padding = nn.ZeroPad2d((0, 1, 0, 1))

    def forward(self, x):
        x = self.static_padding(x)
        return F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class DynamicSame(nn.Conv2d):
    def forward(self, x):
        widths = []
        for axis in (1, 0):
            size, stride = x.shape[2 + axis], self.stride[axis]
            cells = max((-(-size // stride) - 1) * stride + self.kernel_size[axis] - size, 0)
            widths += [cells // 2, cells - cells // 2]
        return F.conv2d(
            F.pad(x, widths), self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )


KNOWN = {
    "left": (Left(4, 6, 3), ((2, 0),)),
    "left, dilated": (Left(4, 6, 3, dilation=3), ((6, 0),)),
    "left, strided": (Left(4, 6, 4, stride=2), ((3, 0),)),
    "by a function": (ByFunction(4, 6, 5, groups=2, bias=False), ((4, 0),)),
    "cut": (Cut(4, 6, 3, padding=2), ((2, 0),)),
    "padded by a module": (StaticSame(4, 4, 3, stride=2, groups=4), ((0, 1), (0, 1))),
    "dynamic": (DynamicSame(4, 4, 3, stride=2), DYNAMIC_SAME),
    "without values": (Left(4, 6, 3, device="meta"), ((2, 0),)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_padding_is_seen(name):
    conv, padding = KNOWN[name]
    values = copy.deepcopy(conv.state_dict())
    assert why_not_replaceable(conv) is None
    assert settings_of(conv).padding == padding
    if not conv.weight.is_meta:
        for key, value in conv.state_dict().items():
            assert torch.equal(value, values[key])
            assert value.grad is None


class Scaled(nn.Conv1d):
    def forward(self, x):
        return 2 * super().forward(x)


class Demeaned(nn.Conv1d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Reflected(nn.Conv1d):
    def forward(self, x):
        return super().forward(F.pad(x, (2, 0), mode="reflect"))


class Cropped(nn.Conv1d):
    def forward(self, x):
        return super().forward(x[..., 1:])


class WithCache(nn.Conv1d):
    def forward(self, x, cache=None):
        return super().forward(x), cache


class BySize(nn.Conv1d):
    """Another padding at every second size."""

    def forward(self, x):
        return super().forward(F.pad(x, (2 + x.shape[-1] % 2, 0)))


class Streaming(nn.Conv1d):
    """Keeps past steps."""

    def __init__(self, *args):
        super().__init__(*args)
        self.past = None

    def forward(self, x):
        self.past = x[..., -2:]
        return super().forward(F.pad(x, (2, 0)))


class Dropped(nn.Conv1d):
    def forward(self, x):
        weight = F.dropout(self.weight, 0.5, self.training)
        return self._conv_forward(F.pad(x, (2, 0)), weight, self.bias)


class ByReplication(Left):
    """Pads with zeros, whatever its mode."""

    def __init__(self, *args):
        super().__init__(*args, padding_mode="replicate")


@pytest.mark.parametrize(
    "cls", [Streaming, Dropped, ByReplication, Scaled, Demeaned, Reflected, Cropped, WithCache]
)
def test_anything_else_is_not_known(cls):
    conv = cls(4, 6, 3)
    assert padding_seen(conv) is None
    assert "has a forward of its own" in why_not_replaceable(conv)


@pytest.mark.parametrize("stride", [1, 2])
def test_padding_that_depends_on_the_size_is_not_known(stride):
    assert padding_seen(BySize(4, 6, 3, stride=stride)) is None


def test_a_module_with_values_is_no_padding_and_is_not_run():
    conv = StaticSame(4, 4, 3)
    conv.static_padding = nn.Sequential(conv.static_padding, nn.BatchNorm2d(4))
    assert "has a forward of its own" in why_not_replaceable(conv)
    assert conv.static_padding[1].num_batches_tracked == 0


def test_a_computed_weight_is_named_as_the_reason():
    conv = Left(4, 4, 3)
    conv.weight_v = nn.Parameter(conv.weight.detach())
    assert "unexpected weight_v" in why_not_replaceable(conv)


def test_random_numbers_and_default_devices_stay():
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert padding_seen(Left(4, 6, 3)) == ((2, 0),)
    assert padding_seen(Dropped(4, 6, 3)) is None
    torch.manual_seed(0)
    Dropped(4, 6, 3)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    padding_seen(Dropped(4, 6, 3))
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(state)


class ByList(nn.Conv1d):
    def __init__(self, *args):
        super().__init__(*args)
        self.widths = [2, 0]
        self.more = nn.ConstantPad1d(0, 0.0)

    def forward(self, x):
        return super().forward(F.pad(self.more(x), self.widths))


def widen_list(conv):
    conv.widths[1] = 2


def widen_child(conv):
    conv.more = nn.ConstantPad1d((0, 2), 0.0)


@pytest.mark.parametrize("change", [widen_list, widen_child])
def test_padding_is_seen_again_when_attributes_or_modules_inside_have_changed(change):
    conv = ByList(4, 4, 3)
    assert settings_of(conv).padding == ((2, 0),)
    change(conv)
    assert settings_of(conv).padding == (2,)
