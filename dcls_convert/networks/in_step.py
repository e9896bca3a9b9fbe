"""Several forward passes of a network in step, so that a module sees the inputs of all before it gives outputs."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..errors import ModelError

Answer = Callable[[nn.Module, list[Tensor]], Sequence[Tensor]]  # a module, inputs of all passes -> outputs
_PASS: ContextVar["_Pass"] = ContextVar("pass")


def run_in_step(modules: Sequence[nn.Module], passes: Sequence[Callable[[], object]], answer: Answer) -> None:
    """Run forward passes; where each has called the same one of the modules, `answer` gives the outputs for all.

    One pass runs at a time, without gradients. ModelError: they call modules in different orders.
    """
    with contextlib.ExitStack() as back:
        for module in modules:
            back.callback(vars(module).pop, "forward")
            module.forward = functools.partial(_ask, module)
        started, calls = [], []
        for forward in passes:
            started.append(_Pass(forward))
            back.callback(started[-1].stop)
            calls.append(started[-1].call())
        while any(calls):
            if len({call and call[0] for call in calls}) > 1:
                raise ModelError("the model calls its layers in another order for other images")
            outputs = list(answer(calls[0][0], [input for _, input in calls]))
            calls.clear()
            for each in started:
                each.outputs.put(outputs.pop(0))
                calls.append(each.call())


def _ask(module: nn.Module, input: Tensor) -> Tensor:
    return _PASS.get().ask(module, input)


class _Stopped(BaseException):
    """Ends a pass for which nobody waits."""


class _Pass:
    """A forward pass in a thread of its own: either that runs, or the thread that made it."""

    def __init__(self, forward: Callable[[], object]) -> None:
        self._calls, self.outputs = SimpleQueue[Any](), SimpleQueue[Tensor | None]()
        threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
        modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # a default device is one
        modes += _get_current_dispatch_mode_stack()

        def work() -> None:
            _PASS.set(self)
            torch.set_num_threads(threads)
            try:
                with contextlib.ExitStack() as inside:
                    for context in (torch.inference_mode(inference), torch.no_grad(), *modes):
                        inside.enter_context(context)
                    self._calls.put(forward() and None)
            except BaseException as error:  # raised again where it is waited for
                self._calls.put(error)

        self._thread = Thread(target=copy_context().run, args=(work,), daemon=True)
        self._thread.start()

    def call(self) -> Any:
        """Outside: the module that it calls next, and its input; None at the end."""
        call = self._calls.get()
        if isinstance(call, BaseException):
            raise call
        return call

    def ask(self, module: nn.Module, input: Tensor) -> Tensor:
        """Inside: the module's outputs."""
        self._calls.put((module, input))
        outputs = self.outputs.get()
        if outputs is None:
            raise _Stopped
        return outputs

    def stop(self) -> None:
        self.outputs.put(None)
        self._thread.join()
