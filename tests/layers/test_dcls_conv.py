"""Laws of the DCLS layers: nothing of a convolution is lost on the way there and back, and ties hold.

Axes: O output channels, I input channels per group, E kernel elements, A learnt axes. Windows are never square.
"""

import copy
import inspect
import io
import itertools
import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from dcls_convert.layers.dcls_conv import DCLS_LAYERS, DclsConv1d, DclsConv2d, DclsConv3d
from dcls_convert.layers.elements import largest_elements
from dcls_convert.layers.geometry import extent
from dcls_convert.layers.interpolation import INTERPOLATIONS

FLOAT64_ATOL = 1e-12  # some thousand roundings of 2e-16, of values of order 1

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
OPTIONS = {"kernel_count": 4, "dilated_kernel_size": (5, 8)}  # of a small DclsConv2d
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]
every_interpolation = pytest.mark.parametrize("interpolation", list(INTERPOLATIONS))
# torch says so of every convolution with padding='same' and an even kernel.
even_same = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
laws = settings(max_examples=80, deadline=None, derandomize=True, database=None)


def close(actual, expected, atol=FLOAT64_ATOL):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(module, seed=0):
    """The module in float64, with random parameters, so that no test hangs on the global seed."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def scattered(layer, seed=0):
    """The layer in float64, its elements anywhere in the window, of any width."""
    seeded(layer, seed)
    with torch.no_grad():
        layer.positions.mul_(2)
        if layer.sigma is not None:
            layer.sigma.abs_().add_(0.3)
    layer.clamp_positions_()
    return layer


# The constructor.


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_signature_is_that_of_the_convolution_but_for_the_window(dims):
    ours = inspect.signature(DCLS_LAYERS[dims]).parameters
    theirs = inspect.signature(CONVS[dims]).parameters
    assert list(ours)[:2] == list(theirs)[:2] == ["in_channels", "out_channels"]
    assert theirs.keys() - ours.keys() == {"kernel_size"}
    assert ours.keys() - theirs.keys() == {"kernel_count", "dilated_kernel_size", "interpolation", "dense_axes"}
    assert all(ours[name].default == theirs[name].default for name in theirs.keys() & ours.keys())


@every_interpolation
def test_parameters_have_the_shapes_and_starting_values_of_the_paper(interpolation):
    layer = DclsConv3d(
        64, 32, kernel_count=9, dilated_kernel_size=(5, 8, 7), groups=2, interpolation=interpolation, dense_axes=(1,)
    )
    layer.reset_parameters(torch.Generator().manual_seed(0))
    assert layer.weight.shape == (32, 32, 8, 9)
    assert layer.positions.shape == (2, 32, 32, 8, 9)
    assert layer.bias.shape == (32,)
    assert layer.learnt_axes == (0, 2)
    # 147456 draws: the deviation of N(0, 0.5) is known to a few thousandths.
    assert abs(layer.positions.mean().item()) < 0.01
    assert abs(layer.positions.std().item() - 0.5) < 0.01
    bound = 1 / math.sqrt(32 * 8 * 9)
    assert bound * 0.99 < layer.weight.abs().max() <= bound
    start = {"bilinear": None, "triangle": 1.0, "gaussian": 0.5}[interpolation]
    assert layer.sigma is None if start is None else (layer.sigma == start).all()


def test_reset_draws_from_the_given_generator_alone():
    layer = DclsConv2d(4, 4, **OPTIONS, interpolation="gaussian")

    def drawn():
        layer.reset_parameters(torch.Generator().manual_seed(3))
        return [parameter.detach().clone() for parameter in layer.parameters()]

    state = torch.get_rng_state()
    assert all(torch.equal(*pair) for pair in zip(drawn(), drawn(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_channels": 3, "groups": 2}, "in_channels=3 must be a positive multiple of groups=2"),
        ({"out_channels": 3, "groups": 2}, "out_channels=3 must be a positive multiple of groups=2"),
        ({"groups": 0}, "groups=0"),
        ({"in_channels": 0}, "in_channels=0"),
        ({"out_channels": -2}, "out_channels=-2"),
        ({"kernel_count": 0}, "kernel_count=0 must be an integer of at least 1"),
        ({"dilated_kernel_size": 0}, "dilated_kernel_size=0 must be an integer of at least 1, or 2 of them"),
        ({"dilated_kernel_size": (5, -8)}, "dilated_kernel_size"),
        ({"dilated_kernel_size": (5,)}, "dilated_kernel_size.* 2 of them"),
        ({"dilated_kernel_size": (5, 8, 7)}, "dilated_kernel_size.* 2 of them"),
        ({"dilated_kernel_size": (5, 8.0)}, "dilated_kernel_size"),
        ({"stride": 0}, "stride=0"),
        ({"stride": (1, 2, 3)}, "stride"),
        ({"dilation": 0}, "dilation=0"),
        ({"padding": -1}, "padding=-1"),
        ({"padding": (1, 1, 1)}, "padding"),
        ({"padding": "sane"}, "padding='sane' must be 'same', 'valid', 'dynamic_same' or integers"),
        ({"padding": "dynamic_same", "padding_mode": "reflect"}, "padding='dynamic_same' is for 2-D with zeros"),
        ({"padding": "same", "stride": (1, 2)}, r"padding='same' needs stride 1, not \(1, 2\)"),
        ({"padding_mode": "reflection"}, "'reflection' must be one of zeros, reflect, replicate, circular"),
        ({"interpolation": "gauss"}, "'gauss' is not known; it is one of bilinear, triangle, gaussian"),
        ({"dense_axes": (2,)}, "dense_axes"),
        ({"dense_axes": (-1,)}, "dense_axes"),
        ({"dense_axes": (0, 1)}, "leave one to be learnt"),
    ],
)
def test_bad_arguments_are_refused_at_construction(changes, message):
    arguments = {"in_channels": 2, "out_channels": 2, **OPTIONS, **changes}
    with pytest.raises(ValueError, match=message):
        DclsConv2d(arguments.pop("in_channels"), arguments.pop("out_channels"), **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("kernel_count", 2.5), ("kernel_count", "auto"), ("dilated_kernel_size", 5.0), ("stride", None), ("groups", "2")],
)
def test_arguments_of_the_wrong_kind_are_refused_by_their_name(name, value):
    with pytest.raises(ValueError, match=name):
        DclsConv2d(2, 2, **{**OPTIONS, name: value})


def test_a_dense_axis_named_twice_is_refused_at_construction():
    with pytest.raises(ValueError, match="dense_axes"):
        DclsConv3d(2, 2, kernel_count=3, dilated_kernel_size=5, dense_axes=(1, 1))


def test_repr_says_all_that_differs_from_the_default():
    plain = DclsConv1d(2, 4, kernel_count=3, dilated_kernel_size=7)
    assert repr(plain) == (
        "DclsConv1d(2, 4, kernel_count=3, dilated_kernel_size=(7,), stride=(1,), interpolation=bilinear)"
    )
    options = {"stride": 2, "padding": (1, 2), "dilation": 2, "groups": 2, "bias": False, "padding_mode": "reflect"}
    full = DclsConv2d(4, 8, **OPTIONS, **options, interpolation="gaussian", dense_axes=(1,))
    assert repr(full) == (
        "DclsConv2d(4, 8, kernel_count=4, dilated_kernel_size=(5, 8), stride=(2, 2), padding=(1, 2), dilation=(2, 2), "
        "groups=2, bias=False, padding_mode=reflect, dense_axes=(1,), interpolation=gaussian)"
    )
    assert "padding='same'" in repr(DclsConv2d(4, 8, **OPTIONS, padding="same"))
    assert "positions=tied" in repr(Stage().first)


# From a convolution, and back to one.


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A convolution, and a window that may take its place."""

    kernel_size: tuple[int, ...]
    window: tuple[int, ...]
    options: dict[str, Any]  # further arguments of the convolution
    channels: tuple[int, int]

    @property
    def dims(self):
        return len(self.window)

    def conv(self, **factory):
        return CONVS[self.dims](*self.channels, self.kernel_size, **self.options, **factory)

    def input_shape(self, *, dilated_window=False):
        # Large enough for all paddings: reflect needs more cells than it adds, which is at most half the window and 2.
        spacings = self.options["dilation"] if dilated_window else (1,) * self.dims
        extents = [extent(size, spacing) for size, spacing in zip(self.window, spacings, strict=True)]
        return (2, self.channels[0], *[size + 3 + axis for axis, size in enumerate(extents)])


