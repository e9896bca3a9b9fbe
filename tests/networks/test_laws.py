"""What a table shows: how outputs lie over inputs, and what windows must not let outputs see."""

import random
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcls_convert import convert_, find_convs, plan_conversion
from dcls_convert.errors import NothingMatchesError
from dcls_convert.networks.laws import find_pairs

from ..rules import rules_of
from .nets import Call, conv, later

pytestmark = pytest.mark.usefixtures("seeded")
EVERY_CONV = rules_of({"match": {}})


def reach(model, size, example=None):
    """For every output cell along the last axis, which input cells it depends on, in float64."""
    x = torch.rand(1, *size, dtype=torch.float64) if example is None else example.double()
    outputs = torch.autograd.functional.jacobian(lambda x: model(x).movedim(-1, 0).flatten(1), x)
    return (outputs.abs().flatten(2, -2).amax((1, 2)) > 0) if outputs.dim() > 3 else outputs != 0


def looks_too_far(build, allowed, size, example=None, **options):
    """Convert, fill all windows, and return whether outputs then look where they must not.

    Before, they do not.

    Args:
        build: Returns the network.
        allowed: Says whether an output may depend on an input, for their cells.
        size: (channels, *spatial) of the input.
        example: Example inputs, or None to give the size alone.
        options: For `convert_`.
    """
    model = build().eval()
    before = reach(model.double(), size, example)
    rows, columns = before.shape
    forbidden = torch.tensor([[not allowed(o, i) for i in range(columns)] for o in range(rows)])
    assert not (before & forbidden).any()
    given = {"input_size": size} if example is None else {"example_inputs": example}
    try:
        report = convert_(
            model,
            rules=EVERY_CONV,
            init="random",
            positions="uniform",
            budget=2000,
            **given,
            **({"dilated_size": "+4"} | options),
        )
    except NothingMatchesError:
        return False  # every convolution stays
    assert report.not_measured is None
    return bool((reach(model, size, example) & forbidden).any())


# How output cells lie over input cells: the network, its stride, and the sizes.

