"""Where outputs look to one side alone, windows grow to that side, and outputs look to no other.

Where they look to both, no convolution is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcls_convert import convert_, find_convs
from dcls_convert.geometry import extent
from dcls_convert.layers.dcls_conv import DclsConvNd

from ..dependence import WithOrdinary, seen
from ..rules import LARGER_THAN_1, rules_of
from .nets import Call, conv, later

pytestmark = pytest.mark.usefixtures("seeded")
DEFAULT = rules_of(LARGER_THAN_1)
ANY = rules_of(LARGER_THAN_1 | {"padding": "any"})
INPUT = {1: (2, 12), 2: (2, 10, 12), 3: (2, 10, 6, 6)}


@dataclass(frozen=True)
class Form:
    """A network whose outputs look to one side; larger windows would let them look to the other."""

    build: Callable[[], nn.Module]
    dims: int = 1
    axis: int = -1  # the spatial axis along which they look to one side
    ahead: bool = False  # whether they look ahead, not back
    stride: float = 1  # cells of the input for a cell of the output


def calls(use, *convs, **fields):
    """A function that calls 1-D convolutions with these options."""
    return Form(lambda: Call(use, *[conv(1, **options) for options in convs]), **fields)


# The map is shifted before the convolution.


def by_strides(x):
    return F.pad(x, (1, 0)).contiguous().as_strided((len(x), 2, 12), (2 * 13, 13, 1))


def by_attention(x):
    return later(F.scaled_dot_product_attention(x.mT, x.mT, x.mT, is_causal=True).mT)


def looking_at_values(x):
    return later(x / 2 if x.abs().max() > 100 else x)


def written(x):
    moved = torch.zeros_like(x)
    moved[..., 1:] = x[..., :-1]
    return moved


def channels_last(x):
    x = x.transpose(1, 2)
    x = F.pad(F.layer_norm(x, x.shape[-1:]), (0, 0, 1, 0))[:, :-1]
    return x.transpose(1, 2)


BEFORE = {
    "input padded and cut": later,
    "longer output": lambda x: F.pad(x, (1, 0)),
    "by strides": by_strides,
    "by a matrix": lambda x: x @ x.new_ones(12, 12).triu(1),
    "after attention": by_attention,
    "looking at values": looking_at_values,
    "written": written,
    "channels last": channels_last,
}


def shifted_before(shift):
    return calls(lambda x, c: c(shift(x)), {})


# Other code lies between the shift and the convolution.


BETWEEN = {
    "by a sum of all before": lambda x: x.cumsum(-1),
    "softmax of channels between": lambda x: x.softmax(dim=1),
    "product with a matrix between": lambda x: (x.mT @ x.new_ones(2, 2)).mT,
    "causal convolution by a function between": lambda x: F.conv1d(
        later(x, 2), x.new_ones(2, 2, 3)
    ),
    "causal pooling between": lambda x: F.max_pool1d(F.pad(x, (2, 0)), 3, 1),
}


def with_code_between(function):
    return calls(lambda x, c: c(function(later(x))), {})


# The convolution's output is shifted.


def joined_with(first_cell):
    """Shift by one cell, which a function makes from the first one."""
    return lambda x: torch.cat([first_cell(x[..., :1]), x[..., :-1]], dim=-1)


BEHIND = {
    "output padded and cut": later,
    "joined with zeros after it": joined_with(torch.zeros_like),
    "joined with ones": joined_with(lambda x: x.new_ones(x.shape)),
    "joined with its first cell": joined_with(lambda x: x),
}


def shifted_behind(shift):
    return calls(lambda x, c: shift(c(x)), {})


# Other uses, and other convolutions.


def cut_behind(x, c):
    return c(F.pad(x, (1, 0)))[..., :-1]


def summed_over_channels(x, c):
    return torch.einsum("bct,cd->bdt", c(later(x)), x.new_ones(2, 2))


def normalised(x, c, norm):
    return c(norm(later(x)).relu())


def after_a_recurrent_network(x, c, lstm):
    return c(later(lstm(x.mT)[0].mT))


def upsampled(x, c):
    return F.interpolate(later(c(x)), scale_factor=3)


def earlier(x, c):
    return c(F.pad(x, (0, 1))[..., 1:])


def anti_causal(x, c):
    return c(later(x.flip(-1))).flip(-1)


def called_twice(x, c):
    return c(later(x)) + c(later(x.relu()))


def gated(x, c):
    first, second = c(x).chunk(2, 1)
    return later(first.tanh() * second.sigmoid())


def before_1x1(x, c, pointwise):
    return later(pointwise(c(x)))


def behind_a_small_scale():
    """As ConvNeXt's layer scale is at first."""
    model = Call(lambda x, c: x + model.scale * later(c(x)), conv(1))
    model.scale = nn.Parameter(torch.full((2, 1), 1e-6))
    return model