@st.composite
def conv_geometries(draw):
    """Odd and even kernels of 1 to 3 dimensions, with everything that a convolution may have."""
    dims = draw(st.sampled_from([1, 2, 2, 3]))

    def sizes(low, high):
        return tuple(draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims)))

    largest = 5 if dims < 3 else 3
    kernel_size, dilation, grown = sizes(1, largest), sizes(1, 2), sizes(0, 2 if dims < 3 else 1)
    stride, groups = sizes(1, 3), draw(st.integers(1, 3))
    padding = draw(st.one_of(st.integers(0, 2), st.just(sizes(0, 2)), st.sampled_from(["valid", "same"])))
    options = {
        "stride": 1 if padding == "same" else stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])),
    }
    window = tuple(extent(k, d) + 2 * g for k, d, g in zip(kernel_size, dilation, grown, strict=True))
    channels = (groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)))
    return Geometry(kernel_size=kernel_size, window=window, options=options, channels=channels)


@even_same
@laws
@given(geometry=conv_geometries())
def test_as_many_elements_as_cells_give_the_same_layer(geometry):
    conv = seeded(geometry.conv())
    x = randn(*geometry.input_shape())
    expected = conv(x)
    layer = DCLS_LAYERS[geometry.dims].from_conv(
        conv, kernel_count=math.prod(geometry.kernel_size), dilated_kernel_size=geometry.window
    )
    assert layer.dilated_kernel_size == layer.kernel_size == geometry.window
    close(layer(x), expected)
    # The old kernel's cells stand in the middle of the window, to the last bit, and nothing beside them.
    kernel = torch.zeros_like(layer.kernel())
    spacing = geometry.options["dilation"]
    middle = [
        slice((w - extent(k, d)) // 2, (w + extent(k, d)) // 2, d)
        for k, d, w in zip(geometry.kernel_size, spacing, geometry.window, strict=True)
    ]
    kernel[:, :, *middle] = conv.weight.detach()
    assert torch.equal(layer.kernel().detach(), kernel)


@even_same
@laws
@given(geometry=conv_geometries(), count=st.integers(1, 12), interpolation=st.sampled_from(list(INTERPOLATIONS)))
def test_output_size_never_changes(geometry, count, interpolation):
    conv = geometry.conv(device="meta")
    x = torch.empty(geometry.input_shape(), device="meta")
    layer = DCLS_LAYERS[geometry.dims].from_conv(
        conv, kernel_count=count, dilated_kernel_size=geometry.window, interpolation=interpolation
    )
    assert layer(x).shape == conv(x).shape
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("kernel_size", "dilation", "window", "message"),
    [
        (7, 1, 16, "window 16 .*must be odd as the kernel 7 is.*use 15 or 17"),
        (4, 1, 7, "must be even as the kernel 4 is.*use 6 or 8"),
        (2, 2, 4, "must be odd as the kernel 2 with dilation 2, extent 3, is.*use 3 or 5"),
        (7, 1, 8, "use 7 or 9"),
        (7, 1, 5, "window 5 .*is smaller than the kernel 7 that it replaces; use 7 or more"),
        (3, 3, 5, "is smaller than the kernel 3 with dilation 3, extent 7, that it replaces; use 7 or more"),
    ],
)
def test_a_window_that_would_shift_or_cut_the_kernel_is_refused(kernel_size, dilation, window, message):
    conv = nn.Conv2d(2, 2, (3, kernel_size), dilation=(1, dilation))
    with pytest.raises(ValueError, match=message):
        DclsConv2d.from_conv(conv, kernel_count=3, dilated_kernel_size=(5, window))
    with pytest.raises(ValueError, match=message.replace(" .*", " ")):
        DclsConv1d.from_conv(
            nn.Conv1d(2, 2, kernel_size, dilation=dilation), kernel_count=3, dilated_kernel_size=window
        )


