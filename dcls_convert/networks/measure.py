"""Measure what a network does with its convolutions, by running it.

1. Stand-ins replace the convolutions. A stand-in is a DCLS layer to all code that inspects it, but
   computes the same function as the convolution. The weights of both are overwritten with
   arbitrary values. So if the outputs change, other code reads the convolution or its weight.
2. Cells of the inputs are changed, to see which outputs change. The changes show laws, such as
   "outputs look to one side only" (see `laws.py`). When windows are chosen, convolutions with these
   windows replace the old ones in a run, and the laws must still hold.

For example, `conv(F.pad(x, (2, 0)))` with a kernel of 3 cells is causal. On 12 cells:

    changed input cell          3              5              7
    outputs that change, with
      the kernel of 3           3 4 5          5 6 7          7 8 9
      a window of 7, both ways  1 2 3 4 5 6 7  3 4 5 6 7 8 9  5 6 7 8 9 10 11
      a window of 7, back       3 4 5 6 7 8 9  5 ... 11       7 8 9 10 11

With the kernel, only outputs at or after the input's own place change: the displacements
`input - output` are 0, -1 and -2. The law is that no displacement is above 0. A window that grows
both ways breaks the law: outputs 1 and 2 see input 3, at the displacements 2 and 1. With a window
that grows back, the law holds. So this window may only grow back.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import is_out_of_memory
from ..geometry import Direction, Grow
from ..layers.conv_classes import Conv, settings_of
from ..options import MAX_PIXELS
from ..running.arguments import Arguments, random_arguments
from ..running.compare_outputs import comparable, finite_share, relative_error, tensors_in
from ..running.input_spec import InputSpec, inputs_text, pixel_count, smaller_inputs
from ..running.run import Run, running, without_small_parameters
from ..text import one_line
from .laws import Law, find_pairs, laws_of
from .probing import (
    CannotMeasureError,
    RunOutputs,
    columns_at_borders,
    run_probe,
    tables_of,
)
from .sites import NOT_CALLED, ONE_SIDE, Measured
from .stand_ins import StandIn, swapped_in, with_window
from .table import MIN_CELLS, DependenceColumn, DependenceTable

# Outputs with at most this relative error count as equal. Equal outputs are equal to the last bit,
# except where torch adds numbers in no fixed order.
TOLERANCE = 1e-6
MIN_FINITE = 0.25  # share of finite outputs; with less, nothing is measured
TOO_LITTLE_MEMORY = "memory does not suffice"

Suspect = TypeVar("Suspect")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableLaws:
    """The laws that a table shows, and the columns in which they must still hold."""

    table: DependenceTable
    laws: Sequence[Law]
    # The table's own columns, plus columns probed near the borders. Only an output that changes
    # with a larger window, but not in the column, can break a law.
    columns: Sequence[DependenceColumn]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dependence:
    """The laws of a network's outputs, which must still hold when windows have grown."""

    model: nn.Module
    convs: Mapping[str, Conv]
    arguments: Arguments
    tables: Sequence[TableLaws]

    @property
    def outputs_look(self) -> Direction | None:
        """The side to which all outputs look; None if there is no such side."""
        sides: set[Direction] = set()
        outputs: set[int] = set()
        one_sided: set[int] = set()
        for found in self.tables:
            outputs.update(pair.output for pair in find_pairs(found.table))
            for law in found.laws:
                if law.reason == ONE_SIDE:
                    sides.add(law.side)
                    one_sided.add(law.pair.output)
        return sides.pop() if len(sides) == 1 and outputs <= one_sided else None

    def broken_by(
        self,
        windows: Mapping[str, Sequence[int]],
        grow: Mapping[str, Sequence[Grow]] | None = None,
    ) -> dict[str, dict[int, str]]:
        """Return, by name and axis, why convolutions must not grow to these windows.

        The network runs with convolutions of these windows, filled with random values. Afterwards,
        it is as before.

        Args:
            windows: Sizes of the windows, by name of the convolution.
            grow: How windows grow along each axis, by name; by default, to both sides.
        """
        if not any(found.laws for found in self.tables):
            return {}
        grow = grow or {}
        items = []
        for name, window in windows.items():
            extents = settings_of(self.convs[name]).extents
            for axis, size in enumerate(window):
                if size > extents[axis]:
                    items.append((name, axis))
        with without_small_parameters(self.model), running(self.model) as run:

            def problem(group: Sequence[tuple[str, int]]) -> str | None:
                return self._problem(run, windows, grow, group)

            found: dict[str, dict[int, str]] = {}
            for (name, axis), reason in find_culprits(items, problem).items():
                found.setdefault(name, {})[axis] = reason
        return found

    def _problem(
        self,
        run: Run,
        windows: Mapping[str, Sequence[int]],
        grow: Mapping[str, Sequence[Grow]],
        grown: Sequence[tuple[str, int]],
    ) -> str | None:
        """Return why convolutions must not all grow along the (name, axis) in `grown`; or None."""
        axes_of: dict[str, list[int]] = {}
        for name, axis in grown:
            axes_of.setdefault(name, []).append(axis)
        try:
            new = {}
            for name, axes in axes_of.items():
                conv = self.convs[name]
                new[conv] = with_window(conv, windows[name], axes, grow.get(name, ()))
            with swapped_in(self.model, new):
                return self._broken_law(functools.partial(outputs_of, run))
        except Exception as error:  # the network's own code may raise anything
            if is_out_of_memory(error):
                return f"{TOO_LITTLE_MEMORY} to try its window"
            return f"the network does not run with a larger window ({_text(error)})"

    def _broken_law(self, run: RunOutputs) -> str | None:
        """Return the reason of a law that the network breaks at present; None if all laws hold."""
        before = run(self.arguments)
        if finite_share(before) < MIN_FINITE:
            return "with a larger window, (nearly) no output is a finite number"
        for found in self.tables:
            for column in found.columns:
                now = run_probe(run, self.arguments, before, column.probe)
                new = now.without(column)
                for law in found.laws:
                    if law.is_broken_by(new):
                        return law.reason
        return None