def padded_by_a_hook():
    module = Call(lambda x, c: c(x), conv(1))
    module.convs[0].register_forward_pre_hook(lambda module, args: (later(args[0]),))
    return module


OTHERS = {
    "input padded, output cut": calls(cut_behind, {}),
    "before a sum over channels": calls(summed_over_channels, {}),
    "norm and activation between": Form(
        lambda: Call(normalised, conv(1), nn.BatchNorm1d(2).eval())
    ),
    "after a recurrent network": Form(
        lambda: Call(after_a_recurrent_network, conv(1), nn.LSTM(2, 2, batch_first=True))
    ),
    "upsampled": calls(upsampled, {}, stride=1 / 3),
    "earlier": calls(earlier, {}, ahead=True),
    "anti-causal": calls(anti_causal, {}, ahead=True),
    "twice": calls(called_twice, {}),
    "gated": calls(gated, {"out": 4}),
    "1x1 between": calls(before_1x1, {}, {"size": 1}),
    "behind a small scale": Form(behind_a_small_scale),
    "padded by a hook": Form(padded_by_a_hook),
    "even kernel": calls(lambda x, c: c(later(x))[..., :-1], {"size": 4, "padding": 2}),
    "dilated": calls(lambda x, c: c(later(x, 2)), {"dilation": 2}),
    "strided": calls(lambda x, c: c(later(x, 2)), {"size": 4, "stride": 2, "padding": 1}, stride=2),
    "reflect": calls(lambda x, c: c(later(x)), {"padding": 1, "padding_mode": "reflect"}),
}


# Several convolutions.


def deep_then_shifted(x, *convs):
    for c in convs:
        x = c(x)
    return later(x, len(convs))


def shifted_then_deep(x, *convs):
    x = later(x, len(convs))
    for c in convs:
        x = c(x)
    return x


def residual(x, *convs):
    for c in convs:
        x = x + c(x).relu()
    return later(x, len(convs))


def each_shifted(x, first, second):
    return x + second(later(first(later(x))))


SEVERAL = {
    "deep, then shifted": calls(deep_then_shifted, {}, {}, {}),
    "shifted, then deep": calls(shifted_then_deep, {}, {}, {}),
    "residual": calls(residual, {}, {}, {}),
    "each shifted": calls(each_shifted, {}, {}),
}


# Images and videos.


def down(x, rows=1):
    return F.pad(x, (0, 0, rows, 0))[:, :, :-rows]


def by_modules():
    return nn.Sequential(nn.ZeroPad2d((0, 0, 1, 0)), Cut(), conv(2))


class Cut(nn.Module):
    def forward(self, x):
        return x[:, :, :-1, :]


def vertical_and_horizontal(x, vertical, horizontal):
    """A layer of PixelCNN: rows above, and cells to the left in the same row."""
    return down(vertical(down(x))) + horizontal(later(x))


def causal_in_time(x, c):
    return c(F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1])


SPATIAL = {
    "rows above": Form(lambda: Call(lambda x, c: c(down(x)), conv(2)), dims=2, axis=0),
    "rows above, by modules": Form(by_modules, dims=2, axis=0),
    "PixelCNN": Form(
        lambda: Call(vertical_and_horizontal, conv(2), conv(2, (1, 3))), dims=2, axis=0
    ),
    "causal in time": Form(lambda: Call(causal_in_time, conv(3)), dims=3, axis=0),
}


FORMS = {
    **{name: shifted_before(shift) for name, shift in BEFORE.items()},
    **{name: with_code_between(function) for name, function in BETWEEN.items()},
    **{name: shifted_behind(shift) for name, shift in BEHIND.items()},
    **OTHERS,
    **SEVERAL,
    **SPATIAL,
}


def fixed_axes(model, size):
    """The axes along which windows, four cells larger, must not grow, by names of convolutions."""
    convs = find_convs(model, size)
    assert convs.not_measured is None
    windows = {}
    for site in convs.sites:
        sides = map(extent, site.kernel_size, site.dilation)
        windows[site.name] = [side + 4 * (side > 1) for side in sides]
    broken = convs.dependence.broken_by(windows)
    return {name: tuple(sorted(reasons)) for name, reasons in broken.items()}


