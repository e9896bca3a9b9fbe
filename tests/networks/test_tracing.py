"""A model that pads outside its convolutions, by an amount read off them, keeps its output sizes:
these convolutions stay. All others keep the size of their outputs whatever the window.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcls_convert import convert_, find_convs
from dcls_convert.planning.rule_files import parse_rules

IMAGE = (4, 9, 14)
EVERYTHING = parse_rules("format: 1\nrules: [{match: {kernel_size: {min: 2}}, padding: any}]")


class PadsOutside(nn.Module):
    """Pads outside its convolutions, by the last side of their weight or by a fixed number."""

    def __init__(self, *, shared=False, reads_size=True):
        super().__init__()
        self.ordinary = nn.Conv2d(4, 4, 3, padding=1)
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
        x = self.ordinary(x)
        for conv in (self.conv, self.again):
            x = conv(self.padded(x, conv))
        return x


class ReadsAttribute(PadsOutside):
    """Reads numbers from a tensor that is no buffer, as YOLO reads the strides of its maps."""

    def __init__(self):
        super().__init__(reads_size=False)
        self.strides = torch.tensor([1.0, 2.0])

    def forward(self, x):
        return super().forward(x).new_full((2,), self.strides[1].item())


def converted(model, window):
    """Convert everything that may be, check the shape of the output, and return the names."""
    image = torch.randn(1, *IMAGE)
    before = model(image).shape
    report = convert_(
        model, rules=EVERYTHING, dilated_size=window, budget=1000, input_size=IMAGE, init="largest"
    )
    assert model(image).shape == before
    return [layer.name for layer in report.layers]


@pytest.mark.parametrize("shared", [False, True])
def test_convolutions_that_are_padded_outside_by_their_own_size_stay(shared):
    assert converted(PadsOutside(shared=shared), 7) == ["ordinary"]


@pytest.mark.parametrize(
    "model",
    [
        PadsOutside(reads_size=False),
        nn.Sequential(
            nn.Conv2d(4, 4, 3, padding="same", dilation=2),
            nn.Conv2d(4, 4, (3, 5), stride=2, padding_mode="reflect", padding=(1, 2)),
        ),
        nn.Sequential(nn.Conv2d(4, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 9 * 14, 3)),
    ],
    ids=["pads by a fixed number", "padding inside", "a head for one input size"],
)
def test_all_other_convolutions_keep_the_size_of_their_outputs(model):
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    assert converted(model, 9) == convolutions


def test_a_model_that_reads_the_values_of_its_attributes_is_traced():
    convs = find_convs(ReadsAttribute(), IMAGE)
    cells_of_outputs = 4 * 9 * 14 * 9 + 5 * 7 * 9 + 5 * 7 * 9
    assert convs.macs == 4 * cells_of_outputs


def test_a_model_whose_output_refers_to_itself_is_traced():
    class Cyclic(PadsOutside):
        def forward(self, x):
            outputs = [super().forward(x)]
            outputs.append(outputs)
            return outputs

    convs = find_convs(Cyclic(), IMAGE)
    assert convs.macs is not None, convs.macs_note