def measure(model: nn.Module, convs: Mapping[str, Conv], inputs: InputSpec) -> Measured:
    """Find the convolutions that cannot be replaced, and what the outputs depend on.

    The network runs on random inputs, in eval mode and on its own device. It runs on small images
    if it takes them.

    Args:
        model: The network; all its parameters have values. Afterwards, it is as before.
        convs: Convolutions, by name, that can be replaced as far as is known without a run.
        inputs: The tensors that forward takes.

    Raises:
        CannotMeasureError: The network does not run, or its outputs show nothing.
    """
    if pixel_count(inputs) > MAX_PIXELS:
        raise CannotMeasureError(f"inputs of more than {MAX_PIXELS:,} pixels are not run")
    calls: Counter[str] = Counter()
    with without_small_parameters(model), running(model, restart=calls.clear) as run:
        arguments, before = _first_run(run, convs, inputs, calls)
        outputs = functools.partial(outputs_of, run)
        if not any(tensor.numel() for tensor in before):
            raise CannotMeasureError("it returns no tensor that can be compared")
        if finite_share(before) < MIN_FINITE:
            raise CannotMeasureError("its outputs have (nearly) no finite numbers")
        reasons = {name: NOT_CALLED for name in convs if not calls[name]}
        called = {name: conv for name, conv in convs.items() if name not in reasons}

        def what_changes(names: Sequence[str], grow: Grow = "both") -> str | None:
            replaced = {name: convs[name] for name in names}
            return _what_changes(model, run, arguments, before, replaced, calls, grow)

        why_read: dict[str, str] = {}
        if called and what_changes(list(called)) is not None:
            if not _agree(before, outputs(arguments)):
                raise CannotMeasureError("its outputs differ from run to run")
            why_read = find_culprits(list(called), what_changes)
            # Try again with windows that grow to one side: these layers keep the attributes that
            # other code reads. Convolutions that still fail cannot be replaced.
            failed = find_culprits(list(why_read), functools.partial(what_changes, grow="back"))
            reasons |= {name: why_read.pop(name) for name in failed}
        free = {name: conv for name, conv in called.items() if name not in reasons}
        if not free:
            return Measured(reasons=reasons)
        dependence = None
        try:
            tables, not_measured = tables_of(outputs, arguments, before)
            dependence = _dependence(model, free, outputs, arguments, before, tables)
        except CannotMeasureError as error:
            not_measured = str(error)
        except Exception as error:  # the network's own code
            not_measured = f"forward fails for changed inputs: {_text(error)}"
    return Measured(
        reasons=reasons,
        why_read=why_read,
        dependence=dependence,
        not_measured=not_measured or None,
    )


