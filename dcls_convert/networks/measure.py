"""Measure which convolutions of a network may be replaced, by running it in its own place.

1. Stand-ins take the places of the convolutions. To all code that looks at them they are DCLS
   layers, but they compute what the convolutions did, and no weight has its values any more, old or
   new. So if outputs change, other code uses the convolution in some way.
2. A cell of the input changes, and so do outputs. Where they look to one side alone, as in a causal
   network, kernels grow along an axis. Convolutions that then let outputs look to the other side
   must not grow along it.

Afterwards, everything is as it was, also after an error.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import is_out_of_memory
from ..layers.conv_classes import Conv
from ..text import one_line
from .input_tensors import Inputs, inputs_text, pixel_count, with_batch
from .inputs import random_arguments
from .model_outputs import relative_error, tensors_in
from .running import full_precision, restored_weights, run_batch, seeded, suppress_output
from .sides import Reaches, have_new_side, one_way, reaches_of
from .stand_ins import StandIn, grows, in_place, with_longer_kernel

LIBRARIES = ("timm", "torch", "torchvision")
PLACES = (0.3, 0.5, 0.7)  # of the changed cells, one in each image of a batch
LARGE_IMAGE = 128 * 128  # pixels; of larger images, smaller ones are tried first
TOLERANCE = 1e-4  # of outputs: on GPUs, sums have no fixed order
SMALL = 1e-2  # parameters below it hide what is behind them, such as layer scale
NOT_CALLED = "the forward pass of the network in eval mode does not call it"


def not_measured_text(reason: str) -> str:
    """Say that a network was not measured, and what this may mean."""
    return (
        f"what the network does with its convolutions was not measured: {reason}. Other code may "
        "use them, and larger windows may look ahead in a causal network"
    )


class CannotMeasureError(Exception):
    """The network cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a measurement found, by the names of convolutions."""

    reasons: dict[str, str]  # what would happen if it were replaced
    # Axes along which it must not grow, or outputs would look to a side that they did not see.
    one_sided_axes: dict[str, tuple[int, ...]]


def is_library_code(model: nn.Module) -> bool:
    """True for a network of timm or torchvision as it is, which the tests of this package cover.

    It consists of library code alone: no hooks, and no forward that was set on a module.
    """
    if _library_of(model) not in ("timm", "torchvision"):
        return False
    for module in model.modules():
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        if _library_of(module) not in LIBRARIES or has_hooks or "forward" in vars(module):
            return False
    return True


def _library_of(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def measure(model: nn.Module, convs: Mapping[str, Conv], inputs: Inputs) -> Measured:
    """Find the convolutions that cannot be replaced, and those that must not grow along an axis.

    The network runs on random inputs, on its own device: on small images if it takes them. Training
    mode is included if it runs there.

    Args:
        model: The network, with values. It is changed meanwhile, and then as before.
        convs: Convolutions that can be replaced as far as they themselves show, by name.
        inputs: What forward takes.

    Raises:
        CannotMeasureError: The network does not run, or its outputs show nothing.
    """
    modes = {module: module.training for module in model.modules()}
    python_random = random.getstate()
    try:
        with torch.no_grad(), full_precision():
            network = _Network(model, convs, inputs)
            reasons = network.find_users()
            axes = network.find_one_sided([name for name in convs if name not in reasons])
    finally:
        random.setstate(python_random)
        for module, training in modes.items():
            module.training = training
    return Measured(reasons, axes)


class _Network:
    """A network that is measured, and what it returned at first."""

    def __init__(self, model: nn.Module, convs: Mapping[str, Conv], inputs: Inputs) -> None:
        self.model = model
        self.convs = convs
        for some_inputs in _inputs_to_try(inputs):
            self.arguments = random_arguments(some_inputs)
            try:
                with _counted_calls(convs) as self.calls:
                    self.outputs = self.run()
            except Exception as error:  # the network's own code may raise anything
                if some_inputs is inputs or is_out_of_memory(error):  # the last ones
                    where = inputs_text(inputs)
                    raise CannotMeasureError(f"forward fails at {where}: {_text(error)}") from error
            else:
                if all(self.calls.values()) and self._keep_batch():
                    break
        if not any(tensor.isfinite().any() for tensor in self.outputs):
            raise CannotMeasureError("its outputs have no finite numbers to compare")

    def _keep_batch(self) -> bool:
        """True if outputs have an entry for each image, so that images can be told apart."""
        batches = {len(tensor) for tensor in self.arguments.tensors() if tensor.dim()}
        return any(tensor.dim() and len(tensor) in batches for tensor in self.outputs)

    def run(self, tensors: Sequence[Tensor] = (), *, training: bool = False) -> list[Tensor]:
        """Return the floating-point outputs for some inputs, always with the same random numbers.

        Without `tensors`, the inputs are those of the first run. What the network's code changes in
        convolutions is undone.
        """
        with restored_weights(self.convs.values()):
            return self._forward(tensors, training)

    def _forward(self, tensors: Sequence[Tensor], training: bool) -> list[Tensor]:
        for module in self.model.modules():
            module.training = training  # not `train()`, which the model's class may override
        args, kwargs = self.arguments.args, self.arguments.kwargs
        if tensors:
            args = tuple(tensors[: len(args)])
            kwargs = dict(zip(kwargs, tensors[len(args) :], strict=True))
        random.seed(0)
        with suppress_output(), seeded(0):
            outputs = run_batch(self.model, *args, **kwargs)
        return [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]

    # Whether the network still computes the same.

    def find_users(self) -> dict[str, str]:
        """Return what would happen, by the names of convolutions that other code uses."""
        reasons = {name: NOT_CALLED for name, count in self.calls.items() if not count}
        names = [name for name in self.convs if name not in reasons]
        reasons |= self._find_users(names, self.outputs, training=False)
        with contextlib.suppress(Exception):  # in training mode, a network may need labels
            expected = self.run(training=True)
            names = [name for name in names if name not in reasons]
            users = self._find_users(names, expected, training=True)
            reasons |= {name: f"in training mode, {reason}" for name, reason in users.items()}
        return reasons

    def _find_users(
        self, names: Sequence[str], expected: Sequence[Tensor], *, training: bool
    ) -> dict[str, str]:
        reasons: dict[str, str] = {}

        def change(some: Sequence[str]) -> bool:
            reason = self._change(some, expected, training)
            if reason is not None:
                reasons.update(dict.fromkeys(some, reason))
            return reason is not None

        found = _culprits(names, change)
        if found and not _agree(expected, self.run(training=training)):
            raise CannotMeasureError("its outputs differ from run to run")
        return {name: reasons[name] for name in found}

    def _change(
        self, names: Sequence[str], expected: Sequence[Tensor], training: bool
    ) -> str | None:
        """Return what is not as before with stand-ins for some convolutions; None if all is."""
        convs = [self.convs[name] for name in names]
        with restored_weights(self.convs.values()) as values:
            stand_ins = [StandIn(conv, values[conv]) for conv in convs]
            layers = {stand_in.conv: stand_in.layer for stand_in in stand_ins}
            try:
                with in_place(self.model, layers):
                    outputs = self._forward((), training)
            except Exception as error:
                if is_out_of_memory(error):
                    raise CannotMeasureError("out of memory") from error
                return f"forward would fail with a DCLS layer in its place ({_text(error)})"
            if any(stand_in.is_changed() for stand_in in stand_ins):
                return "other code changes its weight"
        calls = [stand_in.calls for stand_in in stand_ins]
        if not training and calls != [self.calls[name] for name in names]:
            return "other code calls it, and would continue to use the old one"
        if not _agree(expected, outputs):
            return "outputs would change although it computes the same: other code uses it"
        return None

    # Whether outputs look to a new side.

    def find_one_sided(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return the axes along which convolutions must not grow, by their names."""
        axes: dict[str, tuple[int, ...]] = {}
        with _without_small_parameters(self.model):
            before = one_way(self._reaches())
            for axis in range(3 if before else 0):

                def look_further(some: Sequence[str], axis: int = axis) -> bool:
                    convs = [self.convs[name] for name in some]
                    with in_place(self.model, {c: with_longer_kernel(c, axis) for c in convs}):
                        return have_new_side(before, self._reaches())

                growing = [name for name in names if grows(self.convs[name], axis)]
                for name in _culprits(growing, look_further):
                    axes[name] = (*axes.get(name, ()), axis)
        return axes

    def _reaches(self) -> Reaches:
        """Return how far the outputs look, by the input, its axes, and the output."""
        before = self.run()
        found: Reaches = {}
        tensors = self.arguments.tensors()
        for index, tensor in enumerate(tensors):
            for axes in _spatial_axes(tensor):
                after = []
                cells, batches = _with_changed_cells(tensor, axes)
                for batch in batches:
                    after.append(self.run([*tensors[:index], batch, *tensors[index + 1 :]]))
                sides = [tensor.shape[axis] for axis in axes]
                for number, output in enumerate(before):
                    if output.dim() > 1 and len(output) == len(tensor):
                        old = torch.cat([output] * len(after))
                        new = torch.cat([outputs[number] for outputs in after])
                        for key, reach in reaches_of(old, new, sides, cells).items():
                            found[index, axes, number, *key] = reach
        return found


