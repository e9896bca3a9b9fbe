"""Values for new layers by which a network keeps its outputs for given images, layer by layer.

Each layer is fitted to what the old convolution gives, from what the network that is converted so far feeds it. So the
errors of one layer are made up for in the next (as GPTQ, arXiv:2210.17323, does for quantisation). The network itself
is not changed: hooks put the outputs of the new layers in the place of the old ones.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, one_line
from ..layers.conv_classes import PLAIN, find_form
from ..layers.dcls_conv import DclsConvNd
from ..networks.running import evaluating, run
from ..progress import Notify
from .boxes import Box
from .groups import LayerGroup
from .images import Calibration
from .moments import Moments, best_weights, shared_roots

Fill = Callable[[LayerGroup, Tensor | None], object]  # gives a group its elements; roots as for `fit_elements`


@dataclass(frozen=True, kw_only=True, slots=True)
class Offset:
    """What the outputs of a new layer lack for the means of the old ones, and what can make up for it."""

    name: str  # of the layer
    values: Tensor  # (out_channels,)
    home: Tensor | None  # its bias, or the running mean of the BatchNorm behind it; None where it has neither
    sign: int  # with which the home takes up the values


def fit_to_outputs_(
    model: nn.Module, groups: Sequence[LayerGroup], calibration: Calibration, fill: Fill, notify: Notify
) -> list[Offset]:
    """Give new layers, made for the model, the elements by which it keeps its outputs; offsets to apply with them.

    The layers of a tie group get their positions, and first weights, when the first of them is reached. Then each
    layer's weights are solved for alone. DclsConvertError: the model does not take the images, or has values that are
    not finite.
    """
    place_of: dict[nn.Module, tuple[LayerGroup, int]] = {
        conv: (group, index) for group in groups for index, conv in enumerate(group.convs)
    }
    offsets, left = [], list(groups)
    with evaluating(model), _relay(model, list(place_of), calibration) as relay:
        for number, conv in enumerate(relay.calls):
            group, index = place_of[conv]
            plan, layer = group.plans[index], group.layers[index]
            notify(f"calibrating {plan.name}, layer {number + 1} of {len(relay.calls)}", number, len(relay.calls))
            joint = Moments(layer, group.box, joint=True)
            alone = _alone([group] if group in left else [])
            relay.look(conv, joint, alone)
            joint.check(plan.name)
            if group in left:
                fill(group, _roots(group, alone))
                left.remove(group)
            home = relay.mean_behind(conv) if layer.bias is None else layer.bias
            values = _solve_(layer, conv, joint)
            offsets.append(Offset(name=plan.name, values=values, home=home, sign=-1 if layer.bias is None else 1))
            relay.replace(conv, layer, joint.box, offsets[-1])
        for group in left:  # whose layers are not used in a forward pass
            fill(group, None)
    return offsets


def seen_by_layers(
    model: nn.Module, groups: Sequence[LayerGroup], calibration: Calibration, notify: Notify
) -> list[Tensor | None]:
    """What an error of a kernel does to the outputs in the old network: for each group, roots as for `fit_elements`."""
    notify("looking at the images")
    alone = _alone(groups)
    with evaluating(model), _relay(model, list(alone), calibration) as relay:
        relay.look(None, None, alone)
    return [_roots(group, alone) for group in groups]


def _alone(groups: Sequence[LayerGroup]) -> dict[nn.Module, Moments]:
    """Moments of each layer's lines, each by itself, by the convolution that sees for it."""
    return {
        conv: Moments(layer, group.box, joint=False)
        for group in groups
        for conv, layer in zip(group.convs, group.layers, strict=True)
    }


def _roots(group: LayerGroup, alone: Mapping[nn.Module, Moments]) -> Tensor | None:
    for conv, plan in zip(group.convs, group.plans, strict=True):
        alone[conv].check(plan.name)
    return shared_roots([alone[conv] for conv in group.convs])


@torch.no_grad()
def _solve_(layer: DclsConvNd, conv: Any, joint: Moments) -> Tensor:
    """Give a layer the weights for its positions; the offset (O,) that its outputs lack by then."""
    form = find_form(conv) or PLAIN
    weights, means = best_weights(
        joint,
        joint.box.places_of(layer.positions),
        joint.box.lines_of(form.effective_weight(conv, conv.weight)),
        form.effective_weight(layer, layer.weight).flatten(0, -2),
        fixed=form.weight is not None,  # what transforms the weights is not undone here
    )
    if form.weight is None:
        layer.weight.copy_(weights.reshape(layer.weight.shape))
    return means if layer.bias is None else means - layer.bias.double()


class _Enough(Exception):
    """All that was to be seen in a forward pass has been seen."""


