"""Measure which convolutions may be replaced, by running the network with stand-ins for them.

1. Stand-ins take the places of the convolutions. To all code that looks at them they are DCLS
   layers, but they compute what the convolutions did, and the weights of both the convolution and
   the stand-in are filled with arbitrary values. So if the outputs change, some other code reads
   the convolution or its weight.
2. One cell of the input is changed, to see which outputs change. If the outputs look to one side
   only, as in a causal network, each kernel is made longer along an axis. A convolution whose
   longer kernel lets outputs look to the other side must not grow along this axis.

Afterwards, everything is as it was, also after an error.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import is_out_of_memory
from ..layers.conv_classes import Conv
from ..options import MAX_PIXELS
from ..text import one_line
from .input_tensors import Inputs, inputs_text, pixel_count, smaller_inputs
from .inputs import random_arguments
from .model_outputs import comparable, relative_error, tensors_in
from .model_state import eval_mode, restored_values, run_batch, without_small_parameters
from .process_settings import full_precision, seeded, suppress_output
from .sides import (
    PLACES,
    Reaches,
    ReachKey,
    by_image,
    have_new_side,
    one_way,
    reaches_of,
    spatial_axes,
    with_changed_cells,
)
from .stand_ins import StandIn, grows, in_place, with_longer_kernel

LIBRARIES = ("timm.", "torch.", "torchvision.")
# Relative error of outputs that count as equal. They are equal to the last bit, except where torch
# adds numbers in no fixed order.
TOLERANCE = 1e-6
TOO_LITTLE_MEMORY = "memory does not suffice"
NOT_CALLED = "the forward pass of the network in eval mode does not call it"


def not_measured_text(reason: str) -> str:
    """Say that a network was not measured, and what this may mean."""
    return (
        f"what the network does with its convolutions was not measured: {reason}. Other code may "
        "use them, and larger windows may look ahead in a causal network"
    )


class CannotMeasureError(Exception):
    """The network cannot be measured; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a measurement found, by the names of convolutions."""

    # What would happen if a convolution were replaced.
    reasons: dict[str, str] = field(default_factory=dict)
    # Axes along which it must not grow, or outputs would look to a side to which they do not look.
    one_sided_axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    not_measured: str | None = None  # why something could not be measured; None if everything was


def is_library_code(model: nn.Module) -> bool:
    """True for a network of timm or torchvision as it is, which the tests of this package cover.

    It consists of library code alone: no hooks, and no other methods set on a module.
    """
    if not type(model).__module__.startswith(("timm.", "torchvision.")):
        return False
    for module in model.modules():
        own = type(module)
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        if not own.__module__.startswith(LIBRARIES) or has_hooks:
            return False
        for name in vars(module).keys() & set(dir(own)):
            method = vars(module)[name]
            is_of_library = str(getattr(method, "__module__", "")).startswith(LIBRARIES)
            if callable(getattr(own, name)) and not is_of_library:
                return False
    return True


def measure(model: nn.Module, convs: Mapping[str, Conv], inputs: Inputs) -> Measured:
    """Find the convolutions that cannot be replaced, and those that must not grow along an axis.

    The network runs on random inputs, in eval mode and on its own device: on small images if it
    takes them.

    Args:
        model: The network; all its parameters have values. Afterwards, it is as before.
        convs: Convolutions that can be replaced as far as they themselves show, by name.
        inputs: What forward takes.

    Raises:
        CannotMeasureError: The network does not run, or its outputs show nothing.
    """
    with (
        eval_mode(model),
        full_precision(),
        without_small_parameters(model),
        restored_values(model) as restore,
    ):
        network = _Measurement(model, convs, inputs, restore)
        reasons = network.find_users()
        try:
            axes = network.find_one_sided([name for name in convs if name not in reasons])
        except CannotMeasureError as error:
            return Measured(reasons=reasons, not_measured=str(error))
    return Measured(reasons=reasons, one_sided_axes=axes)


class _Measurement:
    """A network that is measured, and its outputs before anything is changed."""

    def __init__(
        self,
        model: nn.Module,
        convs: Mapping[str, Conv],
        inputs: Inputs,
        restore: Callable[[], None],
    ) -> None:
        self.model = model
        self.convs = convs
        self.restore = restore  # restores the values of parameters
        self.has_changed = False  # whether any output has changed with a cell of an input
        if pixel_count(inputs) > MAX_PIXELS:
            raise CannotMeasureError(f"inputs of more than {MAX_PIXELS:,} pixels are not run")
        for some_inputs in (smaller_inputs(inputs, len(PLACES)), inputs):
            self.inputs = some_inputs
            self.arguments = random_arguments(some_inputs)
            try:
                with _counted_calls(convs) as calls:
                    self.outputs = self.run()
            except Exception as error:  # the network's own code may raise anything
                if self.inputs is not inputs:
                    continue
                where = inputs_text(inputs)
                raise CannotMeasureError(f"forward fails at {where}: {_text(error)}") from error
            self.calls = calls
            batches = {len(tensor) for tensor in self.arguments.tensors() if tensor.dim()}
            has_images = any(by_image(self.outputs, batch) for batch in batches)
            if all(calls.values()) and has_images:
                break
        if not any(tensor.isfinite().any() for tensor in self.outputs):
            raise CannotMeasureError("its outputs have no finite numbers, which could be compared")

    def run(self, tensors: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the outputs for some inputs, as real numbers.

        Without `tensors`, the inputs are those of the first run. All runs have the same random
        numbers. What the network's code changes in its parameters is undone.
        """
        try:
            return self._forward(tensors)
        finally:
            self.restore()

    def _forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        args = self.arguments.args
        kwargs = self.arguments.kwargs
        if tensors:
            args = tuple(tensors[: len(args)])
            kwargs = dict(zip(kwargs, tensors[len(args) :], strict=True))
        with suppress_output(), seeded(0):
            outputs = run_batch(self.model, *args, **kwargs)
        return comparable(tensors_in(outputs))

    def other_inputs(self) -> list[Tensor]:
        return list(random_arguments(self.inputs, seed=1).tensors())

    # Whether the network still computes the same.

    def find_users(self) -> dict[str, str]:
        """Return what would happen, by the names of convolutions that other code uses."""
        reasons: dict[str, str] = {}

        def change(group: Sequence[str]) -> bool:
            # Bisection tries smaller and smaller groups, so the last reason of a name is its own.
            reason = self._what_changes(group)
            if reason is not None:
                reasons.update(dict.fromkeys(group, reason))
            return reason is not None

        not_called = {name: NOT_CALLED for name, count in self.calls.items() if not count}
        names = [name for name in self.convs if name not in not_called]
        if not names or not change(names):
            return not_called
        if not _agree(self.outputs, self.run()):
            raise CannotMeasureError("its outputs differ from run to run")
        return not_called | {name: reasons[name] for name in _culprits(names, change)}

    def _what_changes(self, names: Sequence[str]) -> str | None:
        """Return what changes with stand-ins for some convolutions; None if nothing does."""
        try:
            stand_ins = [StandIn(self.convs[name]) for name in names]
            layers = {stand_in.conv: stand_in.layer for stand_in in stand_ins}
            with in_place(self.model, layers):
                outputs = self._forward(())
            is_changed = any(stand_in.is_changed() for stand_in in stand_ins)
        except Exception as error:
            if is_out_of_memory(error):
                raise CannotMeasureError(TOO_LITTLE_MEMORY) from error
            return f"forward would fail with a DCLS layer in its place ({_text(error)})"
        finally:
            self.restore()
        if is_changed:
            return "other code changes its weight"
        calls = [stand_in.calls for stand_in in stand_ins]
        if calls != [self.calls[name] for name in names]:
            return "forward would not call a DCLS layer in its place: other code refers to it"
        if not _agree(self.outputs, outputs):
            return (
                "the outputs would change although the DCLS layer computes the same function: "
                "other code uses this convolution's weight or attributes"
            )
        return None

    # Whether outputs look to a new side.

    def find_one_sided(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return the axes along which convolutions must not grow, by their names."""
        axes: dict[str, tuple[int, ...]] = {}
        if not names:
            return axes
        try:
            before = self._reaches()
        except Exception as error:
            raise CannotMeasureError(f"forward fails for changed inputs: {_text(error)}") from error
        # A network that returns only its last time step, for example, may not respond to any
        # changed cell; then no side can be seen.
        if not self.has_changed and _agree(self.outputs, self.run(self.other_inputs())):
            raise CannotMeasureError("its outputs do not change with its inputs")
        before = one_way(before)
        if not before:
            return axes
        for axis in range(3):
            for name in self._looking_further(names, axis, before):
                axes[name] = (*axes.get(name, ()), axis)
        return axes

    def _looking_further(self, names: Sequence[str], axis: int, before: Reaches) -> list[str]:
        """Return the convolutions whose growth along an axis lets outputs look to a new side.

        Args:
            names: The convolutions.
            axis: The axis.
            before: How far outputs look now, where they look to one side only.
        """

        def look_further(group: Sequence[str]) -> bool:
            longer = {}
            for name in group:
                longer[self.convs[name]] = with_longer_kernel(self.convs[name], axis)
            try:
                with in_place(self.model, longer):
                    return have_new_side(before, self._reaches())
            except Exception as error:
                if is_out_of_memory(error):
                    raise CannotMeasureError(TOO_LITTLE_MEMORY) from error
                return True  # the network does not run with longer kernels

        growing = [name for name in names if grows(self.convs[name], axis)]
        if growing and look_further(growing):
            return _culprits(growing, look_further)
        return []

    def _reaches(self) -> Reaches:
        """Return how far the outputs look, by the input, its axes, and the output."""
        before = self.run()
        found: Reaches = {}
        tensors = self.arguments.tensors()
        for index, tensor in enumerate(tensors):
            for axes in spatial_axes(tensor):
                after = []  # the outputs for each changed batch
                cells, batches = with_changed_cells(tensor, axes)
                for batch in batches:
                    outputs = self.run([*tensors[:index], batch, *tensors[index + 1 :]])
                    after.append(by_image(outputs, len(tensor)))
                    self.has_changed = self.has_changed or not _agree(before, outputs)
                sides = [tensor.shape[axis] for axis in axes]
                for number, output in enumerate(by_image(before, len(tensor))):
                    changed = [outputs[number] for outputs in after if number < len(outputs)]
                    shapes = [tensor.shape for tensor in changed]
                    if shapes != [output.shape] * len(after):
                        continue  # such as boxes, whose number depends on the values
                    old = torch.cat([output] * len(changed))
                    for pair, reach in reaches_of(old, torch.cat(changed), sides, cells).items():
                        found[ReachKey(index, axes, number, pair)] = reach
        return found


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


def _culprits(names: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return the names for which a test fails one by one; it fails for all names together.

    If it also fails for the other names together, return all.
    """
    culprits = _failing_alone(names, fails)
    others = [name for name in names if name not in culprits]
    return list(names) if others and fails(others) else culprits


def _failing_alone(names: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return the names for which a test fails one by one, by bisection."""
    if len(names) == 1:
        return list(names)
    middle = len(names) // 2
    failing = []
    for half in (names[:middle], names[middle:]):
        if fails(half):
            failing += _failing_alone(half, fails)
    return failing


def _agree(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """True if outputs have the same shapes and, up to rounding, the same values."""
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in found]:
        return False
    for old, new in zip(expected, found, strict=True):
        finite = old.isfinite()
        if not torch.equal(finite, new.isfinite()):
            return False
        if relative_error([(old[finite], new[finite])]) > TOLERANCE:
            return False
    return True


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)[:120]}"
