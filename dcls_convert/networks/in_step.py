"""Several forward passes of a network in step, so that a module sees the inputs of all before it gives outputs."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from ..errors import ModelError
from .running import AUTOCASTING

Answer = Callable[
    [nn.Module, list[Tensor]], Sequence[Tensor]
]  # a module, inputs of all passes -> outputs


@torch.no_grad()
def run_in_step(
    modules: Sequence[nn.Module], passes: Sequence[Callable[[], object]], answer: Answer
) -> None:
    """Run forward passes; where each has called the same one of the modules, `answer` gives the outputs for all.

    One pass runs at a time, in this thread. ModelError: they call modules in different orders.
    """
    here, inference = getcurrent(), torch.is_inference_mode_enabled()
    casts = {kind: torch.is_autocast_enabled(kind) for kind in AUTOCASTING}

    def ask(module: nn.Module, input: Tensor) -> Tensor:
        """In a pass. What its code has set for itself holds there alone."""
        with torch.inference_mode(inference), torch.no_grad(), contextlib.ExitStack() as own:
            for kind, enabled in casts.items():
                if torch.is_autocast_enabled(kind) != enabled:
                    own.enter_context(torch.autocast(kind, enabled=enabled))
            outputs: Tensor = here.switch((module, input))
        return outputs

    with contextlib.ExitStack() as back:
        for module in modules:
            back.callback(vars(module).pop, "forward")
            module.forward = partial(ask, module)
        started = [greenlet(forward) for forward in passes]
        for each in started:
            back.callback(each.throw)  # ends it where it is
        # The module that it calls, and its input; what it gives, at the end.
        calls: list[Any] = [each.switch() for each in started]
        while not all(each.dead for each in started):
            if any(each.dead for each in started) or len({module for module, _ in calls}) > 1:
                raise ModelError("the model calls its layers in another order for other images")
            outputs = answer(calls[0][0], [input for _, input in calls])
            calls = [each.switch(output) for each, output in zip(started, outputs, strict=True)]
