"""Calibration: find values for new layers so that a network keeps its outputs for given images.

The images run through the old and the new network in lockstep. Each layer is fitted to the outputs
of its old convolution, but its inputs come from the layers that are already converted. So it makes
up for the errors of the layers before it, as in GPTQ (arXiv:2210.17323). The network itself is not
changed.

The activations of all images in lockstep must fit in memory, so a large set is split into parts.
Each part adds to the sums of every layer, and every layer is solved again.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, is_out_of_memory
from ..layers.conv_classes import Conv
from ..networks.lockstep import run_in_lockstep
from ..networks.running import eval_mode, run_batch
from ..progress import Notify
from ..text import one_line
from .calibrated_layer import CalibratedLayer
from .calibration_images import Calibration
from .calibration_settings import CalibrationSettings
from .groups import LayerGroup
from .second_moments import SecondMoments, shared_covariance_roots

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CalibrationStatistics:
    """Statistics of what the old network's convolutions see in the images."""

    calibration: Calibration
    settings: CalibrationSettings
    calls: Counter[nn.Module]  # how often a forward pass calls each conv
    # Moments of each conv, with separate lines. Positions are fitted with these.
    separate_moments: dict[nn.Module, SecondMoments]
    # Moments of the inputs and outputs of convs that a pass calls several times, with joint lines.
    # Weights are solved from them. Other convs are measured when their layers are solved.
    joint_moments: dict[nn.Module, SecondMoments]
    # Running mean of the only BatchNorm whose inputs all come from this conv; convs without such a
    # BatchNorm are absent.
    running_means: dict[nn.Module, Tensor]

    def covariance_roots(self, group: LayerGroup) -> Tensor | None:
        """Return the square root of the covariance that weights kernel errors: (in_channels, S, S).

        See `shared_covariance_roots`.

        Raises:
            DclsConvertError: The convolutions saw values that are not finite.
        """
        for conv, plan in zip(group.convs, group.layer_plans, strict=True):
            self.separate_moments[conv].check(plan.name)
        return shared_covariance_roots([self.separate_moments[conv] for conv in group.convs])


def measure_inputs(
    model: nn.Module,
    groups: Sequence[LayerGroup],
    calibration: Calibration,
    notify: Notify,
    settings: CalibrationSettings | None = None,
) -> CalibrationStatistics:
    """Run the old network on all images, and collect statistics of what its convolutions see."""
    notify("measuring layer inputs")
    settings = settings or CalibrationSettings()
    convs: list[Conv] = []
    for group in groups:
        convs += group.convs
    with eval_mode(model):
        calls, running_means = _observe_pass(model, convs, calibration.batches[0][:1])
        separate_moments: dict[nn.Module, SecondMoments] = {}
        joint_moments: dict[nn.Module, SecondMoments] = {}
        for group in groups:
            for conv, layer in zip(group.convs, group.layers, strict=True):
                make_moments = partial(SecondMoments, layer, group.box, settings=settings)
                separate_moments[conv] = make_moments(joint=False)
                if calls[conv] > 1:
                    joint_moments[conv] = make_moments(joint=True)
        _add_images_(separate_moments, joint_moments, model, calibration.batches)
    return CalibrationStatistics(
        calibration=calibration,
        settings=settings,
        calls=calls,
        separate_moments=separate_moments,
        joint_moments=joint_moments,
        running_means=running_means,
    )


