"""Run a network. All code of this package that needs outputs runs networks in this way.

    with running(model) as run:
        outputs = run(images)

In a run,

- the network gets copies of the inputs, on its device and in its dtype;
- every module is in eval mode, with full precision and seeded random numbers;
- nothing is printed, and compiled parts run uncompiled;
- there are no gradients, unless forward itself needs them.

After each run, the network is as before: its parameters and their gradients, buffers, attributes,
and the containers among the attributes. After the block, its modules are in their previous mode.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import is_out_of_memory
from .library_code import is_library_code
from .model_state import containers_of, copy_tensors_, image_dtype, refill_
from .process_settings import full_precision, seeded, suppress_output

COMPILED = "_orig_mod"  # name of the module that torch.compile wraps
SMALL = 1e-2  # a parameter with only smaller values counts as (nearly) zero


class Run:
    """A function that runs a network on tensors and returns its outputs; see `running`."""

    def __init__(self, model: nn.Module, *, on_meta: bool, restart: Callable[[], None]) -> None:
        self._model = model
        self._on_meta = on_meta
        self._restart = restart
        self._kept: list[_KeptParameter] = []
        if not on_meta and not is_library_code(model):  # it changes no parameter in eval mode
            self._kept = _kept_parameters(model)
        self._needs_gradients: bool | None = None  # None until a run has succeeded

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run the network."""
        try:
            with torch.set_grad_enabled(bool(self._needs_gradients)):
                outputs = self._run_once(args, kwargs)
        except RuntimeError as error:
            if self._needs_gradients is not None or is_out_of_memory(error):
                raise
            # Forward may need gradients, as for forces or unrolled optimisation: run it again.
            self._restart()
            with contextlib.suppress(Exception), torch.enable_grad():
                outputs = self._run_once(args, kwargs)
                self._needs_gradients = True
                return outputs
            raise
        self._needs_gradients = bool(self._needs_gradients)
        return outputs

    def _run_once(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
        model = self._model
        saved = containers_of(model)
        try:
            for kept in self._kept:
                kept.parameter.grad = None  # forward may add to it
            copy_tensors_(model, on_meta=self._on_meta)
            args, kwargs = _copies_for(model, args, kwargs)
            with full_precision(), suppress_output(), seeded(0), _uncompiled(model):
                with torch.device("meta") if self._on_meta else contextlib.nullcontext():
                    return model(*args, **kwargs)
        finally:
            refill_(saved)
            self.restore_parameters_()

    def restore_parameters_(self) -> None:
        """Undo all changes of the parameters by forward."""
        for kept in self._kept:
            kept.restore_()


@contextlib.contextmanager
def running(
    model: nn.Module, *, on_meta: bool = False, restart: Callable[[], None] = lambda: None
) -> Iterator[Run]:
    """Yield a function that runs the network as the top of this file says.

    Args:
        model: The network.
        on_meta: Run the network on the meta device, where no values are computed. User code may
            inspect values, or keep tensors for later, so it must not run there.
        restart: Called before the first run is repeated with gradients. Hooks must then discard
            their records.
    """
    modes = {module: module.training for module in model.modules()}
    run = Run(model, on_meta=on_meta, restart=restart)
    try:
        for module in modes:
            module.training = False  # not `eval()`, which the model's class may override
        yield run
    finally:
        for module, training in modes.items():
            module.training = training
        run.restore_parameters_()  # stand-ins overwrite weights between runs


def _copies_for(
    model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return copies of the inputs, on the model's device and in its `image_dtype`."""
    tensors = [*model.parameters(), *model.buffers(), *args, *kwargs.values()]
    device = tensors[0].device
    dtype = image_dtype(model)

    def copied(tensor: Tensor) -> Tensor:
        dtype_of_copy = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, dtype_of_copy, copy=True)

    return tuple(map(copied, args)), {name: copied(tensor) for name, tensor in kwargs.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeptParameter:
    """A parameter with a copy of everything that forward may change of it."""

    parameter: nn.Parameter
    data: Tensor  # the parameter's memory
    values: Tensor  # a copy of the values
    requires_grad: bool
    gradient: Tensor | None

    def restore_(self) -> None:
        """Restore the parameter. Writing to `data` leaves graphs valid that have saved it."""
        parameter = self.parameter
        if parameter.dtype != self.data.dtype or not parameter.is_set_to(self.data):
            parameter.data = self.data
        self.data.copy_(self.values)
        if parameter.requires_grad != self.requires_grad:
            parameter.requires_grad_(self.requires_grad)
        parameter.grad = self.gradient


def _kept_parameters(model: nn.Module) -> list[_KeptParameter]:
    kept = []
    for parameter in model.parameters():
        with contextlib.suppress(RuntimeError):  # torch cannot copy or write to some kinds
            values = parameter.detach().clone()
            parameter.data.copy_(values)  # an error should occur here, not during the restore
            kept.append(
                _KeptParameter(
                    parameter=parameter,
                    data=parameter.data,
                    values=values,
                    requires_grad=parameter.requires_grad,
                    gradient=parameter.grad,
                )
            )
    return kept


def _uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Run compiled parts of a model uncompiled: one image is not worth a compilation."""
    for module in model.modules():
        if COMPILED in module._modules or vars(module).get("_compiled_call_impl") is not None:
            stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance(
                "force_eager"
            )
            return stance
    return contextlib.nullcontext()


@contextlib.contextmanager
def without_small_parameters(model: nn.Module) -> Iterator[bool]:
    """Give parameters that are (nearly) zero larger values inside the block.

    A small parameter, such as a new layer scale, hides a branch of the network from the outputs.
    The block gets True if there are small parameters. Enter `running` inside the block, because
    `running` restores the values that it finds.
    """
    generator = torch.Generator().manual_seed(1)
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            with contextlib.suppress(RuntimeError):  # torch cannot change some kinds in place
                if parameter.detach().abs().max() >= SMALL:
                    continue
                old = parameter.detach().clone()
                parameter.data.copy_(old)  # raises if torch cannot change the parameter
                scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
                values = torch.rand(parameter.shape, generator=generator, device="cpu") / 2 + 0.5
                kept.append((parameter, old))
                parameter.data.copy_(values * scale)
        yield bool(kept)
    finally:
        for changed, values in reversed(kept):  # parameters may share memory
            changed.data.copy_(values)
