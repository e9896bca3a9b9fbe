"""Laws of the DCLS layers: a convolution loses nothing when it is converted and fused, and
positions stay inside.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert.geometry import extent
from dcls_convert.layers.conv_classes import CONV_CLASSES
from dcls_convert.layers.dcls_conv import DCLS_LAYERS, DclsConv2d, DclsConv3d
from dcls_convert.layers.elements import largest_elements
from dcls_convert.layers.interpolation import INTERPOLATIONS

from .common import close, even_same, every_interpolation, randn

GRADIENT_ATOL = 1e-10  # of sums of about a thousand products
OPTIONS = {"kernel_count": 4, "dilated_kernel_size": (5, 8)}  # of a small DclsConv2d


def with_seeded_parameters(module):
    """Return the module in float64 with seeded parameters, independent of the global seed."""
    module.double()
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=index))
    return module


def with_scattered_elements(layer):
    """Return the layer in float64 with elements anywhere in the window, of any width."""
    with_seeded_parameters(layer)
    with torch.no_grad():
        layer.positions.mul_(2)
        if layer.sigma is not None:
            layer.sigma.abs_().add_(0.3)
    layer.clamp_positions_()
    return layer


@pytest.mark.parametrize(
    ("interpolation", "sigma"), [("bilinear", None), ("triangle", 1.0), ("gaussian", 0.5)]
)
def test_parameters_have_the_shapes_and_starting_values_of_the_paper(interpolation, sigma):
    options = {"kernel_count": 9, "dilated_kernel_size": (5, 8, 7), "interpolation": interpolation}
    layer = DclsConv3d(64, 32, **options, groups=2, dense_axes=(1,))
    state = torch.get_rng_state()
    layer.reset_parameters(torch.Generator().manual_seed(0))
    assert torch.equal(state, torch.get_rng_state())
    assert layer.weight.shape == (32, 32, 8, 9)
    assert layer.positions.shape == (2, 32, 32, 8, 9)
    assert layer.bias.shape == (32,)
    assert layer.learnt_axes == (0, 2)
    # With 147456 draws, the deviation of N(0, 0.5) is known to a few thousandths.
    assert abs(layer.positions.mean().item()) < 0.01
    assert abs(layer.positions.std().item() - 0.5) < 0.01
    bound = 1 / math.sqrt(32 * 8 * 9)
    assert bound * 0.99 < layer.weight.abs().max() <= bound
    assert layer.sigma is None if sigma is None else (layer.sigma == sigma).all()  # DCLS 0.1.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel_count": 0}, "kernel_count"),
        ({"dilated_kernel_size": (5, 8.0)}, "dilated_kernel_size"),
        ({"interpolation": "gauss"}, "one of bilinear, "),
        ({"dense_axes": (0, 1)}, "leave one to be learnt"),
    ],
)
def test_bad_arguments_are_refused_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        DclsConv2d(**{"in_channels": 2, "out_channels": 2, **OPTIONS, **changes})


# From a convolution, and back to one.


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A convolution, a window that may replace its kernel, and an input."""

    kernel_size: tuple[int, ...]
    window: tuple[int, ...]
    options: dict[str, Any]  # further arguments of the convolution
    channels: tuple[int, int]
    input: torch.Tensor

    @property
    def dims(self):
        return len(self.window)

    def conv(self, kernel_size):
        return CONV_CLASSES[self.dims](*self.channels, kernel_size, **self.options)


