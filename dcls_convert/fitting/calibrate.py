"""Values for new layers by which a network keeps its outputs for given images.

The images go through the network twice in step, as it was and as it becomes: each layer is fitted to what the old
convolution gives, from what the network that is converted so far feeds it. So the errors of one layer are made up for
in the next (as GPTQ, arXiv:2210.17323, does for quantisation). The network itself is not changed.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, one_line
from ..layers.conv_classes import PLAIN, Conv
from ..layers.dcls_conv import DclsConvNd
from ..networks.in_step import run_in_step
from ..networks.running import evaluating, run
from ..progress import Notify
from .boxes import Box
from .groups import LayerGroup
from .images import Calibration
from .moments import Moments, best_weights, shared_roots


@dataclass(kw_only=True)
class Seen:
    """What the old network's convolutions see in the images."""

    images: Calibration
    calls: Counter[nn.Module] = field(default_factory=Counter)  # of each convolution in a forward pass
    alone: dict[nn.Module, Moments] = field(default_factory=dict)  # of each line by itself
    joint: dict[nn.Module, Moments] = field(default_factory=dict)  # with outputs, where a pass calls it several times
    means: dict[nn.Module, Tensor] = field(default_factory=dict)  # of the norm behind it, which gets nothing else

    def roots(self, group: LayerGroup) -> Tensor | None:
        """What an error of a kernel does to the outputs, as for `fit_elements`."""
        for conv, plan in zip(group.convs, group.plans, strict=True):
            self.alone[conv].check(plan.name)
        return shared_roots([self.alone[conv] for conv in group.convs])


