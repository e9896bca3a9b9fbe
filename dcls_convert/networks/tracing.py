"""Run a network once to find what its convolutions see, and what it costs."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..layers.conv_classes import AnyConv
from .input_tensors import Inputs
from .inputs import Arguments, meta_arguments, random_arguments
from .macs import MacCounter
from .model_outputs import tensors_in
from .model_state import eval_mode, image_dtype, restored_values, run_batch, without_values
from .process_settings import seeded, suppress_output

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The record of one forward pass through a model."""

    calls: dict[str, Calls]  # by the first qualified name of the convolution
    macs: int  # of all operators


def trace(model: nn.Module, inputs: Inputs, *, on_meta: bool) -> Trace:
    """Run the model on its inputs in eval mode.

    Args:
        model: Afterwards as before.
        inputs: What forward takes.
        on_meta: Run it on the meta device, where no values are computed. Code that is not a
            library's may look at values, or keep tensors for later, so it must not run there.

    Raises:
        Exception: What the model's own code raises.
    """
    undone: contextlib.AbstractContextManager[object]
    if on_meta:
        arguments = meta_arguments(inputs, image_dtype(model))
        undone = without_values(model)
    else:
        arguments = random_arguments(inputs)
        undone = restored_values(model)
    with eval_mode(model), suppress_output(), seeded(0), undone:
        return _run_and_record(model, arguments)


def _run_and_record(model: nn.Module, arguments: Arguments) -> Trace:
    calls: dict[str, Calls] = {}
    convs: dict[nn.Module, tuple[str, int]] = {}  # name, and number of dimensions
    for name, module in model.named_modules():
        if isinstance(module, AnyConv):
            convs[module] = (name, len(module.kernel_size))
    taken: list[Tensor] = []  # by the network

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.extend(tensors_in([args, kwargs]))

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
        if is_first or any(input is tensor for tensor in taken):
            conv_calls.takes_image = True

    with MacCounter(model) as counter, contextlib.ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(take, with_kwargs=True))
        for conv in convs:
            hooks.enter_context(conv.register_forward_hook(record, with_kwargs=True))
        _run(model, arguments)
    return Trace(calls=calls, macs=counter.macs)


def _run(model: nn.Module, arguments: Arguments) -> None:
    """Run a model on its inputs; a one-stage detector of torchvision up to the end of its head."""
    with contextlib.ExitStack() as hooks:
        for base in type(model).__mro__:
            if not base.__module__.startswith("torchvision.models.detection."):
                continue
            if base.__name__ == "GeneralizedRCNN":
                raise ValueError(
                    f"what a {type(model).__name__} computes depends on how many regions it finds"
                )
            if base.__name__ in ONE_STAGE_DETECTORS:
                # Stop after the head: what follows has no MACs, and sorts boxes by their values,
                # which are not there on meta.
                hooks.enter_context(model.get_submodule("head").register_forward_hook(_stop))
                hooks.enter_context(contextlib.suppress(_HeadIsDone))
        run_batch(model, *arguments.args, **arguments.kwargs)


class _HeadIsDone(Exception):
    """Ends a forward pass after the head; not an error."""


def _stop(*_: object) -> None:
    raise _HeadIsDone