@st.composite
def conv_geometries(draw):
    """Draw odd and even kernels of 1 to 3 dimensions, with all options of a convolution."""
    dims = draw(st.sampled_from([1, 2, 2, 3]))

    def sizes(low, high):
        return tuple(draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims)))

    largest = 5 if dims < 3 else 3
    kernel_size = sizes(1, largest)
    dilation = sizes(1, 2)
    grown = sizes(0, 2 if dims < 3 else 1)
    stride = sizes(1, 3)
    groups = draw(st.integers(1, 3))
    padding = draw(
        st.one_of(st.integers(0, 2), st.just(sizes(0, 2)), st.sampled_from(["valid", "same"]))
    )
    options = {
        "stride": 1 if padding == "same" else stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(
            st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])
        ),
    }
    window = tuple(
        extent(k, d) + 2 * g for k, d, g in zip(kernel_size, dilation, grown, strict=True)
    )
    channels = (groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)))
    # Maps are large enough for all paddings: reflect needs more cells than it adds, which are at
    # most half the window plus 2.
    spatial = [
        extent(size, spacing) + 3 + axis
        for axis, (size, spacing) in enumerate(zip(window, dilation, strict=True))
    ]
    maps = randn(2, channels[0], *spatial)
    return Geometry(
        kernel_size=kernel_size, window=window, options=options, channels=channels, input=maps
    )


@even_same
@given(geometry=conv_geometries(), superfluous=st.integers(0, 2))
def test_as_many_elements_as_cells_give_the_same_layer(geometry, superfluous):
    conv = with_seeded_parameters(geometry.conv(geometry.kernel_size))
    cells = math.prod(geometry.kernel_size)
    layer = DCLS_LAYERS[geometry.dims].from_conv(
        conv, kernel_count=cells + superfluous, dilated_kernel_size=geometry.window
    )
    assert layer.dilated_kernel_size == layer.kernel_size == geometry.window
    close(layer(geometry.input), conv(geometry.input))
    assert not layer.weight[..., cells:].any()
    assert not layer.positions[..., cells:].any()


@even_same
@given(geometry=conv_geometries(), growth=st.integers(1, 2), dense=st.booleans())
def test_elements_stay_where_they_are_in_another_window(geometry, growth, dense):
    dense_axes = (0,) if dense and geometry.dims > 1 else ()
    layer = DCLS_LAYERS[geometry.dims](
        *geometry.channels,
        kernel_count=4,
        dilated_kernel_size=geometry.window,
        dense_axes=dense_axes,
        **geometry.options,
    )
    with_scattered_elements(layer.eval())
    with torch.no_grad():
        layer.positions *= 1.5  # some lie beyond the window, and count as at its border
    expected = layer(geometry.input)
    larger = tuple(
        side if axis in dense_axes else side + 2 * growth
        for axis, side in enumerate(geometry.window)
    )
    for window in (larger, geometry.window):  # and back
        layer.set_window_(window)
        assert layer.dilated_kernel_size == layer.kernel_size == window
        assert layer.kernel().shape[2:] == window
        close(layer(geometry.input), expected)
    with pytest.raises(ValueError, match=r"would shift the output|is dense"):
        layer.set_window_([side + 1 for side in geometry.window])


def test_a_window_that_would_shift_the_kernel_is_refused():
    conv = nn.Conv2d(2, 2, (3, 2), dilation=(1, 2))
    with pytest.raises(ValueError, match=r"must be odd .* extent 3"):
        DclsConv2d.from_conv(conv, kernel_count=3, dilated_kernel_size=(5, 4))


def output_and_gradients(module, input, parameters):
    leaf = input.detach().requires_grad_()
    output = module(leaf)
    grad_output = randn(*output.shape, seed=1)
    return output, torch.autograd.grad(output, [leaf, *parameters], grad_output)


