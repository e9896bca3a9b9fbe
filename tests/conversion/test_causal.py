"""Causal networks of several fields, in as many spellings: converted, they stay causal.

Their windows are longer than the old kernels, back in time alone. Time is the last axis of the
input, or the one before it where it says so.
"""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcls_convert
from dcls_convert import convert_, find_convs, fold_to_dense_, plan_conversion
from dcls_convert.errors import CheckpointError, NothingMatchesError
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.options import MIN_GROWTH
from dcls_convert.running.compare_outputs import relative_error

from ..rules import LARGER_THAN_1, rules_of

STEPS = 48
RULES = rules_of(LARGER_THAN_1)


class ByConstant(nn.Module):
    """A TCN for forecasting: padded on both sides, then cut, as in Bai et al., arXiv:1803.01271."""

    def __init__(self, read_padding=False):
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv1d(4, 4, 3, padding=2 * d, dilation=d) for d in (1, 2, 4)]
        )
        self.read_padding = read_padding

    def forward(self, x):
        for index, conv in enumerate(self.convs):
            cells = conv.padding[0] if self.read_padding else 2 * 2**index
            x = x + conv(x)[..., :-cells].tanh()
        return x


class ByAttributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(4, 4, 2, dilation=d) for d in (1, 2, 4, 8)])

    def forward(self, x):
        for conv in self.convs:
            left = (conv.kernel_size[0] - 1) * conv.dilation[0]
            x = x + F.gelu(conv(F.pad(x, (left, 0))))
        return x


class CausalConv1d(nn.Conv1d):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.left = (self.kernel_size[0] - 1) * self.dilation[0]

    def forward(self, input):
        return super().forward(F.pad(input, (self.left, 0)))


class CutConv1d(nn.Conv1d):
    def forward(self, input):
        return super().forward(input)[..., : -self.padding[0]]


class WaveNet(nn.Module):
    """Gated units with residual and skip connections, as in vocoders."""

    def __init__(self, conv=CausalConv1d):
        super().__init__()
        self.inp = nn.Conv1d(4, 6, 1)
        options = {"padding": 2} if conv is CutConv1d else {}
        self.gates = nn.ModuleList([conv(6, 12, 3, **options) for _ in range(2)])
        self.res = nn.ModuleList([nn.Conv1d(6, 6, 1) for _ in range(2)])
        self.out = nn.Conv1d(6, 4, 1)

    def forward(self, x):
        x = self.inp(x)
        skips = 0
        for gate, res in zip(self.gates, self.res, strict=True):
            first, second = gate(x).chunk(2, 1)
            y = first.tanh() * second.sigmoid()
            skips = skips + y
            x = x + res(y)
        return self.out(skips)


class Speech(nn.Module):
    """A streaming front end, (N, C, time, frequency): causal in time, strided in frequency."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(1, 4, (3, 3), stride=(1, 2), padding=(0, 1))
        self.two = nn.Conv2d(4, 4, (3, 3))

    def forward(self, x):
        x = self.one(F.pad(x, (0, 0, 2, 0))).relu()
        return self.two(F.pad(x, (1, 1, 2, 0)))


class TimeInTheMiddle(nn.Module):
    """(N, time, C), as in libraries for time series."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(4, 4, 3, padding=1, groups=4) for _ in range(2)])
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        for conv in self.convs:
            shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
            x = x + self.mix(conv(shifted.mT).mT)
        return x


class Spiking(nn.Module):
    """Leaky units that reset, behind convolutions over a few steps."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(4, 4, 3, bias=False) for _ in range(2)])

    def forward(self, x):
        for conv in self.convs:
            potential = 0
            spikes = []
            for current in conv(F.pad(x, (2, 0))).unbind(-1):
                potential = 0.8 * potential + current
                spike = torch.sigmoid(8 * (potential - 0.2))
                potential = potential * (1 - spike)
                spikes.append(spike)
            x = torch.stack(spikes, -1)
        return x


class Video(nn.Module):
    """(N, C, time, rows, columns)."""

    def __init__(self):
        super().__init__()
        self.pad = nn.ZeroPad3d((1, 1, 1, 1, 2, 0))
        self.convs = nn.ModuleList([nn.Conv3d(2, 2, 3) for _ in range(2)])

    def forward(self, x):
        for conv in self.convs:
            x = x + conv(self.pad(x)).tanh()
        return x


def rolled(x):
    x = x.roll(1, -1)
    x[..., 0] = 0
    return x


class Shifted(nn.Module):
    """Ordinary convolutions, and a function that shifts their maps to later times."""

    def __init__(self, shift, mode="zeros"):
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv1d(4, 4, 3, padding=1, padding_mode=mode) for _ in range(2)]
        )
        self.norm = nn.BatchNorm1d(4)
        self.shift = shift

    def forward(self, x):
        for conv in self.convs:
            x = self.shift(self.norm(conv(x)).relu()) + x
        return x


class Reversed(nn.Module):
    """Looks at the future alone; one convolution sees its map reversed in time."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(4, 4, 3) for _ in range(2)])

    def forward(self, x):
        x = self.convs[0](F.pad(x, (0, 2))).tanh()
        return self.convs[1](F.pad(x.flip(-1), (2, 0))).flip(-1)