def look(model: nn.Module, groups: Sequence[LayerGroup], calibration: Calibration, notify: Notify) -> Seen:
    """Run the old network with all images."""
    notify("looking at the images")
    seen, first = Seen(images=calibration), calibration.batches[0][:1]
    behind: dict[nn.Module, set[nn.Module | None]] = {}  # a norm -> what gave its inputs
    outputs: list[tuple[nn.Module, Tensor]] = []  # of convolutions, in the first pass

    def count(conv: nn.Module, _: Any, output: Tensor) -> None:
        seen.calls[conv] += 1
        outputs.append((conv, output))

    def note_norm(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        giver = next((conv for conv, output in outputs if inputs and output is inputs[0]), None)
        behind.setdefault(norm, set()).add(giver)

    def add(conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        input = args[0] if args else kwargs["input"]
        seen.alone[conv].add(input)
        if conv in seen.joint:
            seen.joint[conv].add(input, output)

    pairs = [(conv, layer, group) for group in groups for conv, layer in zip(group.convs, group.layers, strict=True)]
    with evaluating(model):
        with contextlib.ExitStack() as hooks:
            for conv, _, _ in pairs:
                hooks.callback(conv.register_forward_hook(count).remove)
            for norm in model.modules():  # BatchNorm of any class; frozen ones too
                instance_norm = isinstance(norm, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
                if isinstance(getattr(norm, "running_mean", None), Tensor) and not instance_norm:
                    hooks.callback(norm.register_forward_pre_hook(note_norm).remove)
            forward(model, first)
        outputs.clear()
        for conv, layer, group in pairs:
            seen.alone[conv] = Moments(layer, group.box, joint=False)
            if seen.calls[conv] > 1:
                seen.joint[conv] = Moments(layer, group.box, joint=True)
            norms: list[Any] = [norm for norm, givers in behind.items() if givers == {conv}]
            if len(norms) == 1:
                seen.means[conv] = norms[0].running_mean
        with contextlib.ExitStack() as hooks:
            for conv, _, _ in pairs:
                hooks.callback(conv.register_forward_hook(add, with_kwargs=True).remove)
            for batch in calibration.batches:
                forward(model, batch)
    return seen


def forward(model: nn.Module, batch: Tensor) -> None:
    """In the memory format in which convolutions of images are the quickest on CPUs."""
    try:
        run(model, batch.contiguous(memory_format=torch.channels_last) if batch.dim() == 4 else batch)
    except (DclsConvertError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code
        raise DclsConvertError(f"calibration: the model does not take the images: {one_line(error)[:200]}") from error


def fit_to_outputs_(model: nn.Module, groups: Sequence[LayerGroup], seen: Seen, notify: Notify) -> list["NewLayer"]:
    """Give new layers, made for the model, the weights by which it keeps its outputs; they have offsets to apply.

    They have positions and first weights for what the old network feeds them. Each layer is then solved for alone.
    DclsConvertError: the model does not take the images, or has values that are not finite.
    """
    layers: dict[nn.Module, NewLayer] = {
        conv: NewLayer(plan.name, conv, layer, group.box, seen)
        for group in groups
        for conv, layer, plan in zip(group.convs, group.layers, group.plans, strict=True)
    }
    solved: list[NewLayer] = []

    def answer(conv: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
        layer, half = layers[conv], len(inputs) // 2
        wanted, new = [layer.old(input) for input in inputs[:half]], inputs[half:]
        if layer in solved:
            return [*wanted, *map(layer.outputs, new)]
        number, of = len(solved), len(seen.calls)
        notify(f"calibrating {layer.name}, layer {number + 1} of {of}", number, of)
        solved.append(layer)
        return [*wanted, *layer.solve_(new, wanted)]

    passes = [partial(forward, model, batch) for batch in seen.images.batches]
    with evaluating(model):
        run_in_step(list(seen.calls), [*passes, *passes], answer)
    return solved


class NewLayer:
    """A layer in the place of its convolution, in the network that is converted so far."""

    def __init__(self, name: str, conv: Conv, layer: DclsConvNd, box: Box, seen: Seen) -> None:
        self.name, self.conv, self.layer, self.box = name, conv, layer, box
        self.old = conv.forward
        self._seen = seen.joint.get(conv)
        # Its bias, or the running mean of the BatchNorm behind it; None where it has neither.
        self.home = seen.means.get(conv) if layer.bias is None else layer.bias
        self._bias: Any = 0.0 if layer.bias is None else layer.bias.detach().double()
        # By channel, what its outputs lack for the means of the old ones.
        self.lacks = layer.weight.new_zeros(layer.out_channels, dtype=torch.float64)
        self._kernel: Tensor | None = None

    @property
    def offset(self) -> Tensor:
        """(out_channels,): what is to be added to the home; a norm subtracts its running mean."""
        return -self.lacks if self.layer.bias is None else self.lacks

    def outputs(self, input: Tensor) -> Tensor:
        """With the offset, where something takes it up."""
        if self._kernel is None:
            outputs = self.layer.forward(input)
        else:
            outputs = self.conv._conv_forward(input, self._kernel, self.layer.bias)
        return outputs if self.home is None else outputs + self._channels(self.lacks, outputs)

    @torch.no_grad()
    def solve_(self, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
        """Give the layer the weights for its positions by which outputs are as wanted; its outputs for these inputs."""
        layer, form = self.layer, self.layer.form
        joint = self._seen or Moments(layer, self.box, joint=True)
        for input, target in zip(inputs, wanted, strict=True) if self._seen is None else ():
            joint.add(input, target)
        joint.check(self.name)
        weights, means = best_weights(
            joint,
            self.box.places_of(layer.positions),
            self.box.lines_of(form.effective_weight(self.conv, self.conv.weight)),
            form.effective_weight(layer, layer.weight).flatten(0, -2),
            fixed=form.weight is not None,  # what transforms the weights is not undone here
        )
        if form.weight is None:
            layer.weight.copy_(weights.reshape(layer.weight.shape))
        if form is PLAIN and self.box.sides == self.box.kernel_size:  # elements lie in the old kernel, which is smaller
            self._kernel = layer.kernel()
            for axis, first, side in zip(self.box.axes, self.box.origin, self.box.sides, strict=True):
                self._kernel = self._kernel.narrow(2 + axis, first + layer.kernel_size[axis] // 2, side)
        self.lacks = means - self._bias
        return list(map(self.outputs, inputs))

    def _channels(self, values: Tensor, outputs: Tensor) -> Tensor:
        return values.to(outputs).reshape(-1, *[1] * self.layer.dims)
