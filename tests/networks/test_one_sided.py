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


FORMS = {}


def form(*convs, dims=1, **fields):
    """Add a form: a function of a map and of convolutions with these options."""

    def add(use):
        FORMS[use.__name__] = Form(
            lambda: Call(use, *[conv(dims, **options) for options in convs]), dims, **fields
        )
        return use

    return add


def built_form(build):
    """Add a form that a function builds."""
    FORMS[build.__name__] = Form(build)
    return build


# The map is shifted before the convolution, or behind it.


@form({})
def shifted_before(x, c):
    return c(later(x))


@form({})
def padded_before(x, c):
    """The output is longer."""
    return c(F.pad(x, (1, 0)))


@form({})
def shifted_behind(x, c):
    return later(c(x))


@form({})
def joined_behind_its_first_cell(x, c):
    x = c(x)
    return torch.cat([x[..., :1], x[..., :-1]], dim=-1)


@form({}, ahead=True)
def anti_causal(x, c):
    return c(later(x.flip(-1))).flip(-1)


@built_form
def padded_by_a_hook():
    module = Call(lambda x, c: c(x), conv(1))
    module.convs[0].register_forward_pre_hook(lambda module, args: (later(args[0]),))
    return module


# Other code lies before or behind it.


@form({})
def after_a_sum_of_all_before(x, c):
    return c(later(x).cumsum(-1))


@built_form
def after_a_recurrent_network():
    lstm = nn.LSTM(2, 2, batch_first=True)
    return Call(lambda x, c, lstm: c(later(lstm(x.mT)[0].mT)), conv(1), lstm)


@form({})
def after_causal_pooling(x, c):
    return c(F.max_pool1d(F.pad(later(x), (2, 0)), 3, 1))


@form({}, stride=1 / 3)
def upsampled(x, c):
    return F.interpolate(later(c(x)), scale_factor=3)


@built_form
def behind_a_small_scale():
    """As ConvNeXt's layer scale is at first."""
    model = Call(lambda x, c: x + model.scale * later(c(x)), conv(1))
    model.scale = nn.Parameter(torch.full((2, 1), 1e-6))
    return model


@form({"out": 4})
def gated(x, c):
    first, second = c(x).chunk(2, 1)
    return later(first.tanh() * second.sigmoid())


# The convolution itself is another one.


@form({"size": 4, "padding": 2})
def even_kernel(x, c):
    return c(later(x))[..., :-1]


@form({"dilation": 2})
def dilated(x, c):
    return c(later(x, 2))


@form({"size": 4, "stride": 2, "padding": 1}, stride=2)
def strided(x, c):
    return c(later(x, 2))


@form({"padding": 1, "padding_mode": "reflect"})
def reflected(x, c):
    return c(later(x))


# There are several convolutions or calls.


@form({})
def called_twice(x, c):
    return c(later(x)) + c(later(x.relu()))


@form({}, {}, {})
def shifted_then_deep(x, *convs):
    x = later(x, len(convs))
    for c in convs:
        x = c(x)
    return x


@form({}, {}, {})
def residual(x, *convs):
    for c in convs:
        x = x + c(x).relu()
    return later(x, len(convs))


@form({}, {})
def each_shifted(x, first, second):
    return x + second(later(first(later(x))))


# Images and videos.


def down(x):
    return F.pad(x, (0, 0, 1, 0))[:, :, :-1]


@form({}, dims=2, axis=0)
def rows_above(x, c):
    return c(down(x))


@form({}, {"size": (1, 3)}, dims=2, axis=0)
def pixel_cnn(x, vertical, horizontal):
    """A layer of PixelCNN: rows above, and cells to the left in the same row."""
    return down(vertical(down(x))) + horizontal(later(x))


@form({}, dims=3, axis=0)
def causal_in_time(x, c):
    return c(F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1])


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
    rolled = Form(lambda: Call(lambda x, c: later(c(x)).roll(1, -1), conv(1)))
    report = converted(beside_an_ordinary_one(rolled), INPUT[1], DEFAULT)
    assert [layer.name for layer in report.layers] == ["ordinary"]
    (skip,) = report.skipped
    assert "depends only on inputs on one side" in skip.reason


