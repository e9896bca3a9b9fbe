"""Run a meta copy of a model to find what its convolutions see, and what it costs.

On the meta device, no values are computed.
"""

import contextlib
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.conv_classes import AnyConv
from .caches import separate_caches
from .conv_uses import ConvUses
from .copying import meta_copy
from .input_tensors import Inputs, with_batch
from .inputs import Arguments, meta_arguments
from .model_outputs import ComparisonError, tensors_in
from .running import image_dtype, seeded, suppress_output
from .shifted_maps import find_shifted_axes

# torchvision's detectors with all their convolutions in backbone and head.
ONE_STAGE_DETECTORS = ("FCOS", "RetinaNet", "SSD")


@dataclass(slots=True)
class Calls:
    """The calls of one convolution during a trace."""

    output_size: tuple[int, ...]  # spatial, of the first call
    input_extent: tuple[int, ...]  # smallest spatial input of any call
    output_positions: int = 0  # spatial positions of all calls, for one image
    # True if it saw an input of the network, or if it was called before any other convolution.
    takes_image: bool = False
    # Axes along which other code shifts its map, so that its kernel is not centred.
    shifted_axes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The record of one forward pass through a model."""

    inputs: Inputs
    calls: dict[str, Calls]  # by the first qualified name of the convolution
    macs: int  # of all operators
    # Name of a convolution -> how code other than its own forward uses its weight or settings.
    other_uses: dict[str, str]


def trace(model: nn.Module, inputs: Inputs) -> Trace:
    """Run a meta copy of the model, in eval mode, on its inputs.

    Then the copy runs in training mode, where other code may use convolutions too. Errors of the
    model's own code in eval mode are raised unchanged. Caches of that code stay as they are.
    """
    with separate_caches(model) as caches:
        try:
            return _trace_in_both_modes(meta_copy(model), model, inputs)
        except Exception:
            with contextlib.suppress(Exception):
                caches.restore()
                if caches.set_aside():  # perhaps cached by a run that was not on meta
                    return _trace_in_both_modes(meta_copy(model), model, inputs)
            # Some models (YOLO) read the values of tensors in plain attributes.
            caches.restore()
            with contextlib.suppress(Exception):
                meta = meta_copy(model, real_attributes=True)
                return _trace_in_both_modes(meta, model, inputs)
            raise


def _trace_in_both_modes(meta: nn.Module, original: nn.Module, inputs: Inputs) -> Trace:
    traced = _trace(meta, original, inputs)
    other_uses = _uses_in_training_mode(meta, original, inputs) | traced.other_uses
    return replace(traced, other_uses=other_uses)


def _uses_in_training_mode(meta: nn.Module, original: nn.Module, inputs: Inputs) -> dict[str, str]:
    """Return how other code uses convolutions in training mode, as far as the model runs there."""
    for module in meta.modules():
        module.training = True  # not `train()`, which the model's class may override
    uses = ConvUses(meta, original)
    # A model in training mode may draw random numbers, and some need labels, or a process group.
    python_random = random.getstate()
    try:
        with contextlib.suppress(Exception), suppress_output(), seeded(0):
            _run_and_record(meta, with_batch(inputs, 2), uses)  # BatchNorm refuses single values
    finally:
        random.setstate(python_random)
    return {name: f"in training mode, {reason}" for name, reason in uses.reasons.items()}


def _trace(meta: nn.Module, original: nn.Module, inputs: Inputs) -> Trace:
    from torch.utils.flop_counter import FlopCounterMode

    counter: Any = FlopCounterMode(display=False)
    counter.mod_tracker = _WholeModel()
    uses = ConvUses(meta, original)
    with counter:
        arguments, outputs, calls = _run_and_record(meta, inputs, uses)
    returned: list[Tensor] = []
    with contextlib.suppress(ComparisonError):  # objects that refer to themselves
        returned = tensors_in(outputs)
    shifted = find_shifted_axes(uses.operations, arguments.tensors(), returned, uses.names)
    for name, axes in shifted.items():
        if name in calls:  # not if other code calls its `forward`
            calls[name].shifted_axes = axes
    return Trace(
        inputs=inputs,
        calls=calls,
        macs=int(counter.get_total_flops()) // 2,  # a multiply-accumulate is two operations
        other_uses=uses.reasons,
    )


class _WholeModel(contextlib.nullcontext[None]):
    """Counts all operations for the model as a whole, in the place of torch's module tracker.

    The module tracker hooks every module of the process, so it is confused by other threads.
    """

    parents = ("Global",)


def _run_and_record(
    meta: nn.Module, inputs: Inputs, uses: ConvUses
) -> tuple[Arguments, object, dict[str, Calls]]:
    """Run a meta copy, watched by `uses`.

    Returns:
        The network's inputs and outputs, and the calls of each convolution.
    """
    arguments = meta_arguments(inputs, image_dtype(meta))
    tensors = arguments.tensors()
    calls: dict[str, Calls] = {}
    convs: dict[nn.Module, tuple[str, int]] = {}  # name, and number of dimensions
    for name, module in meta.named_modules():
        if isinstance(module, AnyConv):
            convs[module] = (name, len(module.kernel_size))

    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        input = args[0] if args else kwargs["input"]
        name, dims = convs[module]
        output_size = tuple(output.shape[-dims:])
        input_extent = tuple(input.shape[-dims:])
        is_first = not calls
        conv_calls = calls.setdefault(name, Calls(output_size, input_extent))
        conv_calls.input_extent = tuple(map(min, conv_calls.input_extent, input_extent))
        batch = output.shape[0] if output.dim() == dims + 2 else 1
        conv_calls.output_positions += batch * math.prod(output_size)
        if is_first or any(input is tensor for tensor in tensors):
            conv_calls.takes_image = True

    with contextlib.ExitStack() as hooks, torch.no_grad(), torch.device("meta"):
        for conv in convs:
            hooks.enter_context(conv.register_forward_hook(record, with_kwargs=True))
        with uses:
            outputs = _run(meta, arguments)
    return arguments, outputs, calls


def _run(model: nn.Module, arguments: Arguments) -> object:
    """Run a model on its inputs, and return its outputs.

    Some torchvision models do not take a batch of images.
    """
    for base in type(model).__mro__:
        family = base.__module__.partition("torchvision.models.")[2]
        if not family.startswith("detection."):
            continue
        if base.__name__ == "GeneralizedRCNN":
            raise ValueError(
                f"what a {type(model).__name__} computes depends on how many regions it finds"
            )
        if base.__name__ in ONE_STAGE_DETECTORS:
            # Stop after the head: what follows has no MACs, and sorts boxes by their values, which
            # a meta copy does not have.
            hook = model.get_submodule("head").register_forward_hook(_stop)
            with hook, contextlib.suppress(_HeadIsDone):
                model([*arguments.args[0]])
            return None
    return model(*arguments.args, **arguments.kwargs)


class _HeadIsDone(Exception):
    """Ends a forward pass after the head; not an error."""


def _stop(*_: object) -> None:
    raise _HeadIsDone