def _dependence(
    model: nn.Module,
    convs: Mapping[str, Conv],
    run: RunOutputs,
    arguments: Arguments,
    before: list[Tensor],
    tables: Sequence[DependenceTable],
) -> Dependence:
    """Read the laws off the tables. For a table with laws, probe columns near the borders, too."""
    extents: set[int] = set()
    for conv in convs.values():
        extents.update(settings_of(conv).extents)
    found: list[TableLaws] = []
    for table in tables:
        laws = laws_of(table)
        columns: list[DependenceColumn] = []
        if laws:
            borders = columns_at_borders(run, arguments, before, table, laws, extents)
            columns = [*table.columns, *borders]
        found.append(TableLaws(table=table, laws=laws, columns=columns))
    return Dependence(model=model, convs=convs, arguments=arguments, tables=found)


def _first_run(
    run: Run, convs: Mapping[str, Conv], inputs: InputSpec, calls: Counter[str]
) -> tuple[Arguments, list[Tensor]]:
    """Return arguments with which the network runs, and its outputs; count calls of convolutions.

    The arguments are small images if, on these, the network runs and calls all convolutions.
    """
    with contextlib.ExitStack() as hooks:
        for name, conv in convs.items():

            def count(*_: object, name: str = name) -> None:
                calls[name] += 1

            hooks.enter_context(conv.register_forward_pre_hook(count))
        smaller = smaller_inputs(inputs)
        if smaller != inputs:
            with contextlib.suppress(Exception):
                arguments = random_arguments(smaller)
                outputs = outputs_of(run, arguments)
                if all(calls[name] for name in convs):
                    return arguments, outputs
            calls.clear()
        arguments = random_arguments(inputs)
        try:
            return arguments, outputs_of(run, arguments)
        except Exception as error:  # the network's own code may raise anything
            where = inputs_text(inputs)
            raise CannotMeasureError(f"forward fails at {where}: {_text(error)}") from error


def outputs_of(run: Run, arguments: Arguments) -> list[Tensor]:
    """Return the outputs as real numbers. Maps of one shape, as of time steps, are stacked.

    Integers, such as labels, are left out if there are other numbers: these show more. All runs
    have the same random numbers.
    """
    tensors = tensors_in(run(*arguments.args, **arguments.kwargs))
    others = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    outputs = comparable(others or tensors)
    if len(outputs) >= MIN_CELLS and len({output.shape for output in outputs}) == 1:
        return [torch.stack(outputs)]
    return outputs


def _what_changes(
    model: nn.Module,
    run: Run,
    arguments: Arguments,
    before: list[Tensor],
    convs: Mapping[str, Conv],
    calls: Mapping[str, int],
    grow: Grow,
) -> str | None:
    """Return what changes if stand-ins replace these convolutions; None if nothing changes."""
    stand_ins: dict[str, StandIn] = {}
    changed: list[bool] = []

    def check_weights(*_: object) -> None:
        changed.extend(stand_in.is_changed() for stand_in in stand_ins.values())

    try:
        for name, conv in convs.items():
            stand_ins[name] = StandIn(conv, grow)
        layers = {stand_in.conv: stand_in.layer for stand_in in stand_ins.values()}
        with swapped_in(model, layers), model.register_forward_hook(check_weights):
            outputs = outputs_of(run, arguments)
    except Exception as error:
        if is_out_of_memory(error):
            raise CannotMeasureError(TOO_LITTLE_MEMORY) from error
        return f"forward would fail with a DCLS layer in its place ({_text(error)})"
    if any(changed):
        return "other code changes its weight"
    if any(stand_in.calls != calls[name] for name, stand_in in stand_ins.items()):
        return "forward would not call a DCLS layer in its place: other code refers to it"
    if not _agree(before, outputs):
        return (
            "the outputs would change although the DCLS layer computes the same function: "
            "other code uses this convolution's weight or attributes"
        )
    return None


def find_culprits(
    items: Sequence[Suspect], problem: Callable[[Sequence[Suspect]], str | None]
) -> dict[Suspect, str]:
    """Return the culprits with their problems. Without them, the remaining items have no problem.

    Args:
        items: The items.
        problem: Returns the problem that a group of items has together, or None.
    """

    def search(group: Sequence[Suspect]) -> dict[Suspect, str]:
        reason = problem(group) if group else None
        if reason is None:
            return {}
        if len(group) == 1:
            return {group[0]: reason}
        middle = len(group) // 2
        found = search(group[:middle]) | search(group[middle:])
        return found or dict.fromkeys(group, reason)  # each half is harmless, both together are not

    culprits: dict[Suspect, str] = {}
    while more := search([item for item in items if item not in culprits]):
        culprits |= more
    return culprits


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