@contextlib.contextmanager
def _relay(model: nn.Module, convs: Sequence[nn.Module], calibration: Calibration) -> Iterator["_Relay"]:
    """A relay that has run the network once; its hooks are removed at the end."""
    relay = _Relay(model, calibration)
    with contextlib.ExitStack() as hooks:
        for conv in convs:
            hooks.callback(conv.register_forward_hook(relay._hook, with_kwargs=True).remove)
        with contextlib.ExitStack() as watching:
            for norm in model.modules():  # BatchNorm of any class; frozen ones too
                instance_norm = isinstance(norm, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
                if isinstance(getattr(norm, "running_mean", None), Tensor) and not instance_norm:
                    watching.callback(norm.register_forward_pre_hook(relay._note_norm).remove)
            relay._run(calibration.batches[0][:1], [], relay._count)
        relay._first_outputs.clear()
        yield relay


class _Relay:
    """Runs the old network, or the one converted so far, up to a convolution, and shows what it sees and gives."""

    def __init__(self, model: nn.Module, calibration: Calibration) -> None:
        self.model, self.calibration = model, calibration
        self.calls = Counter[nn.Module]()  # of each convolution in one forward pass, in order of the first ones
        # What the network converted so far has in place of a convolution: a layer, or where that is quicker only its
        # kernel, cut to the size of the old one; and what is added to the outputs.
        self._layers: dict[nn.Module, DclsConvNd] = {}
        self._kernels: dict[nn.Module, nn.Parameter] = {}
        self._added: dict[nn.Module, Tensor] = {}
        self._converted = False  # which network runs
        self._first_outputs: list[tuple[nn.Module, Tensor]] = []  # of convolutions, in the first pass
        self._entering: dict[nn.Module, list[nn.Module | None]] = {}  # a norm -> what gave its inputs

    def mean_behind(self, conv: nn.Module) -> Tensor | None:
        """The running mean of the one norm that gets this convolution's outputs, and nothing else; None without one."""
        behind = [norm for norm, givers in self._entering.items() if set(givers) == {conv}]
        mean = behind[0].running_mean if len(behind) == 1 else None
        return mean if isinstance(mean, Tensor) else None

    def look(self, conv: nn.Module | None, joint: Moments | None, alone: Mapping[nn.Module, Moments]) -> None:
        """Show `joint` what the convolution gets now and what it gave before, and others what they get now."""
        wanted: list[Tensor] = []

        def keep(seen: nn.Module, _: Tensor, output: Tensor) -> None:
            if seen is conv:
                wanted.append(output)

        def add(seen: nn.Module, input: Tensor, _: Tensor) -> None:
            if joint is not None and seen is conv:
                joint.add(input, wanted.pop(0))
            if seen in alone:
                alone[seen].add(input)

        for batch in self.calibration.batches:
            if conv is not None:
                self._run(batch, [conv], keep)
            old = {replaced: replaced.weight for replaced in self._kernels}
            try:
                for replaced, kernel in self._kernels.items():
                    replaced.weight = kernel
                self._converted = True
                self._run(batch, [*([] if conv is None else [conv]), *alone], add)
            finally:
                self._converted = False
                for replaced, weight in old.items():
                    replaced.weight = weight

    def replace(self, conv: nn.Module, layer: DclsConvNd, box: Box, offset: Offset) -> None:
        """From now on, the converted network has this layer, with its offset where something takes that up."""
        if (find_form(conv) or PLAIN) is PLAIN and box.sides == box.kernel_size:  # elements lie in the old kernel
            kernel = layer.kernel().detach()
            for axis, first, side in zip(box.axes, box.origin, box.sides, strict=True):
                kernel = kernel.narrow(2 + axis, first + layer.kernel_size[axis] // 2, side)
            self._kernels[conv] = nn.Parameter(kernel, requires_grad=False)
        else:
            self._layers[conv] = layer
        if offset.home is not None:
            self._added[conv] = offset.values.to(layer.weight).reshape(-1, *[1] * layer.dims)

    def _run(self, batch: Tensor, convs: Sequence[nn.Module], see: Callable[[nn.Module, Tensor, Tensor], None]) -> None:
        """Run the network until each of the convolutions, if any, has been called as often as it will be."""
        self._see = see
        self._left = {conv: self.calls[conv] for conv in convs if conv in self.calls}
        try:
            # The memory format in which convolutions of images are the quickest on CPUs.
            run(self.model, batch.contiguous(memory_format=torch.channels_last) if batch.dim() == 4 else batch)
        except _Enough:
            pass
        except (DclsConvertError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the model's own code
            message = f"calibration: the model does not take the images: {one_line(error)[:200]}"
            raise DclsConvertError(message) from error

    def _hook(self, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        input = args[0] if args else kwargs["input"]
        if self._converted and conv in self._layers:
            output = self._layers[conv].forward(input)
        if self._converted and conv in self._added:
            output = output + self._added[conv]
        self._see(conv, input, output)
        if conv in self._left:
            self._left[conv] -= 1
            if not any(self._left.values()):
                raise _Enough
        return output

    def _count(self, conv: nn.Module, _: Tensor, output: Tensor) -> None:
        self.calls[conv] += 1
        self._first_outputs.append((conv, output))

    def _note_norm(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        giver = next((conv for conv, output in self._first_outputs if inputs and output is inputs[0]), None)
        self._entering.setdefault(norm, []).append(giver)