@even_same
@given(
    geometry=conv_geometries(),
    interpolation=st.sampled_from(list(INTERPOLATIONS)),
    count=st.integers(1, 5),
    dense_axes=st.sampled_from([(), (0,), (1,), (0, 2), (2, 1)]),
    strided=st.booleans(),
)
def test_a_layer_computes_what_the_plain_convolution_with_its_kernel_does(
    geometry, interpolation, count, dense_axes, strided
):
    dense_axes = [axis for axis in dense_axes if axis < geometry.dims and geometry.dims > 1]
    layer = DCLS_LAYERS[geometry.dims](
        *geometry.channels,
        kernel_count=count,
        dilated_kernel_size=geometry.window,
        interpolation=interpolation,
        dense_axes=dense_axes,
        **geometry.options,
    )
    fused = with_scattered_elements(layer).fuse()
    plain = geometry.conv(geometry.window)
    # It cannot be told apart from a convolution that was made directly.
    assert type(fused) is CONV_CLASSES[geometry.dims]
    assert repr(fused) == repr(plain)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert fused.weight.is_contiguous()
    bias = [] if layer.bias is None else [layer.bias]
    elements = [tensor for tensor in layer.parameters() if tensor is not layer.bias]
    maps = geometry.input.mT.contiguous().mT if strided else geometry.input
    output, (grad_input, *gradients) = output_and_gradients(layer, maps, bias + elements)
    expected, (grad_expected, grad_kernel, *grad_bias) = output_and_gradients(
        fused, geometry.input, fused.parameters()
    )
    close(output, expected)
    close(layer(maps[0]), expected[0])  # torch's convolutions take one map without a batch, too
    grad_elements = torch.autograd.grad(layer.kernel(), elements, grad_kernel)
    close([grad_input, *gradients], [grad_expected, *grad_bias, *grad_elements], GRADIENT_ATOL)


@pytest.mark.parametrize(
    ("dtype", "training", "trainable"),
    [(torch.bfloat16, True, (False, True)), (torch.float64, False, (True, False))],
)
def test_state_of_the_convolution_is_kept_by_converting_and_fusing(dtype, training, trainable):
    conv = nn.Conv2d(2, 4, (3, 4), dtype=dtype).train(training)
    conv.weight.requires_grad_(trainable[0])
    conv.bias.requires_grad_(trainable[1])
    conv.note = conv.weight.note = "kept"
    generator = torch.get_rng_state()
    layer = DclsConv2d.from_conv(
        conv, kernel_count=5, dilated_kernel_size=(5, 8), interpolation="gaussian"
    )
    fused = layer.fuse()
    assert torch.equal(generator, torch.get_rng_state())  # nothing was drawn
    for new in (layer, fused):
        assert (new.training, new.note, new.weight.note) == (training, "kept", "kept")
        assert new.bias is conv.bias
        assert new.bias.requires_grad is trainable[1]
        for name, parameter in new.named_parameters():
            if name in ("positions", "sigma"):
                assert parameter.dtype == torch.promote_types(dtype, torch.float32)
            else:
                assert parameter.dtype == dtype
    # The elements are trained if the weight was.
    for tensor in (layer.weight, layer.positions, layer.sigma, fused.weight):
        assert tensor.requires_grad is trainable[0]


def test_hooks_are_carried_over_and_their_handles_still_remove_them():
    conv = with_seeded_parameters(nn.Conv2d(2, 4, (3, 4)))
    calls = []

    def hook(*arguments):
        calls.append(type(arguments[0]))

    handles = [
        conv.register_forward_pre_hook(hook, with_kwargs=True),
        conv.register_forward_hook(hook, always_call=True),
        conv.register_full_backward_pre_hook(hook),
        conv.register_full_backward_hook(hook),
    ]
    layer = DclsConv2d.from_conv(conv, kernel_count=5, dilated_kernel_size=(5, 8))
    x = randn(1, 2, 9, 9).requires_grad_()
    for has_hooks in (True, False):
        for module in (conv, layer, layer.fuse()):
            calls.clear()
            module(x).sum().backward()
            assert calls == ([type(module)] * 4 if has_hooks else [])
        for handle in handles:
            handle.remove()


