"""Run several forward passes of a network in step: a module gets the inputs of all passes at once.

    driver                        pass 1                     pass 2
    switch()        ------------> the model's code
                    <------------ (conv, input 1)
    switch()        ---------------------------------------> the model's code
                    <--------------------------------------- (conv, input 2)
    step_all(conv, [input 1, input 2]) -> [output 1, output 2]
    switch(output 1) -----------> the model's code after conv, up to its next call

Each pass is a greenlet, so exactly one runs at any time, in the caller's thread. A thread would
not do: while it waits inside the model's code, it could not be ended when another pass fails.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from ..errors import ModelError
from .running import AUTOCAST_DEVICES

# Takes a module and its inputs in all passes; returns its outputs for them.
StepAll = Callable[[nn.Module, list[Tensor]], Sequence[Tensor]]
ORDERS_DIFFER = "the model calls its layers in different orders for different images"


@torch.no_grad()
def run_in_lockstep(
    modules: Sequence[nn.Module], passes: Sequence[Callable[[], object]], step_all: StepAll
) -> None:
    """Run forward passes in step: `step_all` computes each call of a module for all passes.

    Raises:
        ModelError: The passes call the modules in different orders.
    """
    driver = getcurrent()
    inference_mode = torch.is_inference_mode_enabled()
    autocast_enabled: dict[str, bool] = {}
    for device in AUTOCAST_DEVICES:
        autocast_enabled[device] = torch.is_autocast_enabled(device)

    def hand_over(module: nn.Module, input: Tensor) -> Tensor:
        """Stand in for a module's forward inside a pass; the driver supplies the output.

        Grad, inference and autocast modes that the pass has entered must not leak into the driver
        or other passes.
        """
        with (
            torch.inference_mode(inference_mode),
            torch.no_grad(),
            contextlib.ExitStack() as modes_of_driver,
        ):
            for device, enabled in autocast_enabled.items():
                if torch.is_autocast_enabled(device) != enabled:
                    modes_of_driver.enter_context(torch.autocast(device, enabled=enabled))
            output: Tensor = driver.switch((module, input))
        return output

    with contextlib.ExitStack() as cleanup:
        for module in modules:
            cleanup.callback(vars(module).pop, "forward")
            module.forward = partial(hand_over, module)
        greenlets: list[Any] = []
        calls: list[Any] = []  # per pass: its current (module, input), or its result at the end
        for forward in passes:
            pass_greenlet = greenlet(forward)
            cleanup.callback(pass_greenlet.throw)  # ends a pass that waits inside the model's code
            greenlets.append(pass_greenlet)
            calls.append(pass_greenlet.switch())
        while True:
            ended = [pass_greenlet.dead for pass_greenlet in greenlets]
            if all(ended):
                return
            if any(ended):
                raise ModelError(ORDERS_DIFFER)
            called_modules, inputs = zip(*calls, strict=True)
            if len(set(called_modules)) > 1:
                raise ModelError(ORDERS_DIFFER)
            outputs = step_all(called_modules[0], list(inputs))
            for index, (pass_greenlet, output) in enumerate(zip(greenlets, outputs, strict=True)):
                calls[index] = pass_greenlet.switch(output)
