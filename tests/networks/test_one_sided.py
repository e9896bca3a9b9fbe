"""Where outputs look to one side alone, windows grow to that side, and outputs look to no other.

Where they look to both, no convolution is lost.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcls_convert import convert_, find_convs
from dcls_convert.geometry import extent
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.planning.rule_files import parse_rules

from ..dependence import WithOrdinary, seen

EVERYTHING = "format: 1\nrules: [{match: {kernel_size: {min: 2}}%s}]"
DEFAULT = parse_rules(EVERYTHING % "")
ANY = parse_rules(EVERYTHING % ", padding: any")
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
INPUT = {1: (2, 12), 2: (2, 10, 12), 3: (2, 10, 6, 6)}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def taken(x):
    """The cells 0 to 11 of a map that is padded before its first cell, by several functions."""
    return F.pad(x, (1, 0)), torch.arange(12)


def by_an_index(x, c):
    x, cells = taken(x)
    return c(x[..., cells])


def by_index_select(x, c):
    x, cells = taken(x)
    return c(x.index_select(-1, cells))


def by_gather(x, c):
    x, cells = taken(x)
    return c(x.gather(-1, cells.expand(*x.shape[:-1], 12)))


def by_strides(x, c):
    x, _ = taken(x)
    return c(x.contiguous().as_strided((len(x), 2, 12), (2 * 13, 13, 1)))


def by_attention(x, c):
    x = F.scaled_dot_product_attention(x.mT, x.mT, x.mT, is_causal=True).mT
    return c(later(x))


def behind_a_small_scale():
    """As ConvNeXt's layer scale is at first."""
    model = Call(lambda x, c: x + model.scale * later(c(x)), conv(1))
    model.scale = nn.Parameter(torch.full((2, 1), 1e-6))
    return model


def by_a_recurrent_network():
    lstm = nn.LSTM(2, 2, batch_first=True)
    return Call(lambda x, c, _: c(later(lstm(x.mT)[0].mT)), conv(1), lstm)


def conv(dims, size=3, channels=2, out=None, **options):
    options = {"padding": "same"} | options
    return CONVS[dims](channels, out or channels, size, **options)


class Call(nn.Module):
    """Convolutions, and a function that uses them."""

    def __init__(self, use, *convs):
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.use = use

    def forward(self, x):
        return self.use(x, *self.convs)


def later(x, cells=1):
    """Shift along the last axis, to larger indices."""
    return F.pad(x, (cells, 0))[..., :-cells]


def down(x, rows=1):
    return F.pad(x, (0, 0, rows, 0))[:, :, :-rows]


def rolled(x):
    x = x.roll(1, -1)
    x[..., 0] = 0
    return x


def written(x):
    moved = torch.zeros_like(x)
    moved[..., 1:] = x[..., :-1]
    return moved


def copied(x):
    moved = torch.zeros_like(x)
    moved[..., 1:].copy_(x[..., :-1])
    return moved


def transposed_by_keywords(x, one):
    return one(torch.transpose(input=later(x), dim0=1, dim1=2).transpose(1, 2))


def summed_over_channels(x, one):
    return torch.einsum("bct,cd->bdt", one(later(x)), x.new_ones(2, 2))


def joined(x):
    return torch.cat([x.new_zeros(*x.shape[:-1], 1), x[..., :-1]], dim=-1)


def joined_with(first_cell):
    """Shift by one cell, which a function makes from the first one."""

    def use(x, c):
        x = c(x)
        return torch.cat([first_cell(x[..., :1]), x[..., :-1]], dim=-1)

    return use


class Cut(nn.Module):
    def forward(self, x):
        return x[:, :, :-1, :]


def vertical_and_horizontal(x, vertical, horizontal):
    """A layer of PixelCNN: rows above, and cells to the left in the same row."""
    return down(vertical(down(x))) + horizontal(later(x))


def gated(x, c):
    first, second = c(x).chunk(2, 1)
    return later(first.tanh() * second.sigmoid())


def residual(x, *convs):
    for c in convs:
        x = x + c(x).relu()
    return later(x, len(convs))


def channels_last(x, c):
    x = x.transpose(1, 2)
    x = F.pad(F.layer_norm(x, x.shape[-1:]), (0, 0, 1, 0))[:, :-1]
    return c(x.transpose(1, 2))


def classified(x, first, second):
    """Causal, but its output has no time."""
    x = second(later(first(later(x)))).relu()
    return x[:, :, -1] + x.mean(2)


def padded_by_a_hook():
    module = Call(lambda x, c: c(x), conv(1))
    module.convs[0].register_forward_pre_hook(lambda module, args: (later(args[0]),))
    return module