class Modules(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.ConstantPad1d((4, 0), 0.0),
            nn.Conv1d(4, 6, 5),
            nn.PReLU(),
            nn.ConstantPad1d((1, 0), 0.0),
            nn.Conv1d(6, 4, 2),
        )


@dataclass(frozen=True)
class Case:
    build: object
    size: tuple = (4, STEPS)
    window: object = 16
    time: int = -1  # axis of time, of inputs and outputs
    grow: tuple = ("back",)
    layers: int = 2


CASES = {
    "cut by a constant": Case(ByConstant, layers=3),
    "cut by the padding": Case(lambda: ByConstant(read_padding=True), layers=3),
    "padded by attributes": Case(ByAttributes, window=15, layers=4),
    "a class that pads": Case(WaveNet),
    "a class that cuts": Case(lambda: WaveNet(CutConv1d), window=9),
    "time and frequency": Case(Speech, (1, 20, 12), (8, 7), -2, ("back", "both")),
    "time in the middle": Case(TimeInTheMiddle, (STEPS, 4), time=1),
    "spiking": Case(Spiking, (4, 20)),
    "video": Case(Video, (2, 10, 6, 6), (6, 5, 5), 2, ("back", "both", "both")),
    "rolled": Case(lambda: Shifted(rolled), window=9),
    "a slice": Case(lambda: Shifted(lambda x: F.pad(x, (1, -1))), window=10),
    "replicated": Case(lambda: Shifted(lambda x: F.pad(x, (2, 0))[..., :-2], "replicate")),
    "reflected": Case(lambda: Shifted(lambda x: F.pad(x, (2, 0))[..., :-2], "reflect")),
    "padding modules": Case(Modules),
}


def built(case):
    torch.manual_seed(0)
    return case.build()


def converted(case, **options):
    model = built(case)
    report = convert_(
        model,
        rules=RULES,
        dilated_size=case.window,
        tie="none",
        **given(case),
        **({"kernel_count": 4, "init": "random", "positions": "uniform"} | options),
    )
    return model, report


def given(case):
    if case.time == 1:  # not one image
        return {"example_inputs": torch.randn(1, *case.size)}
    return {"input_size": case.size}


