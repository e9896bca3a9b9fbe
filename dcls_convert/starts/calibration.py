"""Calibration: find values for new layers so that a network keeps its outputs for given images.

One pass of the old network over the images shows what its convolutions see (`moments.py`). These
statistics give the cost of each kernel error. With the costs, the program first fits the positions,
then the weights of each layer. Layers do not depend on one another: each is fitted to the outputs
that its old convolution gives for its inputs in the old network.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, is_out_of_memory
from ..layers.conv_classes import Conv
from ..layers.dcls_conv import DclsConvNd
from ..placing.place import ConvGroup, LayerGroup
from ..progress import Notify
from ..running.process_settings import without_autocast
from ..running.run import Run, running
from ..text import one_line
from .boxes import Box
from .images import Calibration
from .moments import InputMoments, JointMoments, LineMoments
from .solve import solve_weights

# Memory for moments in one pass over the images, in numbers of float64: half a GiB. Layers whose
# channels sum several lines are measured in several passes if together they need more. A single
# layer may exceed the limit.
MAX_FLOATS = 1 << 26

Moments = TypeVar("Moments", JointMoments, LineMoments)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CalibrationStatistics:
    """What the old network's convolutions see in the images."""

    calibration: Calibration
    moments: dict[nn.Module, LineMoments]  # of each convolution

    def cost_roots(self, group: ConvGroup) -> Tensor | None:
        """Return square roots of the costs of kernel errors, by input channel: (in_channels, S, S).

        An error e of a line costs |e @ root|^2; this is what `fit_elements` minimises. The layers
        of a group share positions, so their cost matrices are averaged, each scaled to a mean
        diagonal of 1; the result has the roots of the averages. Separate roots for each layer would
        cost as much time as a separate fit for each layer, and brought outputs no closer.

        Returns:
            None if no layer was called.

        Raises:
            DclsConvertError: The convolutions saw values that are not finite.
        """
        scaled = []
        for conv, plan in zip(group.convs, group.layer_plans, strict=True):
            moments = self.moments[conv]
            if not moments.sample_count:
                continue
            moments.check(plan.name)
            lines_of_channels = (moments.layer.in_channels, -1)
            matrix = torch.unflatten(moments.costs(), 0, lines_of_channels).mean(1)
            scaled.append(matrix / matrix.diagonal(dim1=1, dim2=2).mean())
        if not scaled:
            return None
        roots: Tensor = torch.linalg.cholesky(torch.stack(scaled).mean(0))
        return roots.float()


def measure_inputs(
    model: nn.Module, groups: Sequence[ConvGroup], calibration: Calibration, notify: Notify
) -> CalibrationStatistics:
    """Run the old network on all images, and collect statistics of what its convolutions see.

    Raises:
        DclsConvertError: The network has no values, or does not accept the images.
    """
    for group in groups:
        if any(conv.weight.is_meta for conv in group.convs):
            raise DclsConvertError(
                "calibration: the network has no values, since it is on the meta device"
            )
    notify("measuring layer inputs")
    moments = _measure(model, groups, calibration, LineMoments)
    return CalibrationStatistics(calibration=calibration, moments=moments)