def _observe_pass(
    model: nn.Module, convs: Sequence[nn.Module], image: Tensor
) -> tuple[Counter[nn.Module], dict[nn.Module, Tensor]]:
    """Run one image to count the calls of each conv, and to find BatchNorms fed by one conv alone.

    Returns the number of calls, and the running mean of the BatchNorm of each conv that has one.
    """
    calls: Counter[nn.Module] = Counter()
    # The convs that feed each BatchNorm; None stands for anything else.
    feeders: dict[nn.Module, set[nn.Module | None]] = {}
    outputs: list[tuple[nn.Module, Tensor, int]] = []  # with its version after the conv

    def record_call(conv: nn.Module, _: Any, output: Tensor) -> None:
        calls[conv] += 1
        outputs.append((conv, output, _version(output)))

    def note_feeder(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        feeder = None
        for conv, output, version in outputs:
            if inputs and output is inputs[0] and _version(output) == version:
                feeder = conv
                break
        feeders.setdefault(norm, set()).add(feeder)

    with contextlib.ExitStack() as hooks:
        for conv in convs:
            hooks.callback(conv.register_forward_hook(record_call).remove)
        for module in model.modules():
            if _is_batch_norm(module):
                hooks.callback(module.register_forward_pre_hook(note_feeder).remove)
        _forward(model, image)
    running_means: dict[nn.Module, Tensor] = {}
    for conv in convs:
        norms: list[Any] = [norm for norm, fed_by in feeders.items() if fed_by == {conv}]
        if len(norms) == 1:
            running_means[conv] = norms[0].running_mean
    return calls, running_means


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, or 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def _is_batch_norm(module: nn.Module) -> bool:
    """True if the module is a BatchNorm of any class, including frozen ones."""
    has_running_mean = isinstance(getattr(module, "running_mean", None), Tensor)
    return has_running_mean and not isinstance(module, INSTANCE_NORMS)


def _add_images_(
    separate_moments: dict[nn.Module, SecondMoments],
    joint_moments: dict[nn.Module, SecondMoments],
    model: nn.Module,
    batches: Sequence[Tensor],
) -> None:
    """Add what the convs see in these images to their moments."""

    def add(conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        input = args[0] if args else kwargs["input"]
        separate_moments[conv].add(input)
        if conv in joint_moments:
            joint_moments[conv].add(input, output)

    with contextlib.ExitStack() as hooks:
        for conv in separate_moments:
            hooks.callback(conv.register_forward_hook(add, with_kwargs=True).remove)
        for batch in batches:
            _forward(model, batch)


def _forward(model: nn.Module, batch: Tensor) -> None:
    """Run the model, with images in the memory format in which CPUs convolve fastest."""
    if batch.dim() == 4:
        batch = batch.contiguous(memory_format=torch.channels_last)
    try:
        run_batch(model, batch)
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
) -> list[CalibratedLayer]:
    """Solve for the weights of new layers, so that the network keeps its outputs.

    The layers must already have positions and fitted weights.

    Returns:
        The layers that a forward pass calls, in the order of their first calls. Their mean shifts
        (`CalibratedLayer.change_of_shifted_tensor`) are not applied yet.

    Raises:
        DclsConvertError: The model does not accept the images, or has values that are not finite.
    """
    layers: dict[nn.Module, CalibratedLayer] = {}
    for group in groups:
        for conv, layer, plan in zip(group.convs, group.layers, group.layer_plans, strict=True):
            layers[conv] = CalibratedLayer(
                plan.name,
                conv,
                layer,
                group.box,
                settings=statistics.settings,
                calls=statistics.calls[conv],
                moments=statistics.joint_moments.get(conv),
                running_mean=statistics.running_means.get(conv),
            )
    solved: list[CalibratedLayer] = []
    with eval_mode(model):
        for part in _parts_of(statistics.calibration, statistics.settings.images_in_step):
            solved = _fit_to_part_(model, layers, statistics, part, notify)
    return solved


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Batches of images that run in lockstep."""

    index: int  # of this part, from 0
    part_count: int
    batch_indices: range

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.part_count

    @property
    def progress_suffix(self) -> str:
        """The end of progress messages; empty if there is only one part."""
        if self.part_count == 1:
            return ""
        return f", part {self.index + 1} of {self.part_count} of the images"


def _parts_of(calibration: Calibration, images_in_step: int) -> list[_Part]:
    """Split the batches into parts of about `images_in_step` images.

    The batches of a part are spread evenly over all batches.
    """
    batch_count = len(calibration.batches)
    part_count = min(math.ceil(len(calibration) / images_in_step), batch_count)
    parts = []
    for index in range(part_count):
        batch_indices = range(index, batch_count, part_count)
        parts.append(_Part(index=index, part_count=part_count, batch_indices=batch_indices))
    return parts


def _fit_to_part_(
    model: nn.Module,
    layers: dict[nn.Module, CalibratedLayer],
    statistics: CalibrationStatistics,
    part: _Part,
    notify: Notify,
) -> list[CalibratedLayer]:
    """Solve the layers that the network calls, for the images of this part and all parts before."""
    solved: dict[nn.Module, CalibratedLayer] = {}

    def solve_at_first_call_(
        conv: nn.Module, new_inputs: list[Tensor], old_outputs: list[Tensor]
    ) -> None:
        if conv in solved:
            return
        layer = layers[conv]
        layer_count = len(statistics.calls)
        done = len(solved)
        message = f"calibrating {layer.name}, layer {done + 1} of {layer_count}"
        message += part.progress_suffix
        notify(message, part.index * layer_count + done, part.part_count * layer_count)
        layer.solve_(new_inputs, old_outputs, more_follow=not part.is_last)
        solved[conv] = layer

    def step_all(conv: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs of all passes: the old network's first, then the new network's."""
        layer = layers[conv]
        half = len(inputs) // 2
        old_inputs = inputs[:half]
        new_inputs = inputs[half:]
        old_outputs = [layer.old_forward(input) for input in old_inputs]
        solve_at_first_call_(conv, new_inputs, old_outputs)
        new_outputs = [layer.outputs(input) for input in new_inputs]
        return [*old_outputs, *new_outputs]

    batches = [statistics.calibration.batches[index] for index in part.batch_indices]
    passes = [partial(_forward, model, batch) for batch in batches]
    # Twice: `step_all` gives the first half the outputs of old layers, the second half those of new
    # layers.
    run_in_lockstep(list(statistics.calls), [*passes, *passes], step_all)
    return list(solved.values())