@pytest.mark.parametrize("window", [(7,), (7, 7, 7), 7.0])
def test_a_window_of_the_wrong_kind_is_refused_by_its_name(window):
    with pytest.raises(ValueError, match="dilated_kernel_size"):
        DclsConv2d.from_conv(nn.Conv2d(2, 2, 3), kernel_count=3, dilated_kernel_size=window)


@even_same
@laws
@given(
    geometry=conv_geometries(),
    interpolation=st.sampled_from(list(INTERPOLATIONS)),
    count=st.integers(1, 5),
    dense_axes=st.sampled_from([(), (0,), (1,), (0, 2), (2, 1)]),
)
def test_fusing_keeps_the_output_and_leaves_a_plain_convolution(geometry, interpolation, count, dense_axes):
    dense_axes = [axis for axis in dense_axes if axis < geometry.dims and geometry.dims > 1]
    layer = DCLS_LAYERS[geometry.dims](
        *geometry.channels,
        kernel_count=count,
        dilated_kernel_size=geometry.window,
        interpolation=interpolation,
        dense_axes=dense_axes,
        **geometry.options,
    )
    x = randn(*geometry.input_shape(dilated_window=True))
    fused = scattered(layer).fuse()
    assert type(fused) is CONVS[geometry.dims]
    close(fused(x), layer(x))
    # It cannot be told from one that was made as such.
    plain = CONVS[geometry.dims](*geometry.channels, geometry.window, **geometry.options)
    assert repr(fused) == repr(plain)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert fused.weight.is_contiguous()