def test_the_cells_of_largest_energy_are_chosen_at_positions_that_all_layers_share():
    kernels = [randn(2, 3, 3, 4, seed=seed) for seed in range(3)]
    weights, positions = largest_elements(kernels, kernel_count=3, dilation=(2, 1), size=(7, 8))
    energy = sum(kernel.square() for kernel in kernels)
    cells = energy.flatten(2).topk(3).indices.sort().values
    for kernel, weight in zip(kernels, weights, strict=True):
        assert torch.equal(weight, kernel.flatten(2).gather(2, cells))
    # A kernel of odd or even extent starts half its extent before the centre.
    assert torch.equal(positions, torch.stack([2 * (cells // 4) - 2, cells % 4 - 2]).double())


def test_with_a_dense_axis_the_cells_of_each_line_are_chosen():
    kernels = [randn(2, 3, 3, 4, seed=seed) for seed in range(2)]
    options = {"kernel_count": 3, "dense_axes": (0,)}
    weights, positions = largest_elements(kernels, dilation=(1, 2), size=(3, 9), **options)
    for row in range(3):
        lines = [kernel[:, :, row] for kernel in kernels]
        expected = largest_elements(lines, kernel_count=3, dilation=(2,), size=(9,))
        chosen = [weight[:, :, row] for weight in weights], positions[:, :, :, row]
        close(chosen, expected, atol=0)


# Positions stay inside the window.


def layer_with_stray_positions(interpolation):
    """Return a layer as after a far too large step: positions beyond both sides of the window,
    sigmas below their minimum.
    """
    layer = DclsConv2d(
        2, 4, kernel_count=6, dilated_kernel_size=(5, 8), interpolation=interpolation
    )
    with_seeded_parameters(layer)
    with torch.no_grad():
        layer.positions.mul_(9)
        if layer.sigma is not None:
            layer.sigma.fill_(0.1)
    return layer


def test_training_brings_positions_back_into_the_window_and_evaluation_uses_the_border():
    layer = layer_with_stray_positions("gaussian").eval()
    x = randn(1, 2, 9, 9)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    expected = layer(x)
    positions = layer.positions
    layer.state_dict()
    assert all(torch.equal(*pair) for pair in zip(before, layer.parameters(), strict=True))
    close(layer.train()(x), expected)
    assert layer.positions is positions
    ranges = [(axis.min().item(), axis.max().item()) for axis in layer.positions]
    assert ranges == [(-2, 2), (-4, 3)]  # positions reach both borders, and none is beyond
    assert (layer.sigma == 0.27).all()


@every_interpolation
def test_a_layer_may_be_used_twice_in_a_step(interpolation):
    layer = with_scattered_elements(
        DclsConv2d(2, 2, **OPTIONS, padding=(2, 4), interpolation=interpolation)
    )
    copies = copy.deepcopy(layer), copy.deepcopy(layer)
    x = randn(1, 2, 9, 9)
    layer(layer(x)).square().sum().backward()
    copies[1](copies[0](x)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        # Gradients are sums of about 1e3.
        expected = sum(copied.get_parameter(name).grad for copied in copies)
        close(parameter.grad, expected, atol=1e-9)


@every_interpolation
@pytest.mark.filterwarnings(
    "ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning"
)
def test_exports_change_no_positions_and_contain_no_scattered_additions(interpolation):
    """coremltools 9 silently makes wrong kernels of scattered additions."""
    layer = layer_with_stray_positions(interpolation)
    x = randn(1, 2, 9, 9)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    exported = torch.export.export(copy.deepcopy(layer), (x,))
    program = exported.module()
    traced = torch.jit.trace(copy.deepcopy(layer), x, check_trace=False)
    for module, graph in [(program, exported.graph), (traced, traced.inlined_graph)]:
        close(module(x), layer.eval()(x))
        assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
        assert "conv" in str(graph)
        assert "scatter" not in str(graph)
        assert "index" not in str(graph)


def test_elements_of_five_axes_pass_through_memory_formats():
    layer = with_scattered_elements(DclsConv2d(4, 4, **OPTIONS, dense_axes=(0,)))
    maps = randn(1, 4, 16, 16)
    expected = layer(maps)
    layer.to(memory_format=torch.channels_last)
    close(layer(maps.to(memory_format=torch.channels_last)), expected)
