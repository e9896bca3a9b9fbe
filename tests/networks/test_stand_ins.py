"""A convolution that the network reaches in another way than as its submodule stays as it is.

That way would still lead to the old one.
"""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcls_convert import convert_

from ..planning.nets import depthwise

IMAGE = (4, 9, 14)


class Net(nn.Module):
    """Calls one convolution by its name, and another by its name or by a function."""

    def __init__(self):
        super().__init__()
        self.ordinary = depthwise()
        self.conv = depthwise()
        self.use = None

    def forward(self, x):
        x = self.ordinary(x)
        return self.use(x) if self.use else self.conv(x)


def in_a_list(model, conv):
    model.convs = [conv]
    model.use = lambda x: model.convs[0](x)


def as_a_method(model, conv):
    model.use = conv.forward


def in_a_closure(model, conv):
    model.use = lambda x: F.conv2d(conv(x), conv.weight, padding=1, groups=4)


def weight_in_a_closure(model, conv):
    weight = conv.weight
    model.use = lambda x: F.conv2d(conv(x), weight, padding=1, groups=4)


def in_an_unregistered_module(model, conv):
    model.users = [nn.Sequential(nn.Sequential(conv))]
    model.use = lambda x: model.users[0](x)


def by_a_weak_reference(model, conv):
    reference = weakref.ref(conv)
    model.use = lambda x: reference()(x)


def in_a_hook(model, conv):
    model.ordinary.register_forward_hook(
        lambda module, args, output: F.conv2d(output, conv.weight, padding=1, groups=4)
    )


def in_a_pre_hook(model, conv):
    def clamp(module, args):
        conv.weight.data.clamp_(-1, 1)

    model.register_forward_pre_hook(clamp)


REFERENCES = [
    in_a_list,
    as_a_method,
    in_a_closure,
    weight_in_a_closure,
    in_an_unregistered_module,
    by_a_weak_reference,
    in_a_hook,
    in_a_pre_hook,
]


@pytest.mark.parametrize("refer", REFERENCES)
def test_a_convolution_stays_that_something_else_calls(refer):
    model = Net()
    refer(model, model.conv)
    image = torch.randn(1, *IMAGE)
    before = model(image)
    report = convert_(model, dilated_size=7, init="exact", kernel_count="exact", input_size=IMAGE)
    assert [layer.name for layer in report.layers] == ["ordinary"]
    (skip,) = report.skipped
    assert skip.name == "conv"
    torch.testing.assert_close(model(image), before)


def test_a_reference_that_the_forward_does_not_follow_is_no_harm():
    model = Net()
    model.convs = [model.conv]
    report = convert_(model, dilated_size=7, input_size=IMAGE)
    assert len(report.layers) == 2
