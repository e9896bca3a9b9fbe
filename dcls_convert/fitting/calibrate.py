"""Values for new layers by which a network keeps its outputs for given images.

The images go through the network twice in step, as it was and as it becomes. Each layer is solved
for what the old convolution gives, given the input from the layers that are converted already. So
each layer makes up for the errors of the layers before it, as in GPTQ (arXiv:2210.17323). The
network itself is not changed.

What the network holds of all images in step must be in memory at once. Many images go through it
in parts, therefore: each part adds to the sums of every layer, and solves it again.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, is_out_of_memory, one_line
from ..layers.conv_classes import PLAIN, Conv
from ..layers.dcls_conv import DclsConvNd
from ..networks.in_step import run_in_step
from ..networks.running import evaluating, run
from ..progress import Notify
from .boxes import Box
from .calibration_settings import CalibrationSettings
from .groups import LayerGroup
from .images import Calibration
from .second_moments import SecondMoments, shared_roots
from .solution import solve_weights

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(kw_only=True)
class CalibrationStatistics:
    """What the old network's convolutions see in the images."""

    calibration: Calibration
    settings: CalibrationSettings
    calls: Counter[nn.Module] = field(default_factory=Counter)  # of each conv in a forward pass
    # By convolution; of each line by itself, for the positions. A line: the cells of a kernel along
    # the learnt axes, for one output channel and one input channel.
    line_moments: dict[nn.Module, SecondMoments] = field(default_factory=dict)
    # By convolution; of the lines of an output channel together, and the outputs, for the weights.
    # Only for convs that a pass calls several times; the others are looked at when their turn
    # comes.
    channel_moments: dict[nn.Module, SecondMoments] = field(default_factory=dict)
    # Running mean of the one BatchNorm that is fed by this conv, and by nothing else.
    running_means: dict[nn.Module, Tensor] = field(default_factory=dict)

    def roots(self, group: LayerGroup) -> Tensor | None:
        """What an error of a kernel does to the outputs, for `fit_elements`."""
        for conv, plan in zip(group.convs, group.plans, strict=True):
            self.line_moments[conv].check(plan.name)
        return shared_roots([self.line_moments[conv] for conv in group.convs])


def measure_inputs(
    model: nn.Module,
    groups: Sequence[LayerGroup],
    calibration: Calibration,
    notify: Notify,
    settings: CalibrationSettings | None = None,
) -> CalibrationStatistics:
    """Run the old network with all images, and sum up what its convolutions see."""
    notify("looking at the images")
    statistics = CalibrationStatistics(
        calibration=calibration, settings=settings or CalibrationSettings()
    )
    convs: list[Conv] = []
    for group in groups:
        convs += group.convs
    with evaluating(model):
        _observe_pass_(model, convs, statistics)
        for group in groups:
            for conv, layer in zip(group.convs, group.layers, strict=True):
                moments = partial(SecondMoments, layer, group.box, settings=statistics.settings)
                statistics.line_moments[conv] = moments(joint=False)
                if statistics.calls[conv] > 1:
                    statistics.channel_moments[conv] = moments(joint=True)
        _add_inputs_(model, convs, statistics)
    return statistics