def test_a_fused_layer_without_bias_can_be_given_one():
    fused = DclsConv2d(2, 2, **OPTIONS, bias=False).fuse()
    assert fused.__dict__.keys() == nn.Conv2d(2, 2, (5, 8), bias=False).__dict__.keys()
    fused.register_parameter("bias", nn.Parameter(torch.ones(2)))
    assert fused.bias is not None


@pytest.mark.parametrize("dense_axes", [(0,), (1,)])
@every_interpolation
def test_dense_axes_start_from_the_convolution_too(dense_axes, interpolation):
    conv = seeded(nn.Conv2d(2, 4, (3, 4), padding="valid"))
    (learnt,) = {0, 1} - set(dense_axes)
    window = tuple(size if axis in dense_axes else size + 4 for axis, size in enumerate(conv.kernel_size))
    layer = DclsConv2d.from_conv(
        conv,
        kernel_count=conv.kernel_size[learnt],
        dilated_kernel_size=window,
        interpolation=interpolation,
        dense_axes=dense_axes,
    )
    x = randn(1, 2, 12, 13)
    if interpolation == "gaussian":  # which spreads its elements
        assert layer(x).shape == conv(x).shape
    else:
        close(layer(x), conv(x))


@pytest.mark.parametrize(
    ("kernel_size", "dilation", "window"), [((3, 3), 1, (5, 7)), ((3, 3), (2, 1), (5, 7)), ((1, 3), 1, (3, 7))]
)
def test_a_dense_axis_that_is_not_that_of_the_convolution_is_refused(kernel_size, dilation, window):
    # The last case would otherwise repeat the one row of the kernel in all three of the window.
    conv = nn.Conv2d(2, 2, kernel_size, dilation=dilation)
    with pytest.raises(ValueError, match="dense"):
        DclsConv2d.from_conv(conv, kernel_count=3, dilated_kernel_size=window, dense_axes=(0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("trainable", [(True, True), (False, False), (False, True), (True, False)])
def test_state_of_the_convolution_is_kept_there_and_back(dtype, training, trainable):
    conv = nn.Conv2d(2, 4, (3, 4), dtype=dtype).train(training)
    conv.weight.requires_grad_(trainable[0])
    conv.bias.requires_grad_(trainable[1])
    conv.note = "kept"
    layer = DclsConv2d.from_conv(conv, kernel_count=5, dilated_kernel_size=(5, 8), interpolation="gaussian")
    fused = layer.fuse()
    for new in (layer, fused):
        assert new.training is training
        assert new.note == "kept"
        assert new.bias is conv.bias
        assert new.bias.requires_grad is trainable[1]
        assert {parameter.dtype for parameter in new.parameters()} == {dtype}
    # The elements are trained if the weight was.
    assert {layer.weight.requires_grad, layer.positions.requires_grad, layer.sigma.requires_grad} == {trainable[0]}
    assert fused.weight.requires_grad is trainable[0]


@pytest.mark.parametrize("device", ["meta", *DEVICES])
def test_device_is_kept_there_and_back(device):
    conv = nn.Conv2d(2, 4, (3, 4), device=device)
    layer = DclsConv2d.from_conv(conv, kernel_count=5, dilated_kernel_size=(5, 8), interpolation="gaussian")
    for new in (layer, layer.fuse()):
        assert {parameter.device for parameter in new.parameters()} == {conv.weight.device}


def test_hooks_go_along_and_their_handles_still_remove_them():
    conv = seeded(nn.Conv2d(2, 4, (3, 4)))
    calls = []

    def hook(name):
        return lambda *arguments: calls.append((name, type(arguments[0]).__name__))

    handles = [
        conv.register_forward_pre_hook(hook("before")),
        conv.register_forward_pre_hook(hook("before, keywords"), with_kwargs=True),
        conv.register_forward_hook(hook("after")),
        conv.register_forward_hook(hook("after, keywords"), with_kwargs=True),
        conv.register_forward_hook(hook("always"), always_call=True),
        conv.register_full_backward_pre_hook(hook("before backward")),
        conv.register_full_backward_hook(hook("after backward")),
    ]
    x = randn(1, 2, 9, 9)
    layer = DclsConv2d.from_conv(conv, kernel_count=5, dilated_kernel_size=(5, 8))
    for module in (conv, layer, layer.fuse()):
        calls.clear()
        module(x.clone().requires_grad_()).sum().backward()
        order = [
            "before",
            "before, keywords",
            "after",
            "after, keywords",
            "always",
            "before backward",
            "after backward",
        ]
        assert calls == [(name, type(module).__name__) for name in order]
    for handle in handles:
        handle.remove()
    calls.clear()
    for module in (layer, layer.fuse()):
        module(x.clone().requires_grad_()).sum().backward()
    assert calls == []


@pytest.mark.parametrize("device", DEVICES)
@every_interpolation
def test_neither_from_conv_nor_fuse_draws_from_the_global_generator(device, interpolation):
    conv = nn.Conv2d(2, 4, (3, 4), device=device)

    def states():
        return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]

    before = states()
    layer = DclsConv2d.from_conv(conv, kernel_count=5, dilated_kernel_size=(5, 8), interpolation=interpolation)
    layer.fuse()
    assert all(torch.equal(*pair) for pair in zip(before, states(), strict=True))


# The elements chosen.

CHOICES = [((3, 4), (2, 1), (7, 8), ()), ((3, 4), (2, 1), (7, 8), (0,)), ((2, 3, 2), (1, 2, 3), (4, 7, 6), (1,))]


@pytest.mark.parametrize(("kernel_size", "dilation", "window", "dense_axes"), CHOICES)
@pytest.mark.parametrize("layers", [1, 3])
def test_the_cells_of_largest_energy_are_kept_at_places_that_all_layers_share(
    kernel_size, dilation, window, dense_axes, layers
):
    kernels = [randn(2, 3, *kernel_size, seed=seed) for seed in range(layers)]
    weights, positions = largest_elements(
        kernels, kernel_count=3, dilation=dilation, size=window, dense_axes=dense_axes
    )
    cells = [range(size) for size in kernel_size]
    learnt = [axis for axis in range(len(window)) if axis not in dense_axes]
    for o, i, *dense in itertools.product(range(2), range(3), *[cells[axis] for axis in dense_axes]):
        fixed = dict(zip(dense_axes, dense, strict=True))
        candidates = [cell for cell in itertools.product(*cells) if all(cell[axis] == at for axis, at in fixed.items())]
        energy = {cell: sum(kernel[o, i, *cell].item() ** 2 for kernel in kernels) for cell in candidates}
        kept = sorted(sorted(candidates, key=energy.get)[-3:])
        for kernel, weight in zip(kernels, weights, strict=True):
            assert weight[o, i, *dense].tolist() == [kernel[o, i, *cell].item() for cell in kept]
        # A kernel of odd or even extent starts half its extent before the centre.
        for axis, places in zip(learnt, positions[:, o, i, *dense].tolist(), strict=True):
            start = -(extent(kernel_size[axis], dilation[axis]) // 2)
            assert places == [start + cell[axis] * dilation[axis] for cell in kept]


def test_equal_energies_are_decided_by_the_order_of_the_cells():
    kernel = torch.tensor([[1.0, -2.0, 1.0], [2.0, -1.0, 1.0]], dtype=torch.float64)[None, None]
    (weight,), positions = largest_elements([kernel], kernel_count=4, dilation=(1, 1), size=(4, 5))
    assert weight.flatten().tolist() == [1, -2, 1, 2]
    assert positions[:, 0, 0].tolist() == [[-1, -1, -1, 0], [-1, 0, 1, -1]]


def test_elements_beyond_the_cells_weigh_nothing_and_lie_in_the_centre():
    conv = seeded(nn.Conv2d(2, 4, (2, 3), padding=1))
    layer = DclsConv2d.from_conv(conv, kernel_count=9, dilated_kernel_size=(4, 7))
    assert (layer.weight[..., 6:] == 0).all()
    assert (layer.positions[..., 6:] == 0).all()
    x = randn(1, 2, 9, 9)
    close(layer(x), conv(x))


# Positions stay inside the window.


def strayed(**options):
    """A layer after far too large a step: coordinates on both sides of the window, sigmas below their least value."""
    layer = seeded(DclsConv2d(2, 4, kernel_count=6, dilated_kernel_size=(5, 8), interpolation="gaussian", **options))
    with torch.no_grad():
        layer.positions.mul_(9)
        layer.sigma.fill_(0.1)
    return layer


def assert_inside(positions):
    """Both borders are met, and none is passed: those of (5, 8) are (-2, 2) and (-4, 3)."""
    assert [(axis.min().item(), axis.max().item()) for axis in positions] == [(-2, 2), (-4, 3)]


def test_a_forward_in_training_brings_positions_back_into_the_window():
    layer, x = strayed(), randn(1, 2, 9, 9)
    positions = layer.positions
    expected = copy.deepcopy(layer).eval()(x)
    close(layer(x), expected)
    assert layer.positions is positions
    assert_inside(positions)
    assert (layer.sigma == 0.27).all()


def test_a_forward_in_evaluation_takes_the_border_and_leaves_the_parameters():
    layer, x = strayed().eval(), randn(1, 2, 9, 9)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    output = layer(x)
    assert all(torch.equal(*pair) for pair in zip(before, layer.parameters(), strict=True))
    layer.clamp_positions_()
    assert_inside(layer.positions)
    close(layer(x), output)


def test_saved_positions_are_inside_the_window():
    layer = strayed().eval()
    saved = layer.state_dict()
    assert_inside(saved["positions"])
    assert (saved["sigma"] == 0.27).all()
    stage = Stage()
    with torch.no_grad():
        stage.shared_positions.mul_(99)
    assert_inside(stage.state_dict()["shared_positions"])


@every_interpolation
def test_a_layer_may_be_used_twice_in_a_step(interpolation):
    layer = scattered(DclsConv2d(2, 2, **OPTIONS, padding=(2, 4), interpolation=interpolation))
    copies = [copy.deepcopy(layer), copy.deepcopy(layer)]
    x = randn(1, 2, 9, 9)
    layer(layer(x)).square().sum().backward()
    copies[1](copies[0](x)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        close(parameter.grad, sum(one.get_parameter(name).grad for one in copies), atol=1e-9)  # sums of about 1e3


@pytest.mark.parametrize("training", [True, False])
def test_compiled_whole_and_exported_a_layer_gives_the_same_output(training):
    torch.compiler.reset()
    layer = strayed(padding=(2, 4)).train(training)
    x = randn(1, 2, 9, 9)
    expected = copy.deepcopy(layer)(x)
    exported = torch.export.export(copy.deepcopy(layer), (x,)).module()
    close(exported(x), expected)
    close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)
    if training:
        assert_inside(layer.positions)


# Ties.


class Stage(nn.Module):
    """Two layers tied to the module that holds them, as in a converted stage; there, the names are others."""

    def __init__(self, device=None):
        super().__init__()
        options = {**OPTIONS, "padding": (2, 4), "interpolation": "gaussian", "device": device}
        self.first, self.second = DclsConv2d(2, 2, **options), DclsConv2d(2, 2, **options)
        self.shared_positions = nn.Parameter(self.first.positions.detach().clone())
        self.shared_sigma = nn.Parameter(self.first.sigma.detach().clone())
        for layer in (self.first, self.second):
            layer.tie_(self, {"positions": "shared_positions", "sigma": "shared_sigma"})

    def forward(self, x):
        return self.second(self.first(x))


STAGE_NAMES = ["shared_positions", "shared_sigma", "first.weight", "first.bias", "second.weight", "second.bias"]


def random_stage():
    stage = seeded(Stage())
    with torch.no_grad():
        stage.shared_sigma.abs_().add_(0.3)
    stage.first.clamp_positions_()
    return stage


def assert_tied(stage):
    assert stage.first.is_tied
    assert stage.second.is_tied
    for layer in (stage.first, stage.second):
        assert layer.positions is stage.shared_positions
        assert layer.sigma is stage.shared_sigma
    assert [name for name, _ in stage.named_parameters(remove_duplicate=False)] == STAGE_NAMES
    assert list(stage.state_dict()) == STAGE_NAMES


def built_on_meta(stage):
    new = Stage(device="meta")
    new.load_state_dict(stage.state_dict(), assign=True)
    return new


def emptied(stage):
    new = Stage(device="meta").to_empty(device="cpu").double()
    new.load_state_dict(stage.state_dict())
    return new


def saved_whole(stage):
    buffer = io.BytesIO()
    torch.save(stage, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "deepcopy of all around it": lambda stage: copy.deepcopy(nn.Sequential(nn.ReLU(), stage))[1],
    "pickle": lambda stage: pickle.loads(pickle.dumps(stage)),
    "torch.save": saved_whole,
    "meta and assign": built_on_meta,
    "to_empty": emptied,
}


@pytest.mark.parametrize("way", COPIES)
def test_ties_survive_copying(way):
    stage, x = random_stage(), randn(1, 2, 9, 9)
    expected = stage(x)
    new = COPIES[way](stage)
    assert_tied(new)
    close(new(x), expected)
    # And they are the copy's own: what is done to it is seen by both of its layers, and not by the first stage.
    before = [layer.kernel() for layer in (new.first, new.second)]
    new.shared_positions = nn.Parameter(new.shared_positions.detach() + 0.4)
    assert_tied(new)
    after = [layer.kernel() for layer in (new.first, new.second)]
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    close(stage(x), expected)


def test_ties_survive_a_change_of_dtype():
    stage = random_stage().to(torch.bfloat16)
    assert_tied(stage)
    assert stage.first.positions.dtype == torch.bfloat16
    assert stage(randn(1, 2, 9, 9).bfloat16()).dtype == torch.bfloat16


def test_tied_layers_can_be_saved_as_safetensors(tmp_path):
    stage, x = random_stage(), randn(1, 2, 9, 9)
    save_file(stage.state_dict(), tmp_path / "stage.safetensors")
    new = Stage().double()
    new.load_state_dict(load_file(tmp_path / "stage.safetensors"))
    close(new(x), stage(x))


def test_tied_layers_compile_whole():
    torch.compiler.reset()
    stage, x = random_stage(), randn(1, 2, 9, 9)
    expected = copy.deepcopy(stage)
    expected(x).square().sum().backward()
    compiled = torch.compile(stage, fullgraph=True, backend="aot_eager")
    output = compiled(x)
    close(output, expected(x))
    output.square().sum().backward()
    close(stage.shared_positions.grad, expected.shared_positions.grad, atol=1e-9)  # sums of about 1e3
    # Compiled code must look the parameter up again, as eager code does.
    with torch.no_grad():
        stage.shared_positions.add_(0.3)
    close(compiled(x), stage(x))


def test_a_training_step_moves_tied_positions_by_the_gradients_of_all_layers():
    stage, x = random_stage(), randn(1, 2, 9, 9)
    first, second = copy.deepcopy(stage.first), copy.deepcopy(stage.second)  # untied
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-4)
    stage(x).square().sum().backward()
    second(first(x)).square().sum().backward()
    for name in ("positions", "sigma"):
        expected = first.get_parameter(name).grad + second.get_parameter(name).grad
        close(stage.get_parameter(f"shared_{name}").grad, expected, atol=1e-9)  # sums of about 1e3
    before = [layer.kernel() for layer in (stage.first, stage.second)]
    optimizer.step()
    after = [layer.kernel() for layer in (stage.first, stage.second)]
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert_tied(stage)


def test_a_tied_layer_copied_alone_has_parameters_of_its_own():
    stage, x = random_stage(), randn(1, 2, 9, 9)
    stage.shared_sigma.requires_grad_(False)
    alone = copy.deepcopy(stage.second)
    assert not alone.is_tied
    assert {name for name, _ in alone.named_parameters()} == {"weight", "bias", "positions", "sigma"}
    assert alone.positions.requires_grad
    assert not alone.sigma.requires_grad
    assert "tied" not in repr(alone)
    close(alone(x), stage.second(x))
    expected = stage(x)
    with torch.no_grad():
        alone.positions.add_(0.4)
    close(stage(x), expected)
    assert_tied(stage)


def test_a_fused_tied_layer_needs_its_owner_no_more():
    stage, x = random_stage(), randn(1, 2, 9, 9)
    expected = stage.first(x)
    fused = stage.first.fuse()
    with torch.no_grad():
        stage.shared_positions.add_(0.4)
    close(fused(x), expected)
    assert fused.__dict__.keys() == nn.Conv2d(2, 2, 3).__dict__.keys()


@pytest.mark.parametrize("wrong", ["positions", "sigma"])
def test_a_tie_of_the_wrong_shape_is_refused_and_nothing_has_changed(wrong):
    layer, x = scattered(DclsConv2d(2, 2, **OPTIONS, interpolation="gaussian")), randn(1, 2, 9, 9)
    expected = layer(x)
    owner = nn.Module()
    for name in ("positions", "sigma"):
        shape = (2, 2, 2, 3) if name == wrong else (2, 2, 2, 4)
        owner.register_parameter(f"shared_{name}", nn.Parameter(torch.zeros(shape)))
    with pytest.raises(ValueError, match=rf"shared_{wrong} has shape \(2, 2, 2, 3\)"):
        layer.tie_(owner, {"positions": "shared_positions", "sigma": "shared_sigma"})
    assert not layer.is_tied
    close(layer(x), expected)
