"""Test the DCLS layers with torch's module tests: ModuleInfo and the machinery around it.

These include gradients against finite differences, pickling, devices and dtypes.

The machinery is `torch.testing._internal`; the laws and configurations are our own. Left out are
comparison with a GPU, transfer between several devices, and `inplace`, which the layers lack.
"""

import copy
import functools
import io
import itertools
import pickle
from unittest import mock

import hypothesis
import pytest
import torch
from timm.layers import Conv2dSame
from torch import nn
from torch.func import functional_call

from dcls_convert.geometry import DYNAMIC_SAME, is_asymmetric, position_limits
from dcls_convert.layers.conv_classes import CONV_CLASSES
from dcls_convert.layers.dcls_conv import DCLS_LAYERS
from dcls_convert.layers.ties import POSITION_PARAMETERS

from .common import FLOAT64_ATOL, close, even_same

# The import would freeze torch.backends and change hypothesis's settings for all tests in the
# process.
_profile = hypothesis.settings.get_current_profile_name()
with mock.patch.object(torch.backends, "disable_global_flags"):
    from torch.testing import make_tensor
    from torch.testing._internal.common_device_type import instantiate_device_type_tests
    from torch.testing._internal.common_modules import (
        FunctionInput,
        ModuleInfo,
        ModuleInput,
        TrainEvalMode,
        modules,
    )
    from torch.testing._internal.common_utils import (
        TestCase,
        gradcheck,
        gradgradcheck,
        noncontiguous_like,
        swap,
    )
hypothesis.settings.load_profile(_profile)

pytestmark = [pytest.mark.slow, even_same]

