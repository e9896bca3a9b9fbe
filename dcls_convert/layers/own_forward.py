"""Find out which padding a convolution class adds in a forward of its own, by running it.

Classes with a forward of their own are common where padding is not symmetric:

    class CausalConv1d(nn.Conv1d):
        def forward(self, input):
            return super().forward(F.pad(input, (self.left, 0)))
"""

import copy
import inspect
import itertools
from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..geometry import DYNAMIC_SAME, Padding, as_padding, padded_cells
from .conv_settings import ConvSettings, own_settings
from .padding import widths_of

FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
MAX_ERROR = 1e-5  # relative, of outputs in float32
MAX_STRIDE_SEEN = 8  # one input size is tried for each phase of the stride

# For each convolution: its attributes when it was run, and the padding that was seen.
_seen: WeakKeyDictionary[nn.Module, tuple[dict[str, Any], Padding | None]] = WeakKeyDictionary()


def padding_seen(conv: nn.Module) -> Padding | None:
    """Return the padding that a convolution's forward adds before it convolves as its base does.

    A copy with random weights runs on inputs of several sizes, at least one for each phase of the
    stride, in train and in eval mode. Its outputs must equal those of torch's function on the
    padded input. Only padding with zeros is found: the same cells at all sizes, or TensorFlow's
    SAME rule. The result is kept until the object's attributes change.

    Args:
        conv: A convolution whose only parameters are its weight and bias. It may be on the meta
            device.

    Returns:
        The padding; None if forward does anything else.
    """
    attributes = _plain_attributes(conv)
    attributes_then, padding = _seen.get(conv, (None, None))
    if attributes == attributes_then:
        return padding
    padding = None
    settings = own_settings(conv)
    if _may_only_pad(conv, settings):
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng([]):
                padding = _padding_seen(conv, settings)
        except Exception:  # forward is the user's own
            pass
    _seen[conv] = (attributes, padding)
    return padding


def _plain_attributes(conv: nn.Module) -> dict[str, Any]:
    """Return the attributes that are numbers, strings, tuples or lists, and the object's text.

    The text names the modules inside. The mode (`training`) is left out.
    """
    plain: dict[str, Any] = {"": str(conv)}
    for name, value in vars(conv).items():
        if isinstance(value, int | float | str | tuple) and name != "training":
            plain[name] = value
        elif isinstance(value, list):
            plain[name] = tuple(value)
    return plain


def _may_only_pad(conv: nn.Module, settings: ConvSettings) -> bool:
    """False if a forward surely does more than pad, or if running it could change the network."""
    has_tensors = any(True for child in conv.children() for _ in child.parameters())
    has_tensors |= any(True for _ in conv.buffers())
    inputs = inspect.signature(type(conv).forward).parameters
    return (
        not has_tensors
        and len(inputs) == 2  # self and the input
        and settings.padding_mode == "zeros"
        and max(settings.stride) <= MAX_STRIDE_SEEN
    )


def _padding_seen(conv: nn.Module, settings: ConvSettings) -> Padding | None:
    twin, weight, bias = _with_random_weights(conv)
    attributes = dict(vars(twin))
    stride = settings.stride
    extents = settings.extents
    generator = torch.Generator().manual_seed(1)
    inputs = []
    outputs = []
    for phase in range(max(2, *stride)):
        # Large enough for a few outputs that see no padding.
        shape = [1, settings.in_channels]
        for kernel_extent, step in zip(extents, stride, strict=True):
            shape.append(2 * kernel_extent + 3 * step + phase)
        input = torch.randn(shape, generator=generator, device="cpu")
        for is_training in (False, True):
            vars(twin)["training"] = is_training
            inputs.append(input.clone().requires_grad_())
            outputs.append(type(conv).forward(twin, inputs[-1]))
    vars(twin)["training"] = attributes["training"]
    if vars(twin) != attributes:  # forward keeps a state, such as past steps
        return None
    candidates: list[Padding] = [_fixed_padding(inputs, outputs, extents, stride)]
    if len(extents) == 2:
        candidates.append(DYNAMIC_SAME)

    def explains(padding: Padding) -> bool:
        for input, output in zip(inputs, outputs, strict=True):
            pairs = padded_cells(padding, input.shape[2:], extents, stride)
            padded = F.pad(input, widths_of(pairs))
            function = FUNCTIONS[len(extents)]
            expected = function(padded, weight, bias, stride, 0, settings.dilation, settings.groups)
            if not (expected - output).norm() <= MAX_ERROR * expected.norm():
                return False
        return True

    return next(filter(explains, candidates), None)


def _with_random_weights(conv: Any) -> tuple[nn.Module, Tensor, Tensor | None]:
    """Return a copy of a convolution with random values, and clones of its weight and bias."""
    generator = torch.Generator().manual_seed(0)
    twin = copy.copy(conv)
    parameters: dict[str, nn.Parameter | None] = {}
    for name, old in conv._parameters.items():
        parameters[name] = None
        if old is not None:
            values = torch.randn(old.shape, generator=generator, device="cpu")
            parameters[name] = nn.Parameter(values)
    vars(twin)["_parameters"] = parameters
    weight = cast(Tensor, parameters["weight"]).detach().clone()
    bias = parameters.get("bias")
    return twin, weight, None if bias is None else bias.detach().clone()


def _fixed_padding(
    inputs: list[Tensor], outputs: list[Tensor], extents: Sequence[int], stride: Sequence[int]
) -> Padding:
    """Return the cells before and after each axis that explain what the first outputs see.

    padding 2 . . x x x x x     The first output of a kernel of 3 sees input 0 alone,
            [k k k]             through the last of its cells.
    """
    first = outputs[0].flatten(2)[..., 0]
    (gradient,) = torch.autograd.grad(first.sum(), inputs[0])
    padding = []
    for axis, (kernel_extent, step) in enumerate(zip(extents, stride, strict=True)):
        seen = gradient.movedim(2 + axis, 0).flatten(1).any(1).nonzero()
        before = max(0, kernel_extent - 1 - int(seen.max()))  # a negative number is no padding
        for after in itertools.count():  # ends: with more padding, outputs become longer
            lengths = []
            for input in inputs:
                lengths.append((input.shape[2 + axis] + before + after - kernel_extent) // step + 1)
            if lengths >= [output.shape[2 + axis] for output in outputs]:
                break
        padding.append((before, after))
    return as_padding(padding)
