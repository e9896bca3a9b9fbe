"""Find convolutions whose kernels are not centred, because other code shifts their maps.

A network is causal, for example, if maps are padded before their first cell and cut after their
last one. With a larger window, such a convolution would see what lies ahead.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..geometry import extent, padded_cells
from ..layers.conv_classes import AnyConv, padding_of
from ..layers.replaceable import why_not_replaceable
from .map_reach import Reach, Source, Sources, sources_of_index
from .operations import Operation, sources_of

SPLITTING = frozenset({"split", "chunk", "tensor_split", "split_with_sizes"})
CONCATENATING = frozenset({"cat", "concat", "concatenate"})

# Keys that no module has as its name.
WHOLE = ".whole"  # of the reach since the image, or since the last mixing function
RECENT = ".recent"  # of the reach since the last convolution
# By WHOLE, by RECENT, and by the name of a convolution for the reach since that one's input.
Axis = dict[str, Reach]


def find_shifted_axes(
    operations: Iterable[Operation],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    names: Mapping[nn.Module, str],
) -> dict[str, tuple[int, ...]]:
    """Return the axes along which maps are shifted, by the name of the convolution.

    Args:
        operations: The operations that ran, in order. Their tensors are still alive.
        inputs: The network's inputs.
        outputs: What the network returned.
        names: Names of the convolutions.
    """
    maps = _Maps(names)
    for tensor in inputs:
        maps.start(tensor)
    for operation in operations:
        maps.follow(operation)
    maps.end_unused(outputs)
    return maps.shifted_axes()


class _Maps:
    """The reach of every map of a run."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self.names = names
        self.axes_of: dict[int, list[Axis]] = {}  # by id of the tensor
        self.unused: dict[int, Tensor] = {}  # by their ids, maps that no operation has taken yet
        self.shapes: set[int] = set()  # ids of the maps whose shape an operation has taken
        # By the id of a view of a tensor without a reach: the tensor, and the index.
        self.views: dict[int, tuple[Tensor, Any]] = {}
        self.origins = itertools.count()
        # A convolution, its axis, and whether the reach is WHOLE.
        self.shifted: set[tuple[str, int, bool]] = set()
        self.centred: set[tuple[str, int, bool]] = set()

    def start(self, tensor: Tensor) -> None:
        """Begin with a map whose cells see themselves."""
        self.keep(tensor, [self.new_axis(size) for size in tensor.shape])

    def new_axis(self, size: int) -> Axis:
        reach = Reach(origin=next(self.origins), size=size)
        return {WHOLE: reach, RECENT: reach}

    def keep(self, tensor: Tensor, axes: list[Axis]) -> None:
        self.axes_of[id(tensor)] = axes
        self.unused[id(tensor)] = tensor

    def follow(self, operation: Operation) -> None:
        """Give the outputs of an operation their reaches."""
        if isinstance(operation.run, AnyConv):
            self.convolve(operation.run, operation)
            return
        name = operation.name
        if name == "__setitem__":
            self.write(*operation.args)
            return
        if name == "__getitem__" and id(operation.args[0]) not in self.axes_of:
            self.views[id(operation.output)] = operation.args
        if name == "copy_" and id(operation.args[0]) in self.views:
            self.write(*self.views[id(operation.args[0])], operation.args[1])
            return
        outputs = [leaf for leaf in tree_leaves(operation.output) if isinstance(leaf, Tensor)]
        inputs = [tensor for tensor in operation.tensors if id(tensor) in self.axes_of]
        if not inputs:
            return
        if operation.takes_only_shape or not outputs:
            self.shapes.update(map(id, inputs))
            return
        ranks = {tensor.dim() for tensor in (*operation.tensors, *outputs)}
        if name in SPLITTING:
            self.split(inputs[0], outputs)
        elif name in CONCATENATING and len(ranks) == 1:
            self.concatenate(operation.argument(0, "tensors"), outputs[0])
        else:
            only_map = len(inputs) == 1
            for output in outputs:
                sources = [
                    (one, sources_of(operation, one, output, only_map=only_map)) for one in inputs
                ]
                self.pass_on(sources, output)

    def pass_on(self, inputs: Sequence[tuple[Tensor, Sources]], output: Tensor) -> None:
        """Give `output` the reaches of its inputs; those that it does not take end here."""
        passed: list[list[Axis]] = [[] for _ in output.shape]
        for tensor, sources in inputs:
            axes = self.axes_of[id(tensor)]
            taken = set()
            for axis, source in enumerate(sources):
                if source is not None:
                    taken.add(source.axis)
                    passed[axis].append(_moved(axes[source.axis], source))
            for axis, size in enumerate(tensor.shape):
                if axis not in taken:
                    self.end(axes[axis], size)
            self.unused.pop(id(tensor), None)
        merged = [
            self.merged(several, size) for several, size in zip(passed, output.shape, strict=True)
        ]
        self.keep(output, merged)

    def merged(self, axes: Sequence[Axis], size: int) -> Axis:
        """Return the reaches of a map that is computed from several maps, cell by cell."""
        merged = self.new_axis(size)
        reaches_of: dict[str, list[Reach]] = {}
        for axis in axes:
            for key, reach in axis.items():
                reaches_of.setdefault(key, []).append(reach)
        for key, (first, *others) in reaches_of.items():
            together = first
            have_one_origin = True
            for other in others:
                if (other.origin, other.step) == (first.origin, first.step):
                    together = together.with_path(other)
                else:
                    have_one_origin = False
            if have_one_origin:
                merged[key] = together
            else:
                for reach in (first, *others):
                    self.end({key: reach}, size)
        return merged

    def split(self, whole: Tensor, parts: Sequence[Tensor]) -> None:
        offsets = [0] * whole.dim()
        for part in parts:
            sources: Sources = []
            for axis, offset in enumerate(offsets):
                sources.append(Source(axis, -offset))
                if part.shape[axis] != whole.shape[axis]:
                    offsets[axis] += part.shape[axis]
            self.pass_on([(whole, sources)], part)

    def concatenate(self, parts: Sequence[Tensor], output: Tensor) -> None:
        """Follow a concatenation: the longest part is the map, and the others are its padding.

        Padding may repeat cells of the map, which still sees itself where the longest part does.
        """
        offset = 0
        inputs: list[tuple[Tensor, Sources]] = []
        longest = max(part.shape for part in parts if id(part) in self.axes_of)
        maps = [part for part in parts if id(part) in self.axes_of and part.shape == longest]
        for part in parts:
            sources: Sources = []
            for axis, size in enumerate(part.shape):
                if size == output.shape[axis]:
                    sources.append(Source(axis))
                elif part.shape == longest:
                    sources.append(Source(axis, offset))
                else:
                    sources.append(None)
                if size != output.shape[axis]:
                    offset += size
            if id(part) not in self.axes_of:
                continue
            if part.shape != longest and self.origins_of(part) == self.origins_of(maps[0]):
                self.unused.pop(id(part), None)
                continue
            inputs.append((part, sources))
        self.pass_on(inputs, output)

    def origins_of(self, tensor: Tensor) -> list[dict[str, int]]:
        return [
            {key: reach.origin for key, reach in axis.items()} for axis in self.axes_of[id(tensor)]
        ]

    def write(self, target: Tensor, index: Any, value: Any) -> None:
        """Follow `target[index] = value`, if the value is a map that fills most of the target."""
        if not isinstance(value, Tensor) or id(value) not in self.axes_of:
            return
        sources = sources_of_index(target.shape, index)
        if sources is None or len(sources) != value.dim() or 2 * value.numel() < target.numel():
            return
        inverse: Sources = [None] * target.dim()
        for axis, source in enumerate(sources):
            if source is not None and source.step == 1:
                inverse[source.axis] = Source(axis, -source.before)
        self.pass_on([(value, inverse)], target)

    def convolve(self, conv: AnyConv, operation: Operation) -> None:
        input = operation.argument(0, "input")
        output = operation.output
        if id(input) not in self.axes_of:
            self.start(input)
        if why_not_replaceable(conv) is not None:
            self.pass_on([(input, [None] * output.dim())], output)
            return
        axes = self.axes_of[id(input)]
        self.unused.pop(id(input), None)
        dims = len(conv.kernel_size)
        extents = list(map(extent, conv.kernel_size, conv.dilation))
        cells = padded_cells(padding_of(conv), input.shape[-dims:], extents, conv.stride)
        new_axes = [self.new_axis(size) for size in output.shape]
        name = self.names[conv]
        for axis in range(dims):
            old = axes[axis - dims]
            self.end(_through_convs(old), input.shape[axis - dims])
            new = new_axes[axis - dims]
            for key, reach in ((WHOLE, old[WHOLE]), (name, old[RECENT])):
                new[key] = reach.through(
                    (name, axis), cells[axis][0], extents[axis], conv.stride[axis]
                )
        self.keep(output, new_axes)

    def end(self, axis: Axis, size: int) -> None:
        """Note whether convolutions are shifted in a map of `size` cells, which is used as it is.

        A convolution alone must be centred. With the whole network around it, it suffices that
        something is seen on either side.
        """
        for key, reach in axis.items():
            is_shifted = reach.looks_one_way(size)
            if key != WHOLE:
                is_shifted = is_shifted or reach.is_off_centre(size)
            for name, conv_axis in reach.convs:
                found = self.shifted if is_shifted else self.centred
                found.add((name, conv_axis, key == WHOLE))

    def end_unused(self, outputs: Sequence[Tensor]) -> None:
        """End at the maps that no operation took: what the network returns or keeps.

        A map of which only the shape was taken, such as `x[..., :1]` in `zeros_like(x[..., :1])`,
        ends only if it is returned.
        """
        for key in self.shapes - set(map(id, outputs)):
            self.unused.pop(key, None)
        for tensor in self.unused.values():
            for axis, size in zip(self.axes_of[id(tensor)], tensor.shape, strict=True):
                self.end(axis, size)

    def shifted_axes(self) -> dict[str, tuple[int, ...]]:
        """Return the axes along which convolutions are shifted wherever they are used."""
        axes: dict[str, tuple[int, ...]] = {}
        for name, axis, _ in sorted(self.shifted - self.centred):
            axes[name] = tuple(sorted({*axes.get(name, ()), axis}))
        return axes


def _moved(axis: Axis, source: Source) -> Axis:
    if source == Source(source.axis):
        return axis
    if source.extent > 1:
        return {
            key: reach.over_windows(source.before, source.extent, source.step)
            for key, reach in axis.items()
        }
    return {key: reach.moved(source.before, source.step) for key, reach in axis.items()}


def _through_convs(axis: Axis) -> Axis:
    return {key: reach for key, reach in axis.items() if key not in (WHOLE, RECENT)}
