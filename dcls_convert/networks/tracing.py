"""Run a network once, to record the inputs of its convolutions and its costs."""

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.conv_classes import AnyConv
from ..layers.conv_settings import dims_of
from ..running.arguments import random_arguments
from ..running.compare_outputs import finite_share, tensors_in
from ..running.input_spec import InputSpec
from ..running.run import running
from .macs import MacCounter
from .whole_networks import Beginnings, whole_networks

# torchvision's detectors with all their convolutions in backbone and head.
ONE_STAGE_DETECTORS = ("FCOS", "RetinaNet", "SSD")


@dataclass(slots=True)
class Calls:
    """The calls of one convolution during a trace."""

    output_size: tuple[int, ...]  # spatial size in the first call
    input_extent: tuple[int, ...]  # smallest spatial input of any call
    output_positions: int = 0  # spatial positions of all calls, for one image
    takes_image: bool = False  # True if it saw an input of the network in any call


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The record of one forward pass through a model."""

    calls: dict[str, Calls]  # by the first qualified name of the convolution, in order
    networks: set[str]  # paths of the whole networks inside the model
    macs: int  # MACs of all operators
    uncounted: tuple[str, ...]  # see `MacCounter`
    finite: float  # share of the outputs that are finite; 1 on meta


def trace(model: nn.Module, inputs: InputSpec, *, on_meta: bool) -> Trace:
    """Run the model on random inputs, and record the calls of its convolutions.

    Args:
        model: The model; afterwards, it is as before.
        inputs: The tensors that forward takes.
        on_meta: See `running`.

    Raises:
        Exception: Any error of the model's own code.
    """
    calls: dict[str, Calls] = {}
    convs: dict[AnyConv, tuple[str, int]] = {}  # name, and number of dimensions
    for name, module in model.named_modules():
        if isinstance(module, AnyConv):
            convs[module] = (name, dims_of(module))
    beginnings = Beginnings()

    def record(
        module: AnyConv, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        input = args[0] if args else kwargs["input"]
        name, dims = convs[module]
        output_size = tuple(output.shape[-dims:])
        input_extent = tuple(input.shape[-dims:])
        conv_calls = calls.setdefault(name, Calls(output_size, input_extent))
        conv_calls.input_extent = tuple(map(min, conv_calls.input_extent, input_extent))
        batch = output.shape[0] if output.dim() == dims + 2 else 1
        conv_calls.output_positions += batch * math.prod(output_size)
        if beginnings.is_input(input):
            conv_calls.takes_image = True

    counter = MacCounter(model)

    def restart() -> None:
        calls.clear()
        beginnings.clear()
        counter.restart()

    arguments = random_arguments(inputs, device="meta" if on_meta else "cpu")
    outputs = None
    with (
        counter,
        contextlib.ExitStack() as stack,
        running(model, on_meta=on_meta, restart=restart) as run,
    ):
        stack.enter_context(
            model.register_forward_pre_hook(beginnings.note_inputs, with_kwargs=True)
        )
        for path, module in model.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule):  # it refuses this hook
                # A call of a module without children counts for the module that holds it.
                holder = path if module._modules else path.rpartition(".")[0]
                hook = functools.partial(beginnings.note_call, holder)
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        for conv in convs:
            stack.enter_context(conv.register_forward_hook(record, with_kwargs=True))
        _end_after_the_head(model, stack)
        outputs = run(*arguments.args, **arguments.kwargs)
    conv_of = {name: conv for conv, (name, _) in convs.items()}
    called = {name: conv_of[name] for name in calls}
    return Trace(
        calls=calls,
        networks=whole_networks(called, beginnings.with_input, beginnings.with_picture),
        macs=counter.macs,
        uncounted=counter.uncounted,
        finite=1.0 if on_meta else finite_share(tensors_in(outputs)),
    )


def _end_after_the_head(model: nn.Module, stack: contextlib.ExitStack) -> None:
    """Let the forward pass of a one-stage detector of torchvision end after its head.

    The code after the head has no MACs. It sorts boxes by their values, which do not exist on meta.
    """
    for base in type(model).__mro__:
        if not base.__module__.startswith("torchvision.models.detection."):
            continue
        if base.__name__ == "GeneralizedRCNN":
            raise ValueError(
                f"what a {type(model).__name__} computes depends on how many regions it finds"
            )
        if base.__name__ in ONE_STAGE_DETECTORS:
            stack.enter_context(model.get_submodule("head").register_forward_hook(_stop))
            stack.enter_context(contextlib.suppress(_HeadIsDone))


class _HeadIsDone(Exception):
    """Ends a forward pass after the head; not an error."""


def _stop(*_: object) -> None:
    raise _HeadIsDone