# Number of dimensions, and the module whose larger windows would look too far.
FORMS = {
    "input padded and cut": (1, lambda: Call(lambda x, c: c(later(x)), conv(1))),
    "output padded and cut": (1, lambda: Call(lambda x, c: later(c(x)), conv(1))),
    "by an index": (1, lambda: Call(by_an_index, conv(1))),
    "by index_select": (1, lambda: Call(by_index_select, conv(1))),
    "by gather": (1, lambda: Call(by_gather, conv(1))),
    "by strides": (1, lambda: Call(by_strides, conv(1))),
    "by windows": (1, lambda: Call(lambda x, c: c(taken(x)[0].unfold(-1, 2, 1)[..., 0]), conv(1))),
    "by a matrix": (1, lambda: Call(lambda x, c: c(x @ x.new_ones(12, 12).triu(1)), conv(1))),
    "by a sum of all before": (1, lambda: Call(lambda x, c: c(later(x).cumsum(-1)), conv(1))),
    "turned twice": (
        1,
        lambda: Call(lambda x, c: c(taken(x)[0].flip(-1)[..., 1:].flip(-1)), conv(1)),
    ),
    "after attention": (1, lambda: Call(by_attention, conv(1))),
    "after a recurrent network": (1, by_a_recurrent_network),
    "looking at values": (
        1,
        lambda: Call(lambda x, c: c(later(x / 2 if x.abs().max() > 100 else x)), conv(1)),
    ),
    "behind a small scale": (1, behind_a_small_scale),
    "input padded, output cut": (
        1,
        lambda: Call(lambda x, c: c(F.pad(x, (1, 0)))[..., :-1], conv(1)),
    ),
    "longer output": (1, lambda: Call(lambda x, c: c(F.pad(x, (1, 0))), conv(1))),
    "upsampled": (
        1,
        lambda: Call(lambda x, c: F.interpolate(later(c(x)), scale_factor=3), conv(1)),
    ),
    "cut first": (1, lambda: Call(lambda x, c: c(F.pad(x[..., :-1], (1, 0))), conv(1))),
    "negative padding": (1, lambda: Call(lambda x, c: c(F.pad(x, (1, -1))), conv(1))),
    "earlier": (1, lambda: Call(lambda x, c: c(F.pad(x, (0, 1))[..., 1:]), conv(1))),
    "rolled": (1, lambda: Call(lambda x, c: c(rolled(x)), conv(1))),
    "rolled alone": (1, lambda: Call(lambda x, c: later(c(x)).roll(1, -1), conv(1))),
    "written": (1, lambda: Call(lambda x, c: c(written(x)), conv(1))),
    "copied": (1, lambda: Call(lambda x, c: c(copied(x)), conv(1))),
    "joined with zeros": (1, lambda: Call(lambda x, c: c(joined(x)), conv(1))),
    "transposed by keywords": (1, lambda: Call(transposed_by_keywords, conv(1))),
    "before a sum over channels": (1, lambda: Call(summed_over_channels, conv(1))),
    "joined with zeros after it": (1, lambda: Call(joined_with(torch.zeros_like), conv(1))),
    "joined with ones": (1, lambda: Call(joined_with(lambda x: x.new_ones(x.shape)), conv(1))),
    "joined with zeros of a shape": (
        1,
        lambda: Call(joined_with(lambda x: torch.zeros(x.shape, dtype=x.dtype)), conv(1)),
    ),
    "joined with its first cell": (1, lambda: Call(joined_with(lambda x: x), conv(1))),
    "joined with a product by zero": (1, lambda: Call(joined_with(lambda x: 0 * x), conv(1))),
    "narrow": (1, lambda: Call(lambda x, c: c(F.pad(x, (1, 0)).narrow(2, 0, 12)), conv(1))),
    "even kernel": (1, lambda: Call(lambda x, c: c(later(x))[..., :-1], conv(1, 4, padding=2))),
    "dilated": (1, lambda: Call(lambda x, c: c(later(x, 2)), conv(1, dilation=2))),
    "reflect": (
        1,
        lambda: Call(lambda x, c: c(later(x)), conv(1, padding=1, padding_mode="reflect")),
    ),
    "norm and activation between": (
        1,
        lambda: Call(lambda x, c, n: c(n(later(x)).relu()), conv(1), nn.BatchNorm1d(2).eval()),
    ),
    "softmax of channels between": (
        1,
        lambda: Call(lambda x, c: c(later(x).softmax(dim=1)), conv(1)),
    ),
    "product with a matrix between": (
        1,
        lambda: Call(lambda x, c: c((later(x).mT @ x.new_ones(2, 2)).mT), conv(1)),
    ),
    "product of a matrix between": (
        1,
        lambda: Call(lambda x, c: c(x.new_ones(2, 2) @ later(x)), conv(1)),
    ),
    "1x1 by a function between": (
        1,
        lambda: Call(lambda x, c: c(F.conv1d(later(x), x.new_ones(2, 2, 1))), conv(1)),
    ),
    "causal convolution by a function between": (
        1,
        lambda: Call(lambda x, c: c(F.conv1d(later(x, 3), x.new_ones(2, 2, 3))), conv(1)),
    ),
    "causal pooling between": (
        1,
        lambda: Call(lambda x, c: c(F.max_pool1d(F.pad(x, (3, 0))[..., :-1], 3, 1)), conv(1)),
    ),
    "1x1 between": (1, lambda: Call(lambda x, c, d: later(d(c(x))), conv(1), conv(1, 1))),
    "twice": (1, lambda: Call(lambda x, c: c(later(x)) + c(later(x.relu())), conv(1))),
    "split off": (1, lambda: Call(lambda x, c: c(F.pad(x, (1, 0)).split(12, -1)[0]), conv(1))),
    "anti-causal": (1, lambda: Call(lambda x, c: c(later(x.flip(-1))).flip(-1), conv(1))),
    "padded by a hook": (1, padded_by_a_hook),
    "gated": (1, lambda: Call(gated, conv(1, out=4))),
    "channels last": (1, lambda: Call(channels_last, conv(1))),
    "deep, then shifted": (
        1,
        lambda: Call(lambda x, *cs: later(cs[2](cs[1](cs[0](x))), 3), *[conv(1) for _ in range(3)]),
    ),
    "shifted, then deep": (
        1,
        lambda: Call(lambda x, *cs: cs[2](cs[1](cs[0](later(x, 3)))), *[conv(1) for _ in range(3)]),
    ),
    "residual": (1, lambda: Call(residual, *[conv(1) for _ in range(3)])),
    "each shifted": (
        1,
        lambda: Call(lambda x, *cs: x + cs[1](later(cs[0](later(x)))), conv(1), conv(1)),
    ),
    "strided": (1, lambda: Call(lambda x, c: c(later(x, 2)), conv(1, 4, stride=2, padding=1))),
    "rows above": (2, lambda: Call(lambda x, c: c(down(x)), conv(2))),
    "rows above, by modules": (
        2,
        lambda: nn.Sequential(nn.ZeroPad2d((0, 0, 1, 0)), Cut(), conv(2)),
    ),
    "PixelCNN": (2, lambda: Call(vertical_and_horizontal, conv(2), conv(2, (1, 3)))),
    "causal in time": (
        3,
        lambda: Call(lambda x, c: c(F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1]), conv(3)),
    ),
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