def _inputs_to_try(inputs: Inputs) -> Iterator[Inputs]:
    """Yield inputs of smaller images, a batch of the inputs, and the inputs as they are."""
    factor = 1
    while pixel_count(inputs) > LARGE_IMAGE * factor**2:
        factor *= 2
    sides = [side for tensor in inputs for side in tensor.shape[2:]]
    if factor > 1 and not any(side % (2 * factor) for side in sides):
        smaller = []
        for tensor in inputs:
            shape = (*tensor.shape[:2], *(side // factor for side in tensor.shape[2:]))
            smaller.append(replace(tensor, shape=shape))
        yield with_batch(tuple(smaller), len(PLACES))
    yield with_batch(inputs, len(PLACES))
    yield inputs


def _spatial_axes(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the axes on which an input may have an order; in a sequence, channels may be last."""
    if tensor.dim() < 2:
        return []
    if tensor.dim() == 3:
        return [(2,), (1,)]
    return [tuple(range(min(2, tensor.dim() - 1), tensor.dim()))]


def _with_changed_cells(
    tensor: Tensor, axes: Sequence[int]
) -> tuple[list[list[int]], list[Tensor]]:
    """Change one cell of each image; return the cells, and the changed batches.

    There are several batches if one has fewer images than there are places.
    """
    cells = []
    batches = []
    for first in range(1 if len(tensor) >= len(PLACES) else len(PLACES)):
        changed = tensor.clone()
        for number, image in enumerate(changed):
            place = PLACES[(first + number) % len(PLACES)]
            cell = [int(place * tensor.shape[axis]) for axis in axes]
            index: list[Any] = [slice(None)] * image.dim()
            for axis, position in zip(axes, cell, strict=True):
                index[axis - 1] = position
            values = image[tuple(index)]
            if tensor.is_floating_point():
                image[tuple(index)] = 3 - 2 * values
            else:
                image[tuple(index)] = tensor.amin() + tensor.amax() - values
            cells.append(cell)
        batches.append(changed)
    return cells, batches


@contextlib.contextmanager
def _counted_calls(convs: Mapping[str, Conv]) -> Iterator[dict[str, int]]:
    """Count the calls of convolutions inside the block."""
    calls = dict.fromkeys(convs, 0)
    with contextlib.ExitStack() as hooks:
        for name, conv in convs.items():

            def count(*_: object, name: str = name) -> None:
                calls[name] += 1

            hooks.enter_context(conv.register_forward_pre_hook(count))
        yield calls


@contextlib.contextmanager
def _without_small_parameters(model: nn.Module) -> Iterator[None]:
    """Give parameters that are (nearly) zero other values inside the block."""
    generator = torch.Generator().manual_seed(1)
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter in model.parameters():
            is_lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
            if is_lazy or not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.abs().max() < SMALL:
                kept.append((parameter, parameter.detach().clone()))
                scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 1
                values = torch.rand(parameter.shape, generator=generator, device="cpu") / 2 + 0.5
                parameter.data.copy_(values * scale)
        yield
    finally:
        for changed, values in kept:
            changed.data.copy_(values)


def _culprits(names: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return those for which a test fails alone; and all, if it still fails without these."""

    def alone(some: Sequence[str]) -> list[str]:
        if len(some) == 1:
            return list(some)
        found = []
        for half in (some[: len(some) // 2], some[len(some) // 2 :]):
            if fails(half):
                found += alone(half)
        return found

    if not names or not fails(names):
        return []
    found = alone(names)
    rest = [name for name in names if name not in found]
    return list(names) if rest and fails(rest) else found


def _agree(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """True if outputs have the same shapes and, but for rounding, the same values."""
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in found]:
        return False
    for one, other in zip(expected, found, strict=True):
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return False
        if relative_error([(one[finite], other[finite])]) > TOLERANCE:
            return False
    return True


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)[:120]}"