ATOL = {torch.float64: FLOAT64_ATOL, torch.float32: 1e-4}  # for sums of about ten
MARGIN = 0.05  # cells; on the window's border, the derivative is one-sided
BATCH = 2
MAPS = {1: (11,), 2: (8, 9), 3: (5, 6, 7)}
WINDOWS = {1: (5,), 2: (5, 4), 3: (3, 4, 5)}
ODD_WINDOWS = {1: (5,), 2: (3, 5), 3: (3, 5, 3)}
ZERO_PADS = {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
CONVERSIONS = [
    {"dtype": torch.float32},
    {"dtype": torch.float64},
    {"dtype": torch.float16},
    {"memory_format": torch.channels_last},
    {"dtype": torch.float64, "memory_format": torch.channels_last},
    {"memory_format": torch.channels_last_3d},
]


def configurations(dims):
    """Return arguments for layers of so many dimensions, by the name of the configuration."""
    window = WINDOWS[dims]
    odd_window = ODD_WINDOWS[dims]
    layer = functools.partial(FunctionInput, 2, 3, kernel_count=3, dilated_kernel_size=window)
    depthwise = functools.partial(layer.func, 3, 3, groups=3, **layer.keywords)
    grouped = functools.partial(layer.func, 4, 2, groups=2, **layer.keywords)
    more_outputs = functools.partial(layer.func, 2, 4, groups=2, **layer.keywords)
    per_axis = (2, 1, 3)[:dims]
    cases = {
        "plain": layer(),
        "odd window": layer(dilated_kernel_size=odd_window),
        "one size for all axes": layer(dilated_kernel_size=3),
        "one element": layer(kernel_count=1),
        "no bias": layer(bias=False),
        "stride": layer(stride=2),
        "stride per axis": layer(stride=per_axis),
        "padding": layer(padding=2),
        "padding per axis, stride": layer(padding=per_axis, stride=2),
        "asymmetric padding": layer(padding=((1, 2), (0, 3), (2, 1))[:dims]),
        "valid": layer(padding="valid"),
        "same": layer(padding="same", dilated_kernel_size=odd_window),
        "same, even window": layer(padding="same", dilated_kernel_size=4),
        "dilation": layer(dilation=2, padding=4),
        "dilation per axis": layer(dilation=per_axis, padding=6),
        "groups": grouped(),
        "depthwise": depthwise(padding=2),
        "depthwise, odd window": depthwise(padding="same", dilated_kernel_size=odd_window),
        "depthwise, stride": depthwise(stride=2, bias=False),
        "depthwise, asymmetric padding": depthwise(padding=((1, 2), (0, 3), (2, 1))[:dims]),
        "depthwise, more outputs": more_outputs(kernel_count=2),
    }
    for mode in ("reflect", "replicate", "circular"):
        cases[mode] = layer(padding=2, padding_mode=mode)
        same = layer(padding="same", padding_mode=mode, dilated_kernel_size=odd_window)
        cases[f"{mode}, same"] = same
        cases[f"{mode}, depthwise"] = depthwise(padding=1, padding_mode=mode)
    for interpolation in ("triangle", "gaussian"):
        cases[interpolation] = layer(interpolation=interpolation)
        cases[f"{interpolation}, depthwise"] = depthwise(interpolation=interpolation, padding=2)
    for dense_axes in {1: [], 2: [(0,), (1,)], 3: [(1,), (0, 2)]}[dims]:
        cases[f"dense axes {dense_axes}"] = layer(dense_axes=dense_axes)
        gaussian = layer(dense_axes=dense_axes, interpolation="gaussian")
        cases[f"dense axes {dense_axes}, gaussian"] = gaussian
    if dims == 2:
        cases["dynamic same"] = layer(padding=DYNAMIC_SAME, stride=(2, 3))
        cases["dynamic same, dilation"] = layer(padding=DYNAMIC_SAME, dilation=(2, 1), stride=2)
        cases["dynamic same, depthwise"] = depthwise(padding=DYNAMIC_SAME, stride=2)
    return cases


def asymmetric_padding(constructor):
    """Return the cells before and after each axis if the configuration states both, else None."""
    padding = constructor.kwargs.get("padding")
    return padding if isinstance(padding, tuple) and is_asymmetric(padding) else None


def plain_convolution(constructor, layer):
    """Return torch's convolution with the same arguments, and the layer's kernel and bias."""
    options = dict(constructor.kwargs)
    for name in ("kernel_count", "dilated_kernel_size", "interpolation", "dense_axes"):
        options.pop(name, None)
    pad = nn.Identity()
    make = CONV_CLASSES[layer.dims]
    if options.get("padding") == DYNAMIC_SAME:
        del options["padding"]
        make = Conv2dSame
    if asymmetric_padding(constructor) is not None:
        sides = reversed(options.pop("padding"))
        pad = ZERO_PADS[layer.dims](tuple(itertools.chain.from_iterable(sides)))
    conv = make(*constructor.args, layer.kernel_size, **options)
    conv.weight = nn.Parameter(layer.kernel().detach())
    conv.bias = layer.bias
    return nn.Sequential(pad, conv)


def examples(module_info, device, dtype, requires_grad, training):
    """Yield every configuration, with a batch of maps."""
    dims = module_info.module_cls.dims
    options = {"device": device, "dtype": dtype, "requires_grad": requires_grad}
    for name, constructor in configurations(dims).items():
        shape = (BATCH, constructor.args[0], *MAPS[dims])
        yield ModuleInput(
            constructor_input=constructor,
            forward_input=FunctionInput(make_tensor(shape, low=-1, high=1, **options)),
            desc=name,
            reference_fn=functools.partial(reference, constructor),
        )


def reference(constructor, layer, parameters, input):
    """Return the output that the layer should have; ModuleInput determines the arguments."""
    return plain_convolution(constructor, layer)(input)


INFOS = [
    ModuleInfo(layer_class, module_inputs_func=examples, train_and_eval_differ=True)
    for layer_class in DCLS_LAYERS.values()
]
WITH_FORMATS = [info for info in INFOS if info.module_cls.dims in FORMATS]


def built(layer_class, example, **factory):
    """Return a layer with elements anywhere in the window, but not on its border."""
    constructor = example.constructor_input
    options = dict(constructor.kwargs)
    asymmetric = asymmetric_padding(constructor)
    if asymmetric is not None:
        del options["padding"]
    layer = layer_class(*constructor.args, **options, **factory)
    if asymmetric is not None:  # the constructor does not take it; from_conv sets it
        layer.padding = asymmetric
    with torch.no_grad():
        for index, axis in enumerate(layer.learnt_axes):
            low, high = position_limits(layer.dilated_kernel_size[axis])
            layer.positions[index].uniform_(low + MARGIN, high - MARGIN)
        if layer.sigma is not None:
            layer.sigma.add_(torch.rand_like(layer.sigma) + MARGIN)
    return layer


def output_and_gradients(layer, input, grad_output):
    """Return the output, and the gradients of the input and of all parameters."""
    leaf = input.detach().requires_grad_()
    output = layer(leaf)
    return output, *torch.autograd.grad(output, [leaf, *layer.parameters()], grad_output)


def as_function(layer, input):
    """Return the layer as a function of its input and parameters, and these, for gradcheck."""
    names = [name for name, _ in layer.named_parameters()]

    def function(input, *parameters):
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (input,))

    return function, (input.detach().requires_grad_(), *layer.parameters())


