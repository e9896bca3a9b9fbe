"""Output sizes before and after a conversion are compared on meta, before anything changes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcls_convert.conversion.in_memory import convert_
from dcls_convert.errors import PlanError
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.networks.find_convs import find_convs
from dcls_convert.networks.tracing import check_same_shapes
from dcls_convert.planning.planner import plan_conversion
from dcls_convert.planning.rule_files import parse_rules

IMAGE = (4, 9, 14)
EVERYTHING = parse_rules("format: 1\nrules: [{match: {kernel_size: {min: 2}}, padding: any}]")


class PadsOutside(nn.Module):
    """Pads outside its convolutions, by the last side of their weight."""

    def __init__(self, *, shared=False, reads_size=True):
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 1)
        self.conv = nn.Conv2d(4, 4, 3, stride=2, groups=4)
        self.again = self.conv if shared else nn.Conv2d(4, 4, 3, groups=4)
        self.reads_size = reads_size

    def padded(self, x, conv):
        kernel = [conv.weight.shape[-1]] * 2 if self.reads_size else (3, 3)
        sides = []
        for size, stride, kernel_side in reversed(
            list(zip(x.shape[2:], conv.stride, kernel, strict=True))
        ):
            total = max((math.ceil(size / stride) - 1) * stride + kernel_side - size, 0)
            sides += [total // 2, total - total // 2]
        return F.pad(x, sides)

    def forward(self, x):
        for conv in (self.conv, self.again):
            x = conv(self.padded(x, conv))
        return x


class AddsSkip(PadsOutside):
    """Fails if an output size changes, because the input is added to the output."""

    def forward(self, x):
        return x + self.again(self.padded(x, self.again))


class ReadsAttribute(AddsSkip):
    """Reads numbers from a tensor that is no buffer, as YOLO reads the strides of its maps."""

    def __init__(self, skip=False):
        super().__init__(reads_size=False)
        self.strides = torch.tensor([1.0, 2.0])
        self.skip = skip

    def forward(self, x):
        self.reads_size = self.skip
        return super().forward(x).new_full((2,), self.strides[1].item())


def check(model, window, input_size=IMAGE):
    convs = find_convs(model, input_size)
    plan = plan_conversion(convs, EVERYTHING, dilated_size=window, budget=1000)
    try:
        check_same_shapes(convs.trace, plan.windows)
    finally:  # the traced copy is not converted itself
        assert convs.trace is None or not any(
            isinstance(module, DclsConvNd) for module in convs.trace.meta_model.modules()
        )


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (PadsOutside(), "conv: its output would be 4x6 instead of 5x7"),
        (PadsOutside(shared=True), "conv: its output would be 4x6 instead of 5x7"),
        (AddsSkip(), "again: its output would be 7x12 instead of 9x14"),  # it would fail half-way
        (ReadsAttribute(skip=True), "again: its output would be 7x12 instead of 9x14"),
    ],
)
def test_a_model_that_pads_by_the_kernel_size_is_refused_with_the_first_layer_that_changes(
    model, says
):
    with pytest.raises(PlanError, match=f"^{says}: the model pads outside"):
        check(model, 7)


@pytest.mark.parametrize(
    "model",
    [
        PadsOutside(reads_size=False),
        nn.Sequential(
            nn.Conv2d(4, 4, 3, padding="same", dilation=2),
            nn.Conv2d(4, 4, (3, 5), stride=2, padding_mode="reflect"),
        ),
        nn.Sequential(nn.Conv2d(4, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 9 * 14, 3)),
    ],
    ids=["pads by a fixed number", "padding inside", "a head for one input size"],
)
def test_other_models_pass(model):
    check(model, 9)


def test_a_model_that_reads_the_values_of_its_attributes_is_traced():
    model = ReadsAttribute()
    convs = find_convs(model, IMAGE)
    assert convs.macs == 9 * 14 * 4 * 9
    assert (convs.trace.calls["again"].output_sizes, convs.trace.output_shapes) == (
        [(9, 14)],
        [(2,)],
    )
    check(model, 7)


def test_where_nothing_can_be_compared_nothing_is_refused():
    check(PadsOutside(), 7, None)
    check(nn.Sequential(nn.Conv2d(5, 4, 3), nn.Conv2d(4, 4, 3)), 7, IMAGE)  # takes other images


def test_convert_refuses_a_model_that_pads_outside_before_changing_it():
    model = PadsOutside()
    before = dict(model.named_modules())
    with pytest.raises(PlanError, match="conv: its output would be 4x6 instead of 5x7"):
        convert_(model, rules=EVERYTHING, dilated_size=7, input_size=IMAGE)
    assert dict(model.named_modules()) == before