def later_gradient(model, case):
    """The largest derivative of outputs by later inputs."""
    x = torch.randn(2, *case.size, requires_grad=True)
    largest = 0.0
    outputs = model.eval()(x)
    steps = outputs.shape[case.time]
    for step in (0, 1, steps // 3, steps // 2, steps - 2):
        total = outputs.select(case.time, step).sum()
        (gradient,) = torch.autograd.grad(total, x, retain_graph=True)
        later = gradient.narrow(case.time, step + 1, steps - step - 1)
        largest = max(largest, float(later.abs().max()))
    return largest


def train_(model, case):
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(4, *case.size, generator=generator)
    for _ in range(50):
        outputs = model.train()(x)
        loss = (outputs - outputs.detach().roll(-1, case.time)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_an_exact_start_computes_the_same(name):
    case = CASES[name]
    old = built(case).eval()
    model, report = converted(case, kernel_count="auto", init="exact", positions="normal")
    assert [layer.grow for layer in report.layers] == [case.grow] * case.layers
    x = torch.randn(2, *case.size)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), old(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_outputs_never_come_to_depend_on_later_inputs(name, tmp_path):
    case = CASES[name]
    assert later_gradient(built(case), case) == 0
    model, report = converted(case)
    assert later_gradient(model, case) == 0
    positions = [layer.positions.clone() for layer in model.modules() if is_dcls(layer)]
    train_(model, case)
    moved = [layer.positions for layer in model.modules() if is_dcls(layer)]
    assert all(not torch.equal(*pair) for pair in zip(positions, moved, strict=True))
    assert later_gradient(model, case) == 0

    x = torch.randn(2, *case.size)
    with torch.no_grad():
        expected = model.eval()(x)
        dcls_convert.save_converted(model, report.plan, tmp_path / "saved")
        loaded = dcls_convert.load_converted(tmp_path / "saved", model=built(case)).eval()
        assert torch.equal(loaded(x), expected)
        folded = copy.deepcopy(model)
        names = set(folded.state_dict())
        fold_to_dense_(folded)
        assert names > set(folded.state_dict())
        assert relative_error([(expected, folded(x))]) < 1e-6
        exported = torch.export.export(folded, (x,)).module()
        assert relative_error([(expected, exported(x))]) < 1e-6
    train_(folded, case)
    assert later_gradient(folded, case) == 0


def test_a_plan_with_other_sides_is_refused(tmp_path):
    """Tensors have the same shapes; the plan's sides must be those of the layers."""
    model, report = converted(CASES["a slice"])
    layers = [replace(layer, grow=("ahead",)) for layer in report.plan.layers]
    other = replace(report.plan, layers=tuple(layers))
    with pytest.raises(CheckpointError, match=r"grow is \('back',\), the plan has \('ahead'"):
        dcls_convert.save_converted(model, other, tmp_path / "saved")


def is_dcls(module):
    return isinstance(module, DclsConvNd)


def test_convolutions_on_a_reversed_map_grow_to_the_other_side_of_it():
    case = Case(Reversed)
    model, report = converted(case)
    assert [layer.grow for layer in report.layers] == [("ahead",), ("back",)]
    assert "1 layer grows back only and 1 layer grows ahead only: the network looks ahead" in str(
        report
    ).replace("\n ", "")
    x = torch.randn(1, 4, STEPS, requires_grad=True)
    (gradient,) = torch.autograd.grad(model.eval()(x)[..., 20].sum(), x)
    assert gradient[..., :20].abs().max() == 0


def test_by_default_a_causal_network_gets_a_rule_and_a_size():
    convs = find_convs(built(CASES["a class that pads"]), (4, STEPS))
    plan = plan_conversion(convs)
    assert plan.rules == "conv1d"
    assert [layer.grow for layer in plan.layers] == [("back",)] * 2
    (growth,) = {layer.growths for layer in plan.layers}
    assert growth == (MIN_GROWTH,)  # more adds more than 15 % to the MACs
    assert plan.budget.used <= plan.budget.limit


@pytest.mark.parametrize("default", [3, 16])
def test_a_size_that_the_option_overrules_does_not_matter(default):
    convs = find_convs(built(CASES["a class that pads"]), (4, STEPS))
    rules = rules_of(LARGER_THAN_1, defaults={"dilated_size": default})
    plan = plan_conversion(convs, rules, dilated_size=9)
    assert plan.layers == plan_conversion(convs, RULES, dilated_size=9).layers
    assert [layer.grow for layer in plan.layers] == [("back",)] * 2


class LastStep(Modules):
    def forward(self, x):
        return super().forward(x)[..., -1]


def test_a_rule_may_state_the_side():
    """The last step alone cannot show that the network is causal."""
    convs = find_convs(LastStep(), (4, STEPS))
    with pytest.raises(NothingMatchesError, match="grow: back"):
        plan_conversion(convs, RULES, dilated_size=16)
    rules = rules_of(LARGER_THAN_1 | {"grow": "back"})
    model = LastStep().eval()
    x = torch.randn(2, 4, STEPS)
    expected = model(x)
    report = convert_(model, rules=rules, dilated_size=16, init="exact", input_size=(4, STEPS))
    assert [layer.grow for layer in report.layers] == [("back",)] * 2
    torch.testing.assert_close(model(x), expected)


class MaskedByKernelSize(nn.Module):
    """Ordinary: it pads by an attribute, to both sides."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, groups=4)
        self.other = nn.Conv1d(4, 4, 3, padding=1, groups=4)

    def forward(self, x):
        return self.other(self.conv(F.pad(x, [self.conv.kernel_size[0] // 2] * 2)))


def test_attributes_are_kept_by_windows_that_grow_to_one_side_alone():
    model = MaskedByKernelSize()
    report = convert_(model, rules=RULES, dilated_size=7, init="random", input_size=(4, STEPS))
    assert [layer.name for layer in report.layers] == ["other"]
    (skip,) = report.skipped
    assert "other code uses this convolution's weight or attributes" in skip.reason
    assert "grow: back" in skip.reason
    rules = rules_of(LARGER_THAN_1 | {"grow": "back"})
    plan = plan_conversion(find_convs(MaskedByKernelSize(), (4, STEPS)), rules, dilated_size=8)
    assert [layer.name for layer in plan.layers] == ["conv", "other"]