def reloaded(thing, *, weights_only):
    torch.save(thing, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def for_each_configuration(law):
    """Make a test of the law of a layer and an input, in every configuration.

    A failure names the configuration.
    """

    def test(self, device, dtype, module_info, training):
        options = {"device": device, "dtype": dtype, "requires_grad": False, "training": training}
        for example in module_info.module_inputs_func(module_info, **options):
            layer = built(module_info.module_cls, example, device=device, dtype=dtype)
            try:
                law(self, example, layer.train(training), example.forward_input.args[0])
            except Exception as error:
                error.add_note(f"configuration: {example.desc}")
                raise

    test.__name__ = law.__name__  # functools.wraps would also show torch the law's arguments
    return test


def check_conversion(layer, options, with_gradients):
    """Check that `layer.to(**options)` changes nothing but the dtype; positions keep float32."""
    names, parameters = zip(*layer.named_parameters(), strict=True)
    values = [parameter.detach().clone() for parameter in parameters]
    gradients = [copy.deepcopy(parameter.grad) for parameter in parameters]
    assert layer.to(**options) is layer
    # Optimizers hold references to the parameters.
    pairs = zip(layer.parameters(), parameters, strict=True)
    assert all(parameter is old for parameter, old in pairs)
    for name, parameter, value, gradient in zip(names, parameters, values, gradients, strict=True):
        dtype = options.get("dtype", value.dtype)
        if dtype == torch.float16 and name in POSITION_PARAMETERS:
            dtype = torch.float32
        assert parameter.is_contiguous()
        assert torch.equal(parameter, value.to(dtype))
        assert (parameter.grad is not None) is with_gradients
        if with_gradients:
            assert torch.equal(parameter.grad, gradient.to(dtype))


class TestModules(TestCase):
    """Each law for each class; unless limited, in both dtypes, and in training and evaluation."""

    @modules(INFOS)
    @for_each_configuration
    def test_output_is_that_of_the_plain_convolution(self, example, layer, input):
        input_before = input.clone()
        before = copy.deepcopy(layer.state_dict())
        close(layer(input), example.reference_fn(layer, input), ATOL[input.dtype])
        assert torch.equal(input, input_before)
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())

    @modules(INFOS, allowed_dtypes=[torch.float32], train_eval_mode=TrainEvalMode.train_only)
    @for_each_configuration
    def test_training_and_evaluation_give_the_same_output(self, example, layer, input):
        evaluated = copy.deepcopy(layer).eval()
        assert layer.training
        assert not evaluated.training
        assert torch.equal(evaluated(input), layer(input))

    @modules(INFOS, allowed_dtypes=[torch.float64], train_eval_mode=TrainEvalMode.train_only)
    @for_each_configuration
    def test_parameters_have_the_device_and_dtype_of_the_arguments(self, example, layer, input):
        make = functools.partial(built, type(layer), example)
        for meta_layer in (make(device="meta", dtype=input.dtype), layer.to("meta")):
            assert all(parameter.is_meta for parameter in meta_layer.parameters())
            assert {parameter.dtype for parameter in meta_layer.parameters()} == {input.dtype}
            assert meta_layer(input.to("meta")).is_meta
        with torch.device("meta"):
            on_meta = make()
            on_cpu = make(device="cpu")
        assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}
        assert {parameter.device.type for parameter in on_cpu.parameters()} == {"cpu"}
        default_dtype = torch.get_default_dtype()
        assert {parameter.dtype for parameter in make().parameters()} == {default_dtype}

    @modules(INFOS, allowed_dtypes=[torch.float64], train_eval_mode=TrainEvalMode.train_only)
    @for_each_configuration
    def test_repr_shows_the_arguments_of_the_layer(self, example, layer, input):
        text = repr(layer)
        channels = f"{layer.in_channels}, {layer.out_channels}"
        assert text.startswith(f"{type(layer).__name__}({channels}, ")
        for name in example.constructor_input.kwargs:
            value = getattr(layer, name) is not None if name == "bias" else getattr(layer, name)
            assert f"{name}={value}" in text.replace("'", ""), name

    @modules(INFOS, allowed_dtypes=[torch.float32])
    @for_each_configuration
    def test_copies_give_the_same_output_and_have_parameters_of_their_own(
        self, example, layer, input
    ):
        expected = layer(input)
        shallow = copy.copy(layer)
        assert all(map(torch.equal, shallow.parameters(), layer.parameters()))
        assert torch.equal(shallow(input), expected)
        pickled = pickle.loads(pickle.dumps(layer))
        for copied in (copy.deepcopy(layer), pickled, reloaded(layer, weights_only=False)):
            assert copied.training is layer.training
            assert torch.equal(copied(input), expected)
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.zero_()
            assert not torch.equal(copied(input), expected)
            assert torch.equal(layer(input), expected)

    @swap([True, False])
    @modules(INFOS, allowed_dtypes=[torch.float32], train_eval_mode=TrainEvalMode.train_only)
    @for_each_configuration
    def test_a_saved_state_gives_the_same_layer(self, example, layer, input):
        expected = layer(input)
        state = reloaded(layer.state_dict(), weights_only=True)
        make = functools.partial(built, type(layer), example, dtype=input.dtype)
        filled = make()
        assigned = make(device="meta")
        ids = [id(parameter) for parameter in filled.parameters()]
        filled.load_state_dict(state)
        assert [id(parameter) for parameter in filled.parameters()] == ids
        assigned.load_state_dict(state, assign=True)
        for loaded in (filled, assigned):
            assert torch.equal(loaded(input), expected)
            assert all(parameter.requires_grad for parameter in loaded.parameters())
        for name in state:
            incomplete = {key: tensor for key, tensor in state.items() if key != name}
            if name == "positions":  # weights without them are of another conversion, or of none
                with pytest.raises(RuntimeError, match="no positions in the state dict"):
                    make().load_state_dict(incomplete, strict=False)
                continue
            with pytest.raises(RuntimeError, match=f'"{name}"'):
                make().load_state_dict(incomplete)
            assert make().load_state_dict(incomplete, strict=False) == ([name], [])

    @swap([True, False])
    @modules(INFOS, allowed_dtypes=[torch.float32], train_eval_mode=TrainEvalMode.train_only)
    @for_each_configuration
    def test_conversions_keep_values_gradients_and_identities(self, example, layer, input):
        grad_output = torch.randn_like(layer(input))
        for options, with_gradients in itertools.product(CONVERSIONS, (False, True)):
            converted = copy.deepcopy(layer)
            if with_gradients:
                converted(input).backward(grad_output)
            check_conversion(converted, options, with_gradients)

    @swap([True, False])
    @modules(INFOS, allowed_dtypes=[torch.float32], train_eval_mode=TrainEvalMode.train_only)
    @for_each_configuration
    def test_layers_are_emptied_and_filled_again(self, example, layer, input):
        layer(input).sum().backward()
        expected = layer(input).detach()
        state = copy.deepcopy(layer.state_dict())
        layer.to_empty(device="meta")
        assert all(tensor.is_meta and tensor.grad.is_meta for tensor in layer.parameters())
        layer.to_empty(device="cpu")
        for name, parameter in layer.named_parameters():
            assert parameter.shape == parameter.grad.shape == state[name].shape
            assert parameter.dtype == parameter.grad.dtype == input.dtype
            assert parameter.requires_grad
        layer.load_state_dict(state)
        assert torch.equal(layer(input), expected)

    @modules(INFOS, allowed_dtypes=[torch.float64])
    @for_each_configuration
    def test_gradients_equal_finite_differences(self, example, layer, input):
        assert gradcheck(*as_function(layer, input))

    @modules(INFOS, allowed_dtypes=[torch.float64], train_eval_mode=TrainEvalMode.train_only)
    @for_each_configuration
    def test_second_gradients_equal_finite_differences(self, example, layer, input):
        assert gradgradcheck(*as_function(layer, input))

    @modules(INFOS)
    @for_each_configuration
    def test_strides_of_input_and_gradient_do_not_matter(self, example, layer, input):
        grad_output = torch.randn_like(layer(input))
        expected = output_and_gradients(layer, input, grad_output)
        for maps in (input, noncontiguous_like(input)):
            for grad in (grad_output, noncontiguous_like(grad_output)):
                close(output_and_gradients(layer, maps, grad), expected, ATOL[input.dtype])

    @modules(INFOS, allowed_dtypes=[torch.float64], train_eval_mode=TrainEvalMode.train_only)
    @for_each_configuration
    def test_one_map_without_a_batch_gives_what_it_gives_in_a_batch(self, example, layer, input):
        grad_output = torch.randn_like(layer(input[:1]))
        output, grad_input, *gradients = output_and_gradients(layer, input[0], grad_output[0])
        batch_output, grad_batch, *batch_gradients = output_and_gradients(
            layer, input[:1], grad_output
        )
        close(output, batch_output[0])
        close(grad_input, grad_batch[0])
        close(gradients, batch_gradients)

    @modules(WITH_FORMATS)
    @for_each_configuration
    def test_memory_formats_keep_values_and_the_layout_of_convolutions(self, example, layer, input):
        memory_format = FORMATS[layer.dims]
        grad_output = torch.randn_like(layer(input))
        expected = output_and_gradients(layer, input, grad_output)
        formatted = copy.deepcopy(layer).to(memory_format=memory_format)
        channels_last = input.contiguous(memory_format=memory_format)
        for module in (layer, formatted):
            for maps in (input, channels_last):
                close(output_and_gradients(module, maps, grad_output), expected, ATOL[input.dtype])
        # Circular padding gives contiguous maps; torch's convolution then has its weight's format.
        if layer.padding_mode != "circular":
            plain = plain_convolution(example.constructor_input, layer)
            plain.to(memory_format=memory_format)
            assert formatted(channels_last).stride() == plain(channels_last).stride()


instantiate_device_type_tests(TestModules, globals(), only_for="cpu")
