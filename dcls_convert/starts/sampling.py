"""Sample the patches that a layer sees at some places of each image, as rows of a matrix.

A sample is one place of a layer's output: the patch of the input that the layer sees there, and the
target output there.

A line group is a set of kernel lines whose inputs share one covariance matrix. If the lines are
joint, a line group has all lines that one output channel sums: one for each input channel of the
convolution's group and each cell of the dense axes. Otherwise, each of these lines is a line group
of its own.

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
    """The sampled patches of some line groups, as one view for each image."""

    line_groups: int
    samples_of_images: list[int]
    # (line groups, *patch, *output) each. If lines are not joint, the first axis is split into the
    # input channels and the cells of the dense axes.
    patches: list[Tensor]
    targets: list[Tensor]  # target outputs (line groups, Q, *output) each; empty if there are none

    @property
    def sample_count(self) -> int:
        return sum(self.samples_of_images)


class PatchSampler:
    """Samples the patches that a layer sees, and the target outputs at the same places."""

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
        # The first `_line_group_axes` axes of a view of patches together index its line groups.
        if joint:
            self.line_groups = layer.groups
            self._line_group_axes = 1
        else:
            self.line_groups = lines
            self._line_group_axes = 1 + len(layer.dense_axes)
        self.patch_length = lines * math.prod(box.sides) // self.line_groups  # R * S

    def sample(
        self, images: Tensor, targets: Tensor | None, *, first_image: int
    ) -> list[SampledLineGroups]:
        """Sample padded images (N, in_channels, *spatial); return line groups in several parts.

        `first_image` is the index of the first image among all images: each image is sampled at
        different places.
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
            block = slice(begin, begin + length_at_once)
            patches_of_part = [image[block] for image in sampled]
            targets_of_part = [target[block] for target in sampled_targets]
            parts.append(self._make_part(patches_of_part, targets_of_part))
        return parts

    def _make_part(self, patches: list[Tensor], targets: list[Tensor]) -> SampledLineGroups:
        dims = self.layer.dims
        return SampledLineGroups(
            line_groups=math.prod(patches[0].shape[: self._line_group_axes]),
            samples_of_images=[math.prod(image.shape[-dims:]) for image in patches],
            patches=patches,
            targets=targets,
        )

    def rows(self, part: SampledLineGroups) -> Tensor:
        """Copy patches and targets into rows (line groups, R * S + Q, P), in float32 at least."""
        dims = self.layer.dims
        first = part.patches[0]
        outputs = 0
        if part.targets:
            outputs = part.targets[0].shape[1]
        dtype = torch.promote_types(first.dtype, torch.float32)
        rows = first.new_empty(
            part.line_groups, self.patch_length + outputs, part.sample_count, dtype=dtype
        )
        for index, image_rows in enumerate(torch.split(rows, part.samples_of_images, dim=2)):
            patches = part.patches[index]
            by_place = image_rows.view(*image_rows.shape[:2], *patches.shape[-dims:])
            by_place[:, : self.patch_length].view(patches.shape).copy_(patches)
            if part.targets:
                by_place[:, self.patch_length :].copy_(part.targets[index])
        return rows

    def _patches(self, images: Tensor) -> Tensor:
        """Return a view of the patches at all places of padded images.

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

    def _sampled_places(self, image_patches: Tensor, image_index: int) -> Any:
        """Index every n-th place along each axis; the first place differs from image to image."""
        dims = self.layer.dims
        all_places = math.prod(image_patches.shape[-dims:])
        nth = max(1, round((all_places / self.settings.samples_per_image) ** (1 / dims)))
        index: list[Any] = [...]
        for axis, axis_places in enumerate(image_patches.shape[-dims:]):
            shift = image_index * self.settings.shift_between_images**axis
            first = shift % min(nth, axis_places)
            index.append(slice(first, None, nth))
        return tuple(index)

    def _first_axis_at_once(self, sampled: list[Tensor]) -> int:
        """Return how many entries of the views' first axis to put into one part."""
        length = len(sampled[0])
        floats = sum(image.numel() for image in sampled)
        return max(1, PATCH_FLOATS_AT_ONCE * length // floats)
