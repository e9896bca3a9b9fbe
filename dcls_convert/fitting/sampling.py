"""The patches that a layer sees at some places of each image, as rows of a matrix.

A sample is one place of a layer's output: the patch of the input that the layer sees there, and the
target output there.

A line group is a set of kernel lines whose inputs are seen together. If the lines are joint, a line
group is all lines that one output channel sums: the input channels of a group of the convolution,
times the cells of the dense axes. Otherwise, each of these lines is a line group of its own.

Axes: N images, G line groups, R lines of a line group, S cells of the box in which a kernel line is
fitted, Q output channels of a group of the convolution, P samples.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layers.dcls_conv import DclsConvNd
from .boxes import Box
from .calibration_settings import PATCH_FLOATS_AT_ONCE, CalibrationSettings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledLineGroups:
    """What some line groups see: a view for each image."""

    line_groups: int
    samples_of_images: list[int]
    # (line groups, *patch, *output) each; lines that are not joint have the input channels and the
    # cells of the dense axes as axes of their own, in the place of the first.
    patches: list[Tensor]
    targets: list[Tensor]  # target outputs (line groups, Q, *output) each; empty without any

    @property
    def sample_count(self) -> int:
        return sum(self.samples_of_images)


class PatchSampler:
    """Samples the patches of a layer, and the target outputs there."""

    def __init__(
        self, layer: DclsConvNd, box: Box, *, joint: bool, settings: CalibrationSettings
    ) -> None:
        self.layer = layer
        self.box = box
        self.joint = joint
        self.settings = settings
        lines = layer.in_channels
        for axis in layer.dense_axes:
            lines *= layer.kernel_size[axis]
        self.line_groups = layer.groups if joint else lines
        # The first axes of a view of patches, which count its line groups.
        self._line_group_axes = 1 if joint else 1 + len(layer.dense_axes)
        self.patch_length = lines * math.prod(box.sides) // self.line_groups  # R * S

    def sample(
        self, images: Tensor, targets: Tensor | None, *, first_image: int
    ) -> list[SampledLineGroups]:
        """All line groups in padded images (N, in_channels, *spatial), some at a time.

        `first_image` is the number of the first image: each image is sampled at other places.
        """
        patches = self._patches(images)
        if targets is not None:
            targets = torch.unflatten(targets, 1, (self.line_groups, -1))
        sampled: list[Tensor] = []
        sampled_targets: list[Tensor] = []
        for index, image_patches in enumerate(patches):
            sampled_places = self._sampled_places(image_patches, first_image + index)
            sampled.append(image_patches[sampled_places])
            if targets is not None:
                sampled_targets.append(targets[index][sampled_places])
        length = len(sampled[0])  # of the first axis, along which views are split
        length_at_once = self._first_axis_at_once(sampled)
        parts = []
        for begin in range(0, length, length_at_once):
            some = slice(begin, begin + length_at_once)
            patches_of_part = [image[some] for image in sampled]
            targets_of_part = [target[some] for target in sampled_targets]
            parts.append(self._part(patches_of_part, targets_of_part))
        return parts

    def _part(self, patches: list[Tensor], targets: list[Tensor]) -> SampledLineGroups:
        dims = self.layer.dims
        return SampledLineGroups(
            line_groups=math.prod(patches[0].shape[: self._line_group_axes]),
            samples_of_images=[math.prod(image.shape[-dims:]) for image in patches],
            patches=patches,
            targets=targets,
        )

    def rows(self, part: SampledLineGroups) -> Tensor:
        """Patches and targets: (line groups, R * S + Q, P), in float32 at least."""
        dims = self.layer.dims
        first = part.patches[0]
        outputs = 0
        if part.targets:
            outputs = part.targets[0].shape[1]
        dtype = torch.promote_types(first.dtype, torch.float32)
        rows = first.new_empty(
            part.line_groups, self.patch_length + outputs, part.sample_count, dtype=dtype
        )
        for index, of_image in enumerate(torch.split(rows, part.samples_of_images, dim=2)):
            image = part.patches[index]
            by_place = of_image.view(*of_image.shape[:2], *image.shape[-dims:])
            by_place[:, : self.patch_length].view(image.shape).copy_(image)
            if part.targets:
                by_place[:, self.patch_length :].copy_(part.targets[index])
        return rows

    def _patches(self, images: Tensor) -> Tensor:
        """A view of padded images, at all places.

        (N, G, *patch, *output) if joint, else (N, in_channels, *patch, *output).
        """
        layer = self.layer
        dims = layer.dims
        patches = images
        for axis in range(dims):
            patches = patches.unfold(2 + axis, layer.kernel_size[axis], layer.stride[axis])
        for axis, first, side in zip(self.box.axes, self.box.origin, self.box.sides, strict=True):
            patches = patches.narrow(2 + dims + axis, first + layer.kernel_size[axis] // 2, side)
        patch_axes = [2 + dims + axis for axis in (*layer.dense_axes, *self.box.axes)]
        patches = patches.permute(0, 1, *patch_axes, *range(2, 2 + dims))
        if self.joint:
            patches = torch.unflatten(patches, 1, (-1, layer.in_channels // layer.groups))
        return patches

    def _sampled_places(self, image_patches: Tensor, number: int) -> Any:
        """An index of every n-th place along each axis, from another first one in each image."""
        dims = self.layer.dims
        all_places = math.prod(image_patches.shape[-dims:])
        nth = max(1, round((all_places / self.settings.samples_per_image) ** (1 / dims)))
        index: list[Any] = [...]
        for axis, axis_places in enumerate(image_patches.shape[-dims:]):
            shift = number * self.settings.shift_between_images**axis
            first = shift % min(nth, axis_places)
            index.append(slice(first, None, nth))
        return tuple(index)

    def _first_axis_at_once(self, sampled: list[Tensor]) -> int:
        """How much of the views' first axis to take at a time."""
        length = len(sampled[0])
        floats = sum(image.numel() for image in sampled)
        return max(1, PATCH_FLOATS_AT_ONCE * length // floats)