def _observe_pass_(
    model: nn.Module, convs: Sequence[nn.Module], statistics: CalibrationStatistics
) -> None:
    """Run one image: count the calls of convs, and find the BatchNorms that they alone feed."""
    # What feeds each BatchNorm; None stands for anything but one of the convs.
    feeders: dict[nn.Module, set[nn.Module | None]] = {}
    outputs: list[tuple[nn.Module, Tensor]] = []

    def count(conv: nn.Module, _: Any, output: Tensor) -> None:
        statistics.calls[conv] += 1
        outputs.append((conv, output))

    def note_feeder(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        feeder = None
        for conv, output in outputs:
            if inputs and output is inputs[0]:
                feeder = conv
                break
        feeders.setdefault(norm, set()).add(feeder)

    with contextlib.ExitStack() as hooks:
        for conv in convs:
            hooks.callback(conv.register_forward_hook(count).remove)
        for module in model.modules():
            if _is_batch_norm(module):
                hooks.callback(module.register_forward_pre_hook(note_feeder).remove)
        forward(model, statistics.calibration.batches[0][:1])
    for conv in convs:
        norms: list[Any] = [norm for norm, fed_by in feeders.items() if fed_by == {conv}]
        if len(norms) == 1:
            statistics.running_means[conv] = norms[0].running_mean


def _is_batch_norm(module: nn.Module) -> bool:
    """Of any class, frozen ones too."""
    has_running_mean = isinstance(getattr(module, "running_mean", None), Tensor)
    return has_running_mean and not isinstance(module, INSTANCE_NORMS)


def _add_inputs_(
    model: nn.Module, convs: Sequence[nn.Module], statistics: CalibrationStatistics
) -> None:
    def add(conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        input = args[0] if args else kwargs["input"]
        statistics.line_moments[conv].add(input)
        if conv in statistics.channel_moments:
            statistics.channel_moments[conv].add(input, output)

    with contextlib.ExitStack() as hooks:
        for conv in convs:
            hooks.callback(conv.register_forward_hook(add, with_kwargs=True).remove)
        for batch in statistics.calibration.batches:
            forward(model, batch)


def forward(model: nn.Module, batch: Tensor) -> None:
    """Run the model, in the memory format in which CPUs convolve images the fastest."""
    if batch.dim() == 4:
        batch = batch.contiguous(memory_format=torch.channels_last)
    try:
        run(model, batch)
    except DclsConvertError:
        raise
    except Exception as error:  # the model's own code
        if is_out_of_memory(error):
            raise DclsConvertError(
                "calibration: out of memory; give fewer or smaller images"
            ) from error
        problem = one_line(error)[:200]
        raise DclsConvertError(
            f"calibration: the model does not take the images: {problem}"
        ) from error


def fit_to_outputs_(
    model: nn.Module,
    groups: Sequence[LayerGroup],
    statistics: CalibrationStatistics,
    notify: Notify,
) -> list["CalibratedLayer"]:
    """Give new layers, made for the model, the weights by which it keeps its outputs.

    The layers have positions, and first weights for what the old network feeds them. Mean shifts
    are left to be applied. DclsConvertError: the model does not take the images, or has values that
    are not finite.
    """
    layers: dict[nn.Module, CalibratedLayer] = {}
    for group in groups:
        for conv, layer, plan in zip(group.convs, group.layers, group.plans, strict=True):
            layers[conv] = CalibratedLayer(plan.name, conv, layer, group.box, statistics)
    solved: list[CalibratedLayer] = []
    with evaluating(model):
        for part in _parts_of(statistics.calibration, statistics.settings.images_in_step):
            solved = _fit_to_part_(model, layers, statistics, part, notify)
    return solved


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Batches of the images that run in step."""

    number: int  # from 0
    parts: int  # in all
    indices: range  # of the batches

    @property
    def is_last(self) -> bool:
        return self.number + 1 == self.parts

    def __str__(self) -> str:
        if self.parts == 1:
            return ""
        return f", part {self.number + 1} of {self.parts} of the images"


def _parts_of(calibration: Calibration, images_in_step: int) -> list[_Part]:
    """Parts of about so many images, each spread over all of them."""
    batches = len(calibration.batches)
    count = min(math.ceil(len(calibration) / images_in_step), batches)
    parts = []
    for number in range(count):
        parts.append(_Part(number=number, parts=count, indices=range(number, batches, count)))
    return parts


def _fit_to_part_(
    model: nn.Module,
    layers: dict[nn.Module, "CalibratedLayer"],
    statistics: CalibrationStatistics,
    part: _Part,
    notify: Notify,
) -> list["CalibratedLayer"]:
    """Solve the layers that the network calls, for the images of this part and those before it."""
    solved: list[CalibratedLayer] = []
    layer_count = len(statistics.calls)

    def step_all(conv: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
        """Outputs of all passes: first those of the old network, then those of the new one."""
        layer = layers[conv]
        half = len(inputs) // 2
        old_outputs = [layer.old_forward(input) for input in inputs[:half]]
        new_inputs = inputs[half:]
        if layer not in solved:
            done = len(solved)
            message = f"calibrating {layer.name}, layer {done + 1} of {layer_count}{part}"
            notify(message, part.number * layer_count + done, part.parts * layer_count)
            layer.solve_(new_inputs, old_outputs, more_follow=not part.is_last)
            solved.append(layer)
        return [*old_outputs, *map(layer.outputs, new_inputs)]

    batches = [statistics.calibration.batches[index] for index in part.indices]
    passes = [partial(forward, model, batch) for batch in batches]
    run_in_step(list(statistics.calls), [*passes, *passes], step_all)
    return solved


class CalibratedLayer:
    """A new layer in the place of its convolution, in the network that is converted so far."""

    def __init__(
        self,
        name: str,
        conv: Conv,
        layer: DclsConvNd,
        box: Box,
        statistics: CalibrationStatistics,
    ) -> None:
        self.name = name
        self.conv = conv
        self.layer = layer
        self.box = box
        self.old_forward = conv.forward  # `run_in_step` puts another one in its place
        self._settings = statistics.settings
        self._calls = statistics.calls[conv]  # in a pass
        self._moments = statistics.channel_moments.get(conv)
        # Every solution starts here, so that the parts of the images add up to all of them.
        self._fitted_weight = layer.weight.detach().clone()
        # What takes the mean shift: the bias, or the running mean of the BatchNorm behind. None:
        # the layer has neither, and its means stay shifted.
        self.shift_target: Tensor | None = layer.bias
        if layer.bias is None:
            self.shift_target = statistics.running_means.get(conv)
        # (out_channels,): to add to the outputs, so that each channel has the old mean.
        self.mean_shift = layer.weight.new_zeros(layer.out_channels, dtype=torch.float64)
        self.output_error: float | None = None  # |new - old| / |old| of the outputs, once solved
        self.keeps_fit = False  # for too few places; without a mean shift
        self.reasons: tuple[str, ...] = ()  # for an output error that is large, once solved
        self._kernel: Tensor | None = None  # of the old kernel's size, where it holds all elements

    @property
    def target_change(self) -> Tensor:
        """(out_channels,): to add to `shift_target`; a BatchNorm subtracts its running mean."""
        return -self.mean_shift if self.layer.bias is None else self.mean_shift

    def outputs(self, input: Tensor) -> Tensor:
        """With the mean shift, where something takes it."""
        if self._kernel is None:
            outputs = self.layer.forward(input)
        else:
            outputs = self.conv._conv_forward(input, self._kernel, self.layer.bias)
        if self.shift_target is None:
            return outputs
        by_channel = self.mean_shift.to(outputs)
        for _ in range(self.layer.dims):
            by_channel = by_channel.unsqueeze(-1)
        return outputs + by_channel

    @torch.no_grad()
    def solve_(
        self, inputs: Sequence[Tensor], wanted: Sequence[Tensor], *, more_follow: bool
    ) -> None:
        """Give the layer the weights, for its positions, by which its outputs are as wanted.

        For these images and those before them. If `more_follow`, sums are kept to add them to.
        """
        layer = self.layer
        form = layer.form
        moments = self._moments_with(inputs, wanted)
        self._moments = moments if more_follow else None
        moments.check(self.name)
        # By weight standardisation, for example; solved weights would have to be transformed back.
        transformed = form.transform_weight is not None
        self.keeps_fit = moments.too_few_places
        solution = solve_weights(
            moments,
            self.box.places_of(layer.positions),
            self.box.lines_of(form.effective_weight(self.conv, self.conv.weight)),
            form.effective_weight(layer, self._fitted_weight).flatten(0, -2),
            fixed=transformed,
        )
        if not transformed:
            layer.weight.copy_(solution.weights.reshape(layer.weight.shape))
        if form is PLAIN and self.box.sides == self.box.kernel_size:
            self._kernel = self._small_kernel()
        bias = 0.0 if layer.bias is None else layer.bias.double()
        self.mean_shift = solution.mean_shift - bias
        self.output_error = solution.output_error
        self.reasons = self._reasons(moments)

    def _moments_with(self, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> SecondMoments:
        """The sums of all images so far.

        A convolution that a pass calls once adds these images, with inputs from the new network.
        One that is called several times has the sums of all images already, from the old network.
        """
        moments = self._moments
        if moments is None:
            moments = SecondMoments(self.layer, self.box, joint=True, settings=self._settings)
        if self._calls == 1:
            for input, target in zip(inputs, wanted, strict=True):
                moments.add(input, target)
        return moments

    def _reasons(self, moments: SecondMoments) -> tuple[str, ...]:
        """What keeps the outputs from being as wanted, beyond what the elements can do."""
        layer = self.layer
        reasons = []
        weights = layer.weight[0].numel()  # of an output channel
        few_places = moments.places < self._settings.few_places * weights
        transformed = layer.form.transform_weight is not None
        if few_places and not transformed:
            reasons.append(f"few sampled places ({moments.places:,} for {weights:,} weights)")
        if self._calls > 1:
            reasons.append(f"called {self._calls} times in a pass")
        if transformed:
            reasons.append("weights fixed by weight standardisation or the like")
        if self.shift_target is None:
            reasons.append("no bias or single BatchNorm takes the mean shift")
        return tuple(reasons)

    def _small_kernel(self) -> Tensor:
        """The box of the constructed kernel, which all elements are in: faster to convolve with."""
        kernel = self.layer.kernel()
        box = self.box
        for axis, first, side in zip(box.axes, box.origin, box.sides, strict=True):
            start = first + self.layer.kernel_size[axis] // 2
            kernel = kernel.narrow(2 + axis, start, side)
        return kernel