GRIDS = {
    "same": (lambda: conv(1), 1),
    "valid": (lambda: conv(1, padding=0), 1),
    "stride 2": (lambda: conv(1, stride=2, padding=1), 2),
    "stride 3": (lambda: conv(1, 5, stride=3, padding=2), 3),
    "stride 7": (lambda: conv(1, 7, stride=7, padding=0), 7),
    "two strides": (
        lambda: nn.Sequential(conv(1, stride=2, padding=1), conv(1, 4, stride=4, padding=0)),
        8,
    ),
    "upsampled": (lambda: nn.Sequential(conv(1), nn.Upsample(scale_factor=4)), Fraction(1, 4)),
    "pooled by 3, upsampled by 2": (
        lambda: nn.Sequential(nn.AvgPool1d(3), conv(1), nn.Upsample(scale_factor=2)),
        Fraction(3, 2),
    ),
    "decimated": (lambda: Call(lambda x, c: c(x[..., 3::5]), conv(1)), 5),
    "time in the second axis": (
        lambda: Call(lambda x, c: c(x).mT, conv(1, stride=2, padding=1)),
        2,
    ),
    "a list of times": (lambda: Call(lambda x, c: list(c(x).unbind(-1)), conv(1)), 1),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("side", [96, 131])
def test_the_stride_from_inputs_to_outputs_is_found(grid, side):
    build, stride = GRIDS[grid]
    model = nn.Sequential(conv(1), build())
    convs = find_convs(model, (2, side))
    assert convs.not_measured is None
    (found,) = convs.dependence.tables
    assert [pair.stride for pair in find_pairs(found.table)] == [stride]
    assert found.laws == []


def test_a_law_is_found_where_most_cells_are_not_read():
    """Blocks of cells are changed, so that each has a cell that is read."""
    convs = find_convs(Call(lambda x, c: later(c(x[..., 6::12])), conv(1)), (2, 131))
    assert convs.not_measured is None
    assert convs.dependence.outputs_look == "back"


NO_MAP = {
    "two maps, joined": lambda y: torch.cat([y, y[..., ::2]], -1),
    "reversed in blocks": lambda y: y[..., ::2].unflatten(-1, (-1, 8)).flip(-1).flatten(-2),
}


@pytest.mark.parametrize("name", NO_MAP)
def test_outputs_in_another_order_than_inputs_are_said_not_to_be_measured(name):
    model = Call(lambda x, c: NO_MAP[name](c(later(x))), conv(1))
    assert find_convs(model, (2, 128)).not_measured == (
        "along axis 2 of input 0, outputs do not move with the changed cells"
    )


def test_outputs_that_look_at_nearly_all_inputs_need_no_order():
    """Each looks at all inputs but an eighth."""
    order = torch.tensor([3, 6, 1, 4, 7, 2, 5, 0])
    looks = (1 - torch.eye(8)[order]).repeat_interleave(4, 0)
    convs = find_convs(Call(lambda x, c: c(x) @ looks, conv(1)), (2, 32))
    assert convs.not_measured is None
    (found,) = convs.dependence.tables
    assert found.laws == []


def test_no_axis_is_taken_for_another():
    model = Call(lambda x, c: c(later(x)).transpose(2, 3), conv(2))
    convs = find_convs(model, (2, 24, 24))
    (found,) = convs.dependence.tables
    assert {(law.pair.input_axis, law.pair.output_axis) for law in found.laws} == {(3, 2)}


@pytest.mark.parametrize("pooled", [1, 2])
def test_maps_that_are_joined_along_an_axis_have_no_place_and_it_is_said(pooled):
    def use(x, c):
        x = c(x)
        return torch.cat([x, F.avg_pool1d(x, pooled)], -1)

    convs = find_convs(Call(use, conv(1)), (2, 48))
    assert convs.not_measured == (
        "along axis 2 of input 0, outputs do not move with the changed cells"
    )


def test_a_causal_network_shows_the_numbers_that_measure_draws():
    model = Call(lambda x, c: c(F.pad(x, (2, 0))), conv(1, padding=0))
    dependence = find_convs(model, (2, 12)).dependence
    (found,) = dependence.tables
    changed = {column.probe.cells[2]: column.cells(0, 2) for column in found.table.columns}
    assert changed[3, 3] == [3, 4, 5]
    assert changed[5, 5] == [5, 6, 7]
    (law,) = found.laws
    assert (law.side, law.most) == ("back", 0)
    assert [*dependence.broken_by({"convs.0": (7,)})] == ["convs.0"]
    assert dependence.broken_by({"convs.0": (7,)}, {"convs.0": ("back",)}) == {}


# Causal networks that earlier versions converted in silence. Output o may look at inputs up to
# `stride * o + offset`.


class OneCell(nn.Module):
    """Causal in time, the last axis, with kernels of one cell along it or along the other axis."""

    def __init__(self):
        super().__init__()
        self.time = nn.Conv2d(4, 4, (1, 3))
        self.rows = nn.Conv2d(4, 4, (3, 1), padding=(1, 0), groups=4)

    def forward(self, x):
        return x + self.rows(self.time(F.pad(x, (2, 0)))).tanh()


class PointwiseInTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(4, 4, 1)
        self.causal = nn.Conv1d(4, 4, 3)

    def forward(self, x):
        return self.mix(self.causal(F.pad(x, (2, 0))).tanh())


def steps(*functions):
    """A network that applies functions of maps one after the other."""

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(conv(1, padding=1) for _ in functions)

        def forward(self, x):
            for function, c in zip(functions, self.convs, strict=True):
                x = function(x, c)
            return x

    return Steps


def causal(x, c):
    return later(c(x)).tanh()


def in_mode(mode, cells=2):
    """Shifted by a cell more than a kernel of 3 needs, with another mode of padding."""
    return lambda: Call(lambda x, c: later(c(x), cells), conv(1, padding=1, padding_mode=mode))


def circular_without_a_wrap():
    """The first cell, which sees the last one, is dropped; a larger window wraps further."""

    def use(x, c):
        return later(torch.cat([torch.zeros_like(x[..., :1]), c(x)[..., 1:]], -1), 2)

    return Call(use, conv(1, padding=1, padding_mode="circular"))


def keep(first, step):
    return lambda x, c: causal(x, c)[..., first::step]


def from_nth(first, step):
    return lambda x, c: causal(x[..., first::step], c)


def domain(function):
    return steps(lambda x, c: causal(function(x), c), causal)


CAUSAL = {
    "a kernel of one cell in time": (OneCell, (4, 12, 32), 1, 0, {"dilated_size": (9, 9)}),
    "1x1 in time": (PointwiseInTime, (4, 40), 1, 0, {"dilated_size": 9}),
    "every second sample": (steps(from_nth(0, 2), causal, causal), (2, 128), 2, 0, {}),
    "every second sample, odd": (steps(from_nth(1, 2), causal, causal), (2, 125), 2, 1, {}),
    "every seventh sample": (steps(from_nth(5, 7), causal), (2, 150), 7, 5, {}),
    "the last of two": (steps(causal, causal, keep(1, 2)), (2, 96), 2, 1, {}),
    "the last of three": (steps(causal, keep(2, 3), causal), (2, 97), 3, 2, {}),
    "replicated borders": (in_mode("replicate"), (2, 48), 1, 0, {"dilated_size": 11}),
    "reflected borders": (in_mode("reflect"), (2, 48), 1, 0, {"dilated_size": 11}),
    "circular borders": (in_mode("circular", 6), (2, 48), 1, 0, {"dilated_size": 17}),
    "no cell wraps round": (circular_without_a_wrap, (2, 40), 1, 0, {"dilated_size": 5}),
    "logarithm": (domain(torch.log), (2, 32), 1, 0, {}),
    "root": (domain(lambda x: x.sqrt()), (2, 32), 1, 0, {}),
    "changed in place": (
        domain(lambda x: x.clone() if x.is_leaf else x.sub_(0.5)),
        (2, 32),
        1,
        0,
        {},
    ),
    "the future alone": (
        steps(lambda x, c: causal(x.flip(-1), c).flip(-1)),
        (2, 40),
        -1,
        0,
        {},
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("has_example", [False, True])
def test_windows_do_not_let_causal_networks_look_ahead(name, has_example):
    build, size, stride, offset, options = CAUSAL[name]

    def allowed(output, input):
        if stride < 0:
            return input >= output
        return input <= stride * output + offset

    if name == "circular borders":  # which wraps round: the first outputs see the end

        def allowed(output, input):
            return input <= output or output < 16

    example = 0.1 + 0.9 * torch.rand(1, *size) if has_example else None
    assert not looks_too_far(build, allowed, size, example, **options)


def reflected_behind(x, c):
    """Behind the convolution, the first outputs see later cells, whatever its window."""
    x = c(F.pad(x, (2, 0)))
    padded = F.pad(x, (5, 0), mode="reflect")
    return padded[..., :-5] + x


def reflected_before(x, c):
    """With a longer window, more outputs would see the cells that are reflected."""
    return c(F.pad(x, (2, 0), mode="reflect"))


def test_what_outputs_see_at_a_border_already_is_no_reason_to_stay():
    plans = {}
    for use in (reflected_behind, reflected_before):
        convs = find_convs(Call(use, conv(1, padding=0)), (2, 40))
        try:
            plans[use] = plan_conversion(convs, EVERY_CONV, dilated_size=9).layers[0].grow
        except NothingMatchesError as problem:
            plans[use] = str(problem)
    assert plans[reflected_behind] == ("back",)
    assert "a window that grows to one side would, too" in plans[reflected_before]


# Outputs that do not look at their own place.


def both_ways(join):
    def use(x, back, ahead):
        past = later(back(later(x)))
        future = later(ahead(later(x.flip(-1)))).flip(-1)
        return join(past, future)

    return lambda: Call(use, conv(1), conv(1))


class CentreMasked(nn.Conv1d):
    def forward(self, x):
        mask = torch.ones_like(self.weight)
        mask[..., 1] = 0
        return self._conv_forward(x, self.weight * mask, self.bias)


def masked_then_dilated():
    masked = CentreMasked(2, 2, 3, padding=1)
    return nn.Sequential(masked, conv(1, dilation=2), nn.Tanh(), conv(1, 1), conv(1, dilation=2))


BLIND = {
    "two stacks, added": both_ways(torch.add),
    "two stacks, side by side": both_ways(lambda *maps: torch.cat(maps, 1)),
    "a masked centre, then dilated": masked_then_dilated,
}


@pytest.mark.parametrize("name", BLIND)
@pytest.mark.parametrize("side", [16, 60])
def test_a_blind_spot_stays_blind(name, side):
    assert not looks_too_far(BLIND[name], lambda output, input: output != input, (2, side))


class HalfPlanes(nn.Module):
    """Looks at the half planes above, left of, below and right of its place."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)])
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        maps = []
        for turns in range(4):
            y = torch.rot90(x, turns, (2, 3))
            for c in self.body:
                y = F.leaky_relu(c(F.pad(y, (0, 0, 1, 0))[:, :, :-1]), 0.1)
            maps.append(torch.rot90(F.pad(y, (0, 0, 1, 0))[:, :, :-1], -turns, (2, 3)))
        return self.head(torch.cat(maps, 1))


def test_half_planes_do_not_meet():
    net = HalfPlanes()
    with pytest.raises(NothingMatchesError, match="at their own place"):
        convert_(net, rules=EVERY_CONV, dilated_size="+4", input_size=(1, 16, 16), init="random")


def random_causal(seed):
    """A random stack of causal steps; each output's own time is known: the stride and an offset."""
    r = random.Random(seed)
    stride = 1
    offset = 0
    functions = []
    for _ in range(r.randint(2, 4)):
        kind = r.choice(["shift", "pad", "residual", "lag", "keep", "end"])
        if kind == "keep" and stride == 1:
            step = r.choice([2, 3])
            functions.append(keep(step - 1, step))
            stride = step
            offset = step - 1
        elif kind == "pad":
            functions.append(lambda x, c: c(F.pad(x, (1, 0)))[..., :-1].tanh())
        elif kind == "residual":
            functions.append(lambda x, c: x + causal(x, c))
        elif kind == "lag":
            functions.append(lambda x, c: later(c(x), 2).tanh())
        elif kind == "end":
            functions.append(lambda x, c: causal(x, c)[..., :-2])
        else:
            functions.append(causal)
    return steps(*functions), stride, offset, r.choice([48, 61, 90])


@pytest.mark.parametrize("seed", range(8))
def test_random_causal_networks_stay_causal(seed):
    build, stride, offset, side = random_causal(seed)
    assert not looks_too_far(build, lambda o, i: i <= stride * o + offset, (2, side))
