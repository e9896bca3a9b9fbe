"""Windows that grow to one side: the layer pads the new cells by itself."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from DCLS.construct.modules import Dcls1d
from torch import nn

from dcls_convert import DclsConv1d, DclsConv2d
from dcls_convert.layers.conv_classes import settings_of
from dcls_convert.layers.dcls_conv import DCLS_LAYERS
from dcls_convert.layers.padded_conv import PADDED_CONVS

from .common import close, randn

MODES = ("zeros", "replicate", "reflect", "circular")
SIDES = ("back", "ahead")
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
# The convolution's options; the window; how it grows along each axis.
CASES = {
    "a kernel of 3": (1, {"kernel_size": 3, "padding": 1}, (8,), ("back",)),
    "even, not padded": (1, {"kernel_size": 4}, (9,), ("ahead",)),
    "dilated groups": (
        1,
        {"kernel_size": 3, "dilation": 3, "padding": 6, "groups": 2},
        (16,),
        ("back",),
    ),
    "stride": (1, {"kernel_size": 5, "stride": 2, "padding": 4}, (12,), ("back",)),
    "same": (1, {"kernel_size": 5, "padding": "same"}, (12,), ("ahead",)),
    "time and frequency": (
        2,
        {"kernel_size": (3, 5), "padding": (2, 2)},
        (8, 9),
        ("back", "both"),
    ),
    "two sides": (2, {"kernel_size": 3, "padding": 1}, (6, 7), ("back", "ahead")),
    "video": (
        3,
        {"kernel_size": (3, 3, 1), "padding": (0, 1, 0)},
        (6, 5, 1),
        ("back", "both", "both"),
    ),
}


def conv_of(name, mode):
    dims, options, window, grow = CASES[name]
    torch.manual_seed(0)
    conv = CONVS[dims](4, 6, padding_mode=mode, **options).double()
    return conv, window, grow


@pytest.mark.filterwarnings("ignore:`torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_on_the_old_cells_the_layer_and_its_fold_compute_what_the_convolution_did(name, mode):
    conv, window, grow = conv_of(name, mode)
    layer = DCLS_LAYERS[len(window)].from_conv(
        conv,
        kernel_count=conv.weight[0, 0].numel(),
        dilated_kernel_size=window,
        grow=grow,
        dense_axes=[2] if len(window) == 3 else (),
    )
    folded = layer.fuse()
    assert isinstance(folded, CONVS[len(window)])
    assert type(folded) is PADDED_CONVS[CONVS[len(window)]]
    input = randn(2, 4, *[15] * len(window))
    expected = conv(input)
    for new in (layer, folded, copy.deepcopy(layer), torch.jit.script(folded)):
        close(new(input), expected)
    for new in (layer, folded):  # for code that pads or cuts a map by these
        assert new.padding == settings_of(conv).padding
        extents = [(k - 1) * d + 1 for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        assert list(new.kernel_size) == extents
        assert set(new.dilation) == {1}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
@pytest.mark.parametrize("name", CASES)
def test_elements_stay_where_they_are_in_a_window_that_grows_further(name, mode):
    conv, window, grow = conv_of(name, mode)
    dense_axes = [2] if len(window) == 3 else ()
    layer = DCLS_LAYERS[len(window)].from_conv(
        conv, kernel_count=4, dilated_kernel_size=window, grow=grow, dense_axes=dense_axes
    )
    input = randn(2, 4, *[20] * len(window))
    expected = layer(input)
    larger = [side if axis in dense_axes else side + 4 for axis, side in enumerate(window)]
    layer.set_window_(larger)
    close(layer(input), expected)
    assert layer.kernel_size == settings_of(conv).extents
    assert layer.padding == settings_of(conv).padding


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("mode", MODES)
def test_a_full_window_sees_nothing_on_the_other_side_that_the_convolution_did_not_see(side, mode):
    """Also where the mode reflects or wraps around: the new cells are zeros there."""
    conv = nn.Conv1d(2, 2, 3, padding=1, padding_mode=mode).double()
    layer = DclsConv1d.from_conv(conv, kernel_count=9, dilated_kernel_size=9, grow=side)
    full = layer.fuse()
    nn.init.normal_(full.weight)
    seen = torch.autograd.functional.jacobian(lambda x: full(x).sum((0, 1)), randn(1, 2, 20))
    outputs, cells = seen.abs().amax((1, 2)).nonzero().T
    beyond = cells - outputs if side == "back" else outputs - cells
    inside = (outputs >= 9) & (outputs < 11)
    assert beyond[inside].max() == 1
    if mode in ("zeros", "replicate"):
        assert beyond.max() == 1
    if mode == "zeros":
        assert beyond.min() == -7


@pytest.mark.parametrize("count", [1, 3])
def test_delays_are_the_authors(count):
    """Hammouamri et al.: Dcls1d, version "gauss", with max_delay - 1 steps before the input."""
    window = 25
    torch.manual_seed(0)
    theirs = Dcls1d(
        6, 5, kernel_count=count, dilated_kernel_size=window, bias=False, version="gauss"
    )
    theirs = theirs.double()
    ours = DclsConv1d(
        6,
        5,
        kernel_count=count,
        dilated_kernel_size=window,
        bias=False,
        interpolation="gaussian",
        grow="back",
        dtype=torch.float64,
    )
    nn.init.uniform_(theirs.P, -(window // 2), window // 2)
    nn.init.uniform_(theirs.SIG, 0.5, 5)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight)
        ours.positions.copy_(theirs.P)
        ours.sigma.copy_(theirs.SIG + 0.27)
    spikes = (randn(3, 6, 40) > 1).double()
    outputs = []
    gradients = []
    for layer, left in ((theirs, window - 1), (ours, 0)):
        input = spikes.clone().requires_grad_()
        output = layer(F.pad(input, (left, 0)))
        outputs.append(output)
        output.backward(randn(*output.shape, seed=1))
        gradients.append(input.grad)
    close(outputs[1], outputs[0], atol=1e-6)  # their profiles are divided by their sum + 1e-7
    close(gradients[1], gradients[0], atol=1e-6)
    for name, their_name in (("weight", "weight"), ("positions", "P"), ("sigma", "SIG")):
        expected = getattr(theirs, their_name).grad
        close(getattr(ours, name).grad, expected, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("window", [25, 26])
@pytest.mark.parametrize("delay", [0, 3, 24])
def test_an_element_is_a_delay_by_whole_steps(window, delay):
    layer = DclsConv1d(1, 1, kernel_count=1, dilated_kernel_size=window, bias=False, grow="back")
    nn.init.ones_(layer.weight)
    nn.init.constant_(layer.positions, (window - 1) // 2 - delay)
    spike = F.one_hot(torch.tensor([[5]]), 40).float()
    assert layer(spike).nonzero().tolist() == [[0, 0, 5 + delay]]


def test_windows_of_layers_made_alone_lie_beside_the_outputs_own_cell():
    for grow in itertools.product(("both", *SIDES), repeat=2):
        layer = DclsConv2d(1, 1, kernel_count=1, dilated_kernel_size=5, grow=grow)
        padded = {"both": (0, 0), "back": (4, 0), "ahead": (0, 4)}
        assert layer.new_cells == [padded[side] for side in grow]
        cut = [4 * (side == "both") for side in grow]  # the padding is 0
        assert layer(torch.zeros(1, 1, 7, 8)).shape == (1, 1, 7 - cut[0], 8 - cut[1])


def test_the_cells_of_a_window_may_be_spread():
    layer = DclsConv1d(1, 1, kernel_count=1, dilated_kernel_size=5, dilation=3, grow="back")
    spike = F.one_hot(torch.tensor([[5]]), 30).float()
    nn.init.constant_(layer.positions, -1.0)  # three cells of three steps back
    assert (layer(spike) - layer.bias).nonzero().tolist() == [[0, 0, 5 + 9]]


def test_a_layer_forgets_how_it_convolved_with_another_interpolation():
    options = {"kernel_count": 2, "dilated_kernel_size": 7, "groups": 4, "padding": 3}
    layer = DclsConv2d(4, 4, interpolation="gaussian", **options)
    plain = DclsConv2d(4, 4, **options)
    image = torch.randn(1, 4, 9, 9)
    layer.eval()(image)
    layer.set_interpolation_("bilinear")
    plain.load_state_dict(layer.state_dict())
    close(layer(image), plain.eval()(image))
    with pytest.raises(ValueError, match="needs a sigma"):
        layer.set_interpolation_("triangle")


@pytest.mark.parametrize(
    "options",
    [
        {"grow": "before"},
        {"grow": None},
        {"grow": [["back"], "both"]},
        {"grow": ["back", "back", "both"]},
        {"grow": "back", "padding": "dynamic_same"},
    ],
)
def test_other_sides_are_refused(options):
    with pytest.raises(ValueError, match="grow"):
        DclsConv2d(1, 1, kernel_count=1, dilated_kernel_size=5, **options)