def converted(model, size, rules):
    return convert_(
        model,
        rules=rules,
        dilated_size="+4",
        init="random",
        positions="uniform",
        budget=1000,
        input_size=size,
    )


def furthest(model, form):
    """How many cells beyond their own place outputs look at most, to the side that is forbidden."""
    size = INPUT[form.dims]
    axis = form.axis % form.dims
    outputs = model(torch.zeros(1, *size, dtype=torch.float64))[0]
    mask = seen(model, size).view(*outputs.shape, *size)
    # (output cells, input cells) along the axis
    mask = mask.movedim((2 + axis, outputs.dim() + 1 + axis), (0, 1)).flatten(2).any(2)
    own, cells = mask.nonzero().T
    displacements = cells - form.stride * own
    return -displacements.min() if form.ahead else displacements.max()


def beside_an_ordinary_one(form):
    """The form's network and, beside it, a convolution that looks to both sides."""
    return WithOrdinary(form.build(), conv(form.dims)).double()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_windows_grow_to_the_side_to_which_outputs_look(form):
    model = beside_an_ordinary_one(form)
    before = furthest(model, form)
    report = converted(model, INPUT[form.dims], DEFAULT)
    assert [skip.name for skip in report.skipped if "not matched" not in skip.reason] == []
    *layers, ordinary = report.layers
    assert layers
    assert ordinary.name == "ordinary"
    assert ordinary.grow == ()
    for layer in layers:
        assert set(layer.grow_of_axes) - {"both"}, layer.name
    for module in model.modules():
        if isinstance(module, DclsConvNd):
            full_window_(module)
    assert furthest(model, form) <= before


def full_window_(layer):
    """Let a layer's elements fill its window."""
    layer.forward = with_random_weights(layer.fuse()).forward


def with_random_weights(plain):
    nn.init.normal_(plain.weight)
    return plain.double()


def test_what_wraps_round_stays():
    """By a plain roll, the first outputs see the end of the map."""
    rolled_alone = calls(lambda x, c: later(c(x)).roll(1, -1), {})
    report = converted(beside_an_ordinary_one(rolled_alone), INPUT[1], DEFAULT)
    assert [layer.name for layer in report.layers] == ["ordinary"]
    (skip,) = report.skipped
    assert "depends only on inputs on one side" in skip.reason


@pytest.mark.parametrize("name", ["longer output", "gated", "strided", "PixelCNN"])
def test_a_rule_may_ask_for_both_sides_all_the_same_and_a_warning_says_so(name):
    form = FORMS[name]
    model = beside_an_ordinary_one(form)
    before = seen(model, INPUT[form.dims])
    with pytest.warns(UserWarning, match="did not look: odd.* one side of it"):
        report = converted(model, INPUT[form.dims], ANY)
    assert len(report.layers) > 1
    assert {layer.grow for layer in report.layers} == {()}
    assert (seen(model, INPUT[form.dims]) & ~before).any()


def swin(x, c):
    """Windows that are shifted, attended to and shifted back."""
    windows = x.roll((-2, -2), (2, 3)).flatten(2)
    attended = (windows @ windows.mT).softmax(-1) @ windows
    return c(x + attended.view(x.shape).roll((2, 2), (2, 3)))


