"""See by running it which padding a convolution class with a forward of its own adds.

Such classes are common where padding is not symmetric:

    class CausalConv1d(nn.Conv1d):
        def forward(self, input):
            return super().forward(F.pad(input, (self.left, 0)))
"""

import copy
import inspect
import itertools
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..geometry import DYNAMIC_SAME, Padding, Pair, extent, padded_cells
from .padding import widths_of

FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
MAX_ERROR = 1e-5  # relative, of outputs in float32
MAX_STRIDE_SEEN = 8  # inputs of as many sizes are tried

_seen: WeakKeyDictionary[nn.Module, Padding | None] = WeakKeyDictionary()


def padding_seen(conv: nn.Module) -> Padding | None:
    """Return the padding with which a convolution's forward convolves as its base in torch.nn does.

    A copy with random weights runs on inputs of several sizes, at least one for each phase of the
    stride, in train and in eval mode. Its outputs must be those of torch's function for the padded
    input. Padding is with zeros: the same cells at all sizes, or TensorFlow's SAME rule. An object
    is seen once.

    Args:
        conv: A convolution whose only parameters are its weight and bias. It may be on the meta
            device.

    Returns:
        The padding; None if forward does anything else.
    """
    if conv not in _seen:
        _seen[conv] = None
        if _may_only_pad(conv):
            try:
                with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng([]):
                    _seen[conv] = _padding_seen(conv)
            except Exception:  # forward is the user's own
                pass
    return _seen[conv]


def _may_only_pad(conv: Any) -> bool:
    """False if a forward does more than pad, or cannot be run without changing the network."""
    has_tensors = any(True for child in conv.children() for _ in child.parameters())
    has_tensors |= any(True for _ in conv.buffers())
    inputs = inspect.signature(type(conv).forward).parameters
    return (
        not has_tensors
        and len(inputs) == 2  # self and the input
        and conv.padding_mode == "zeros"
        and max(conv.stride) <= MAX_STRIDE_SEEN
    )


def _padding_seen(conv: Any) -> Padding | None:
    twin, weight, bias = _with_random_weights(conv)
    attributes = dict(vars(twin))
    extents = list(map(extent, conv.kernel_size, conv.dilation))
    generator = torch.Generator().manual_seed(1)
    inputs = []
    outputs = []
    for phase in range(max(2, *conv.stride)):
        # Large enough for a few outputs that see no padding.
        shape = [1, conv.in_channels]
        for side, step in zip(extents, conv.stride, strict=True):
            shape.append(2 * side + 3 * step + phase)
        input = torch.randn(shape, generator=generator, device="cpu")
        for is_training in (False, True):
            vars(twin)["training"] = is_training
            inputs.append(input.clone().requires_grad_())
            outputs.append(type(conv).forward(twin, inputs[-1]))
    vars(twin)["training"] = attributes["training"]
    if vars(twin) != attributes:  # it keeps something, such as past steps
        return None
    candidates: list[Padding] = [_numbers(inputs, outputs, extents, conv.stride)]
    if len(extents) == 2:
        candidates.append(DYNAMIC_SAME)

    def explains(padding: Padding) -> bool:
        for input, output in zip(inputs, outputs, strict=True):
            pairs = padded_cells(padding, input.shape[2:], extents, conv.stride)
            padded = F.pad(input, widths_of(pairs))
            function = FUNCTIONS[len(extents)]
            expected = function(padded, weight, bias, conv.stride, 0, conv.dilation, conv.groups)
            if not (expected - output).norm() <= MAX_ERROR * expected.norm():
                return False
        return True

    return next(filter(explains, candidates), None)


def _with_random_weights(conv: Any) -> tuple[nn.Module, Tensor, Tensor | None]:
    """Return a shallow copy of a convolution with random weights, and copies of these."""
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


def _numbers(
    inputs: list[Tensor], outputs: list[Tensor], extents: list[int], stride: tuple[int, ...]
) -> tuple[int | Pair, ...]:
    """Return the cells before and after each axis that explain what the first outputs see.

    padding 2 . . x x x x x     The first output of a kernel of 3 sees input 0 alone,
            [k k k]             the last of its cells.
    """
    first = outputs[0].flatten(2)[..., 0]
    (gradient,) = torch.autograd.grad(first.sum(), inputs[0])
    padding: list[int | Pair] = []
    for axis, (side, step) in enumerate(zip(extents, stride, strict=True)):
        seen = gradient.movedim(2 + axis, 0).flatten(1).any(1).nonzero()
        before = max(0, side - 1 - int(seen.max()))  # less is no padding
        for after in itertools.count():  # ends: outputs are not shorter than their input allows
            lengths = []
            for input in inputs:
                lengths.append((input.shape[2 + axis] + before + after - side) // step + 1)
            if lengths >= [output.shape[2 + axis] for output in outputs]:
                break
        padding.append(before if before == after else (before, after))
    return tuple(padding)