AHEAD = ("earlier", "anti-causal")  # all other forms look back
AXIS = {"rows above": 0, "rows above, by modules": 0, "PixelCNN": 0, "causal in time": 0}
STRIDE = {"strided": 2, "upsampled": 1 / 3}


def furthest(model, form):
    """How many cells beyond their own place outputs look at most, to the side that is forbidden."""
    size = INPUT[FORMS[form][0]]
    axis = AXIS.get(form, len(size) - 2)
    outputs = model(torch.zeros(1, *size, dtype=torch.float64))[0]
    mask = seen(model, size).view(*outputs.shape, *size)
    # (output cells, input cells) along the axis
    mask = mask.movedim((2 + axis, outputs.dim() + 1 + axis), (0, 1)).flatten(2).any(2)
    own, cells = mask.nonzero().T
    displacements = cells - STRIDE.get(form, 1) * own
    return -displacements.min() if form in AHEAD else displacements.max()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "rolled alone"])
def test_windows_grow_to_the_side_to_which_outputs_look(form):
    dims, build = FORMS[form]
    model = WithOrdinary(build(), conv(dims)).double()
    before = furthest(model, form)
    report = converted(model, INPUT[dims], DEFAULT)
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


@pytest.mark.parametrize("form", FORMS)
def test_an_exact_start_computes_the_same(form):
    dims, build = FORMS[form]
    model = WithOrdinary(build(), conv(dims)).double().eval()
    x = torch.randn(2, *INPUT[dims], dtype=torch.float64)
    before = model(x)
    report = convert_(model, rules=DEFAULT, dilated_size="+4", init="exact", input_size=INPUT[dims])
    assert len(report.layers) > (form != "rolled alone")
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-9)


def test_what_wraps_round_stays():
    """By a plain roll, the first outputs see the end of the map."""
    report = converted(WithOrdinary(FORMS["rolled alone"][1](), conv(1)), INPUT[1], DEFAULT)
    assert [layer.name for layer in report.layers] == ["ordinary"]
    (skip,) = report.skipped
    assert "depends only on inputs on one side" in skip.reason


@pytest.mark.parametrize("form", ["longer output", "gated", "strided", "PixelCNN"])
def test_a_rule_may_ask_for_both_sides_all_the_same_and_a_warning_says_so(form):
    dims, build = FORMS[form]
    model = WithOrdinary(build(), conv(dims)).double()
    before = seen(model, INPUT[dims])
    with pytest.warns(UserWarning, match="did not look: odd.* one side of it"):
        report = converted(model, INPUT[dims], ANY)
    assert len(report.layers) > 1
    assert {layer.grow for layer in report.layers} == {()}
    assert (seen(model, INPUT[dims]) & ~before).any()


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


def test_a_causal_network_without_time_in_its_output_shows_no_side():
    """Its outputs look at everything. Inside, it is no longer causal: docs/rules.md says so."""
    assert fixed_axes(Call(classified, conv(1), conv(1)), INPUT[1]) == {}


def test_a_window_may_grow_along_the_other_axes():
    dims, build = FORMS["causal in time"]
    assert fixed_axes(build(), INPUT[dims]) == {"convs.0": (0,)}


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
