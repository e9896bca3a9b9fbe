"""Calibration: find values for new layers so that a network keeps its outputs for given images.

A forward pass takes the images twice, as one batch: its first half runs through the old network,
its second half through the new one. Each layer is fitted to the outputs of its old convolution, but
its inputs come from the layers that are already converted. So it makes up for the errors of the
layers before it, as in GPTQ (arXiv:2210.17323). The network itself is not changed.

Both halves must be independent. Where a network computes statistics over a batch in eval mode, they
are those of both halves together.

The activations of a pass must fit in memory, so a large set is split into parts. Each part adds to
the sums of every layer, and every layer is solved again.
"""

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, ModelError, is_out_of_memory
from ..layers.conv_classes import Conv
from ..networks.running import eval_mode, full_precision, run_batch
from ..placing.place import LayerGroup
from ..progress import Notify
from ..text import one_line
from .boxes import Box
from .calibrated_layer import CalibratedLayer
from .calibration_settings import CalibrationSettings
from .images import Calibration
from .second_moments import SecondMoments, shared_covariance_roots

# Relative difference between the halves of a batch that holds the same images twice. Rounding stays
# below; another order of the images exceeds it.
MAX_DIFFERENCE_OF_HALVES = 0.05
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
            box = Box.of(group.layer_plans[0])
            for conv, layer in zip(group.convs, group.layers, strict=True):
                make_moments = partial(SecondMoments, layer, box, settings=settings)
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
        box = Box.of(group.layer_plans[0])
        for conv, layer, plan in zip(group.convs, group.layers, group.layer_plans, strict=True):
            layers[conv] = CalibratedLayer(
                plan.name,
                conv,
                layer,
                box,
                settings=statistics.settings,
                calls=statistics.calls[conv],
                moments=statistics.joint_moments.get(conv),
                running_mean=statistics.running_means.get(conv),
            )
    solved: list[CalibratedLayer] = []
    with eval_mode(model):
        for part in _parts_of(statistics.calibration, statistics.settings.images_per_pass):
            both = _BothNetworks(layers, statistics, part, notify)
            both.run_and_solve_(model)
            solved = list(both.solved.values())
    return solved


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Batches of images of equal size that run in one pass."""

    index: int  # of this part, from 0
    part_count: int
    batch_indices: Sequence[int]

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.part_count

    @property
    def progress_suffix(self) -> str:
        """The end of progress messages; empty if there is only one part."""
        if self.part_count == 1:
            return ""
        return f", part {self.index + 1} of {self.part_count} of the images"


def _parts_of(calibration: Calibration, images_per_pass: int) -> list[_Part]:
    """Split the batches into parts of about `images_per_pass` images of equal size.

    The batches of a part are spread evenly over all batches of this size.
    """
    indices_by_size: dict[Any, list[int]] = defaultdict(list)
    image_counts: Counter[Any] = Counter()
    for index, batch in enumerate(calibration.batches):
        size = (batch.shape[1:], batch.dtype, batch.device)  # what can be concatenated
        indices_by_size[size].append(index)
        image_counts[size] += len(batch)
    parts: list[Sequence[int]] = []
    for size, indices in indices_by_size.items():
        count = min(math.ceil(image_counts[size] / images_per_pass), len(indices))
        parts += [indices[first::count] for first in range(count)]
    return [
        _Part(index=index, part_count=len(parts), batch_indices=batch_indices)
        for index, batch_indices in enumerate(parts)
    ]


class _BothNetworks:
    """The old and the new network side by side, for the images of a part.

    Each layer is solved at its first call, for the images of this part and all parts before.
    """

    def __init__(
        self,
        layers: Mapping[nn.Module, CalibratedLayer],
        statistics: CalibrationStatistics,
        part: _Part,
        notify: Notify,
    ) -> None:
        batches = statistics.calibration.batches
        self.layers = layers
        self.called_count = len(statistics.calls)  # layers that a pass calls
        self.part = part
        self.batches = [batches[index] for index in part.batch_indices]
        self.image_count = sum(map(len, self.batches))
        self.notify = notify
        self.solved: dict[str, CalibratedLayer] = {}  # by name, in the order of their first calls

    def run_and_solve_(self, model: nn.Module) -> None:
        """Run the images through both networks; solve the layers that the network calls."""
        with contextlib.ExitStack() as cleanup:
            for conv, layer in self.layers.items():
                cleanup.callback(vars(conv).pop, "forward")
                conv.forward = partial(self._run_conv, layer)
            _forward(model, torch.cat([*self.batches, *self.batches]))

    # The model's own code may have entered other modes.
    @full_precision()
    @torch.inference_mode(False)
    @torch.no_grad()
    def _run_conv(self, layer: CalibratedLayer, input: Tensor) -> Tensor:
        """Stand in for a convolution: the old one for the first half, the new layer for the other.

        The layer is solved at its first call.
        """
        old_input, new_input = _halves(layer, input, 2 * self.image_count)
        if not self.solved:  # so far, both halves ran through the same layers
            difference = torch.dist(old_input, new_input)
            if difference > MAX_DIFFERENCE_OF_HALVES * old_input.norm():
                raise _images_are_mixed(layer)
        old_output = layer.old_forward(old_input)
        if layer.name not in self.solved:
            self._solve_(layer, new_input, old_output)
        return torch.cat([old_output, layer.outputs(new_input)])

    def _solve_(self, layer: CalibratedLayer, new_input: Tensor, old_output: Tensor) -> None:
        done = len(self.solved)
        total = self.called_count
        message = f"calibrating {layer.name}, layer {done + 1} of {total}"
        message += self.part.progress_suffix
        self.notify(message, self.part.index * total + done, self.part.part_count * total)
        # Some models see several maps of an image, one after the other.
        maps_per_image = len(new_input) // self.image_count
        sizes = [len(batch) * maps_per_image for batch in self.batches]
        new_inputs = torch.split(new_input, sizes)
        old_outputs = torch.split(old_output, sizes)
        layer.solve_(new_inputs, old_outputs, more_follow=not self.part.is_last)
        self.solved[layer.name] = layer


def _halves(layer: CalibratedLayer, input: Tensor, image_count: int) -> tuple[Tensor, Tensor]:
    """Split a convolution's input into that of the old network and that of the new one."""
    is_batch = input.dim() == layer.layer.dims + 2
    if not is_batch or len(input) % image_count:
        raise _images_are_mixed(layer)
    old_input, new_input = input.chunk(2)
    return old_input, new_input


def _images_are_mixed(layer: CalibratedLayer) -> ModelError:
    return ModelError(
        f"calibration: {layer.name} does not get the images of a batch one after the other, so the "
        "old and the new network cannot run side by side; convert without images"
    )