def _measure(
    model: nn.Module,
    groups: Sequence[ConvGroup],
    calibration: Calibration,
    kind: type[Moments],
) -> dict[nn.Module, Moments]:
    moments: dict[nn.Module, Moments] = {}

    def start() -> None:
        for group in groups:
            box = Box.of(group.layer_plans[0])
            for conv, layer in zip(group.convs, group.layers_on_meta(), strict=True):
                moments[conv] = kind(layer, box)

    # The model's own code may have entered other modes.
    @without_autocast()
    @torch.inference_mode(False)
    @torch.no_grad()
    def add(conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        moments[conv].add(args[0] if args else kwargs["input"])

    start()
    with contextlib.ExitStack() as hooks, running(model, restart=start) as run:
        for module in moments:
            hooks.callback(module.register_forward_pre_hook(add, with_kwargs=True).remove)
        for batch in calibration.batches:
            _forward(run, batch)
    return moments


def _forward(run: Run, batch: Tensor) -> None:
    """Run the model, with images in the memory format in which CPUs convolve fastest."""
    if batch.dim() == 4:
        batch = batch.contiguous(memory_format=torch.channels_last)
    try:
        run(batch)
    except DclsConvertError:
        raise
    except Exception as error:  # the model's own code
        if is_out_of_memory(error):
            raise DclsConvertError(
                "calibration: out of memory; give fewer or smaller images"
            ) from error
        problem = one_line(error)[:200]
        raise DclsConvertError(
            f"calibration: the model does not accept the images: {problem}"
        ) from error


def fit_to_outputs_(
    model: nn.Module,
    groups: Sequence[LayerGroup],
    statistics: CalibrationStatistics,
    notify: Notify,
) -> dict[str, float]:
    """Solve for the weights of new layers that bring outputs closest to the old convolutions'.

    The layers must already have positions and fitted weights. The network is not changed.

    Returns:
        |new - old| / |old| of the outputs, by the names of the layers that the network calls.

    Raises:
        DclsConvertError: The model does not accept the images, or has values that are not finite.
    """
    layer_count = sum(len(group.layers) for group in groups)
    done = 0
    errors: dict[str, float] = {}
    separate = [group for group in groups if not _sums_lines(group)]
    summing = [group for group in groups if _sums_lines(group)]
    for part in (separate, *_parts(summing)):
        moments_of: Mapping[nn.Module, InputMoments] = statistics.moments
        if part and _sums_lines(part[0]):
            notify(f"measuring inputs of {part[0].title}", done, layer_count)
            moments_of = _measure(model, part, statistics.calibration, JointMoments)
        for group in part:
            for plan, conv, layer in zip(group.layer_plans, group.convs, group.layers, strict=True):
                progress = f"layer {done + 1} of {layer_count}"
                notify(f"calibrating {plan.name}, {progress}", done, layer_count)
                done += 1
                moments = moments_of[conv]
                if moments.sample_count:  # the network calls the convolution
                    moments.check(plan.name)
                    errors[plan.name] = _solve_weights_(conv, layer, moments)
    return errors


def _sums_lines(group: LayerGroup) -> bool:
    """True if an output channel of the group's layers sums several kernel lines."""
    layer = group.layers[0]
    return layer.in_channels > layer.groups or bool(layer.dense_axes)


def _parts(groups: Sequence[LayerGroup]) -> Iterator[list[LayerGroup]]:
    """Yield the groups whose joint moments are in memory together."""
    part: list[LayerGroup] = []
    floats = 0
    for group in groups:
        moments = JointMoments(group.layers[0], Box.of(group.layer_plans[0]))
        floats_of_group = len(group.layers) * moments.line_groups * moments.patch_length**2
        if part and floats + floats_of_group > MAX_FLOATS:
            yield part
            part = []
            floats = 0
        part.append(group)
        floats += floats_of_group
    if part:
        yield part


def _solve_weights_(conv: Conv, layer: DclsConvNd, moments: InputMoments) -> float:
    """Give the layer its weights, and return |new - old| / |old| of its outputs.

    Weights that the layer transforms, by weight standardisation for example, stay as they are:
    solved weights would have to be transformed back.
    """
    traits = layer.traits
    box = moments.box
    old_lines = box.lines_of(traits.effective_weight(conv, conv.weight)).double()
    footprint = box.footprint(box.to_box(layer.positions.double()))
    weights = traits.effective_weight(layer, layer.weight).flatten(0, -2).double()
    if traits.transform_weight is None:
        weights = solve_weights(moments.costs(), footprint, old_lines, weights)
        layer.weight.copy_(weights.reshape(layer.weight.shape))
    new_lines = (weights.unsqueeze(1) @ footprint).squeeze(1)
    bias = 0.0 if conv.bias is None else conv.bias.double()
    return moments.output_error(old_lines, new_lines, bias)