def phases(x, c):
    x = c(x)
    return torch.cat(
        [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1
    )


def same_by_cropping(x, c):
    """TensorFlow's SAME padding at stride 2, as in NASNet."""
    return c(F.pad(x, (1, 0, 1, 0)))[:, :, 1:, 1:]


def cropped(x, c):
    return c(x)[..., :9, :7] + c(F.pad(x, (0, 3, 0, 2)))[..., :9, :7]


def u_net(x, first, second):
    small = first(F.max_pool2d(x, 2))
    large = F.interpolate(small, scale_factor=2)
    rows, columns = x.shape[2] - large.shape[2], x.shape[3] - large.shape[3]
    large = F.pad(large, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    return second(large + x)


ORDINARY = {
    "Swin": (swin, conv(2)),
    "space to depth": (phases, conv(2)),
    "SAME by cropping": (same_by_cropping, conv(2, stride=2, padding=1)),
    "cropped at the end": (cropped, conv(2)),
    "U-Net with odd sizes": (u_net, conv(2), conv(2)),
    "centre crop": (lambda x, c: c(x)[..., 1:-2, 2:-2], conv(2)),
    "reflected, then centred": (lambda x, c: c(F.pad(x, [1] * 4, mode="reflect")), conv(2)),
    "differences": (lambda x, c: c(x)[..., 1:] - c(x)[..., :-1], conv(2)),
    "some channels shifted": (
        lambda x, c: c(torch.cat([down(x[:, :1]), x[:, 1:]], 1)),
        conv(2),
    ),
    "shifted and back": (lambda x, c: c(later(x))[..., 1:], conv(2)),
    "both ways": (lambda x, c, d: c(later(x)) + d(x), conv(2), conv(2)),
    "class token": (
        lambda x, c: c(
            torch.cat([x.mean((2, 3), keepdim=True).flatten(2), x.flatten(2)], 2)[..., 1:].view(
                x.shape
            )
        ),
        conv(2),
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_centred_convolutions_are_not_lost(name):
    use, *convs = ORDINARY[name]
    for own in convs:
        own.reset_parameters()  # seeded
    model = Call(use, *convs)
    assert fixed_axes(model, INPUT[2]) == {}


def before_a_recurrent_network():
    """As in speech and text recognition: the convolutions look to both sides."""
    lstm = nn.LSTM(2, 2, batch_first=True)
    return Call(lambda x, c, d, _: lstm(d(c(x)).mT)[0], conv(1), conv(1), lstm)


LOOK_AHEAD_ALREADY = {
    "before a recurrent network": before_a_recurrent_network,
    "before a sum of all before": lambda: Call(lambda x, c: c(x).cumsum(-1), conv(1)),
    # By one cell, so a longer kernel lets them look further, not to a new side.
    "shifted by less than the kernel reaches": lambda: Call(lambda x, c: c(later(x)), conv(1, 5)),
}


@pytest.mark.parametrize("name", LOOK_AHEAD_ALREADY)
@pytest.mark.parametrize("side", [12, 50])
def test_what_looks_ahead_already_may_look_further(name, side):
    assert fixed_axes(LOOK_AHEAD_ALREADY[name](), (2, side)) == {}


def test_an_uneven_view_whose_map_was_cut_counts_as_one_sided():
    """If the missing cells were the first ones, its outputs look to no later time."""
    model = Call(lambda x, c: c(F.conv1d(later(x, 3)[..., 1:], x.new_ones(2, 2, 3))), conv(1))
    assert fixed_axes(model, INPUT[1]) == {"convs.0": (0,)}


def classified(x, first, second):
    """Causal, but its output has no time."""
    x = second(later(first(later(x)))).relu()
    return x[:, :, -1] + x.mean(2)


def test_a_causal_network_without_time_in_its_output_shows_no_side():
    """Its outputs look at everything. Inside, it is no longer causal: docs/rules.md says so."""
    assert fixed_axes(Call(classified, conv(1), conv(1)), INPUT[1]) == {}


def test_a_window_may_grow_along_the_other_axes():
    assert fixed_axes(FORMS["causal in time"].build(), INPUT[3]) == {"convs.0": (0,)}


def test_a_crop_of_a_strided_map_is_no_side():
    model = Call(lambda x, c: c(x)[..., :-2], conv(1, stride=2, padding=1))
    assert fixed_axes(model, (2, 25)) == {}


def test_the_border_of_a_map_may_cut_what_its_last_cells_reach():
    model = Call(lambda x, c: F.avg_pool1d(c(later(x, 7)), 4), conv(1, 15))
    assert fixed_axes(model, (2, 35)) == {"convs.0": (0,)}


OTHER_ORDERS = {
    "time first": lambda y: y.permute(2, 0, 1),
    "batch and time together": lambda y: y.mT.reshape(-1, y.shape[1]),
    "a list of times": lambda y: list(y.unbind(2)),
    "complex beside real": lambda y: (torch.complex(y, y), y.mean((1, 2))),
    "masked": lambda y: y.index_fill(1, torch.tensor([0]), -torch.inf),
}


@pytest.mark.parametrize("order", OTHER_ORDERS)
def test_outputs_may_have_any_order_of_axes(order):
    model = Call(lambda x, c: OTHER_ORDERS[order](c(later(x))), conv(1))
    assert fixed_axes(model, INPUT[1]) == {"convs.0": (0,)}
