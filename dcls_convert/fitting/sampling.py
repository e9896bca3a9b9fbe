"""The patches that a layer sees at some places of each image, as rows of a matrix.

Axes: N images, G groups, R lines that an output channel sums (input channels of the group x cells
of the dense axes), S cells of the box in which a kernel line is fitted, Q output channels of a
group, P sampled places.
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
class SampledGroups:
    """What some groups see: a view for each image."""

    patches: list[Tensor]  # (*groups, *patch, *output) each
    targets: list[Tensor]  # the wanted outputs (groups, Q, *output) each; empty without any


class PatchSampler:
    """Samples the patches of a layer, and the outputs that are wanted there.

    The lines that one output channel sums are seen together ("joint"), as the layer's G groups;
    otherwise each line is a group of its own.
    """

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
        # Axes of the views that count groups: channels, and without "joint" the dense axes too.
        if joint:
            self.groups = layer.groups
            self.group_axes = 1
        else:
            self.groups = lines
            self.group_axes = 1 + len(layer.dense_axes)
        self.length = lines * math.prod(box.sides) // self.groups  # R * S

    def sample(
        self, images: Tensor, targets: Tensor | None, *, first_image: int
    ) -> list[SampledGroups]:
        """All groups in padded images (N, in_channels, *spatial), some groups at a time.

        `first_image` is the number of the first image: each image is sampled at other places.
        """
        patches = self._patches(images)
        if targets is not None:
            targets = torch.unflatten(targets, 1, (self.groups, -1))
        sampled: list[Tensor] = []
        sampled_targets: list[Tensor] = []
        for index, image in enumerate(patches):
            places = self._places(image, first_image + index)
            sampled.append(image[places])
            if targets is not None:
                sampled_targets.append(targets[index][places])
        count = len(sampled[0])
        groups_at_once = self._groups_at_once(sampled)
        parts = []
        for first in range(0, count, groups_at_once):
            some = slice(first, first + groups_at_once)
            parts.append(
                SampledGroups(
                    patches=[image[some] for image in sampled],
                    targets=[target[some] for target in sampled_targets],
                )
            )
        return parts

    def rows(self, part: SampledGroups) -> Tensor:
        """Patches and targets: (groups, R * S + Q, P), in float32 at least."""
        dims = self.layer.dims
        first = part.patches[0]
        groups = self.groups_in(part)
        outputs = 0
        if part.targets:
            outputs = part.targets[0].shape[1]
        places = [math.prod(image.shape[-dims:]) for image in part.patches]
        dtype = torch.promote_types(first.dtype, torch.float32)
        rows = first.new_empty(groups, self.length + outputs, sum(places), dtype=dtype)
        for index, of_image in enumerate(torch.split(rows, places, dim=2)):
            image = part.patches[index]
            by_place = of_image.view(*of_image.shape[:2], *image.shape[-dims:])
            by_place[:, : self.length].view(image.shape).copy_(image)
            if part.targets:
                by_place[:, self.length :].copy_(part.targets[index])
        return rows

    def groups_in(self, part: SampledGroups) -> int:
        return math.prod(part.patches[0].shape[: self.group_axes])

    def _patches(self, images: Tensor) -> Tensor:
        """A view (N, channels or groups, *patch, *output) of padded images, at all places."""
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

    def _places(self, image: Tensor, number: int) -> Any:
        """An index of every n-th place along each axis, from another first one in each image."""
        dims = self.layer.dims
        places = math.prod(image.shape[-dims:])
        nth = max(1, round((places / self.settings.places_per_image) ** (1 / dims)))
        index: list[Any] = [...]
        for axis in range(dims):
            first = number * self.settings.shift_between_images**axis % nth
            index.append(slice(first, None, nth))
        return tuple(index)

    def _groups_at_once(self, sampled: list[Tensor]) -> int:
        count = len(sampled[0])
        floats = sum(image.numel() for image in sampled)
        return max(1, PATCH_FLOATS_AT_ONCE * count // floats)