@pytest.mark.parametrize("name", ["padded_before", "gated", "strided", "pixel_cnn"])
def test_a_rule_may_ask_for_both_sides_all_the_same_and_a_warning_says_so(name):
    form = FORMS[name]
    model = beside_an_ordinary_one(form)
    before = seen(model, INPUT[form.dims])
    with pytest.warns(UserWarning, match="did not look: odd.* one side of it"):
        report = converted(model, INPUT[form.dims], ANY)
    assert len(report.layers) > 1
    assert {layer.grow for layer in report.layers} == {()}
    assert (seen(model, INPUT[form.dims]) & ~before).any()


ORDINARY = {}


def ordinary(*convs):
    """Add a function of an image and of 2-D convolutions with these options."""

    def add(use):
        ORDINARY[use.__name__] = (use, convs)
        return use

    return add


@ordinary({})
def swin(x, c):
    """Windows that are shifted, attended to and shifted back."""
    windows = x.roll((-2, -2), (2, 3)).flatten(2)
    attended = (windows @ windows.mT).softmax(-1) @ windows
    return c(x + attended.view(x.shape).roll((2, 2), (2, 3)))


@ordinary({})
def space_to_depth(x, c):
    x = c(x)
    return torch.cat(
        [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1
    )


@ordinary({"stride": 2, "padding": 1})
def same_by_cropping(x, c):
    """TensorFlow's SAME padding at stride 2, as in NASNet."""
    return c(F.pad(x, (1, 0, 1, 0)))[:, :, 1:, 1:]


@ordinary({})
def cropped_at_the_end(x, c):
    return c(x)[..., :9, :7] + c(F.pad(x, (0, 3, 0, 2)))[..., :9, :7]


@ordinary({}, {})
def u_net_with_odd_sizes(x, first, second):
    small = first(F.max_pool2d(x, 2))
    large = F.interpolate(small, scale_factor=2)
    rows, columns = x.shape[2] - large.shape[2], x.shape[3] - large.shape[3]
    large = F.pad(large, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    return second(large + x)


@ordinary({})
def cropped_to_the_centre(x, c):
    return c(x)[..., 1:-2, 2:-2]


@ordinary({})
def padded_by_reflection(x, c):
    return c(F.pad(x, [1] * 4, mode="reflect"))


@ordinary({})
def differences(x, c):
    return c(x)[..., 1:] - c(x)[..., :-1]


@ordinary({})
def some_channels_shifted(x, c):
    return c(torch.cat([down(x[:, :1]), x[:, 1:]], 1))


@ordinary({})
def shifted_and_back(x, c):
    return c(later(x))[..., 1:]


@ordinary({}, {})
def shifted_and_not(x, c, d):
    return c(later(x)) + d(x)


@ordinary({})
def class_token(x, c):
    """A token before the pixels, which is cut off later."""
    tokens = torch.cat([x.mean((2, 3))[..., None], x.flatten(2)], 2)
    return c(tokens[..., 1:].view(x.shape))


@pytest.mark.parametrize("name", ORDINARY)
def test_centred_convolutions_are_not_lost(name):
    use, convs = ORDINARY[name]
    model = Call(use, *[conv(2, **options) for options in convs])
    assert fixed_axes(model, INPUT[2]) == {}


def before_a_recurrent_network():
    """As in speech and text recognition: the convolutions look to both sides."""
    lstm = nn.LSTM(2, 2, batch_first=True)
    return Call(lambda x, c, d, _: lstm(d(c(x)).mT)[0], conv(1), conv(1), lstm)


def before_a_sum_of_all_before():
    return Call(lambda x, c: c(x).cumsum(-1), conv(1))


def shifted_by_less_than_the_kernel_reaches():
    """By one cell, so a longer kernel lets outputs look further, not to a new side."""
    return Call(lambda x, c: c(later(x)), conv(1, 5))


@pytest.mark.parametrize(
    "build",
    [
        before_a_recurrent_network,
        before_a_sum_of_all_before,
        shifted_by_less_than_the_kernel_reaches,
    ],
)
@pytest.mark.parametrize("side", [12, 50])
def test_what_looks_ahead_already_may_look_further(build, side):
    assert fixed_axes(build(), (2, side)) == {}


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
    assert fixed_axes(FORMS["causal_in_time"].build(), INPUT[3]) == {"convs.0": (0,)}


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
