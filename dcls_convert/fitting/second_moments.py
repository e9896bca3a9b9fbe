"""Means and covariances of what a layer sees in images, and of the outputs that are wanted there.

At each place, the layer sees a patch x of its input and gives k'x + bias. Over many places, the
mean square of k'x - y depends on the kernel k through the means and covariances of x and y alone.

Axes: G groups, Q output channels of a group, R lines that an output channel sums (input channels of
the group x cells of the dense axes), S cells of the box in which a line is fitted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DclsConvertError
from ..layers.dcls_conv import DclsConvNd
from .boxes import Box
from .calibration_settings import ROWS_AT_ONCE, CalibrationSettings
from .sampling import PatchSampler, SampledGroups


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Statistics:
    """Of patches x and wanted outputs y, over all sampled places."""

    mean_patch: Tensor  # (G, R * S)
    mean_target: Tensor  # (G, Q)
    covariance: Tensor  # (G, R * S, R * S): of x
    cross: Tensor  # (G, Q, R * S): covariance of y and x
    target_variance: Tensor  # (G, Q)
    # (G, R * S): mean variance of each line's input, at least a share of that of all
    energy: Tensor


class SecondMoments:
    """Sums of products over the patches of a layer, and of the outputs that are wanted there.

    The lines that one output channel sums are seen together (joint), as G groups; otherwise each
    line is a group of its own. Products are summed as the images are, in float32 at least, and the
    sums of batches in float64.
    """

    def __init__(
        self,
        layer: DclsConvNd,
        box: Box,
        *,
        joint: bool,
        settings: CalibrationSettings | None = None,
    ) -> None:
        self.layer = layer
        self.box = box
        self.settings = settings or CalibrationSettings()
        self.sampler = PatchSampler(layer, box, joint=joint, settings=self.settings)
        self.groups = self.sampler.groups
        self.length = self.sampler.length  # R * S
        self.images = 0
        # Sum over places of z z', where z is [patch (R * S), wanted outputs (Q), 1], by group:
        # (G, R * S + Q + 1, same). A single group has only the lower triangle.
        self.sums: Tensor | None = None

    def add(self, input: Tensor, wanted: Tensor | None = None) -> None:
        """Add what the layer sees in a batch, and the outputs that are wanted there.

        Both have the axes (N, channels, *spatial), or are of one image without the first axis.
        """
        if input.dim() < self.layer.dims + 2:
            input = input.unsqueeze(0)
            if wanted is not None:
                wanted = wanted.unsqueeze(0)
        if wanted is not None:
            wanted = wanted.detach()
        padded = self.layer.padded(input.detach())
        parts = self.sampler.sample(padded, wanted, first_image=self.images)
        self.images += len(input)
        if self.sums is None:
            side = self.length + 1
            if wanted is not None:
                side += wanted.shape[1] // self.groups
            device = input.device
            self.sums = torch.zeros(self.groups, side, side, dtype=torch.float64, device=device)
        groups = [self.sampler.groups_in(part) for part in parts]
        for sums, part in zip(torch.split(self.sums, groups), parts, strict=True):
            self._add_products_(sums, part)

    def _add_products_(self, sums: Tensor, part: SampledGroups) -> None:
        rows = self.sampler.rows(part)
        if self.groups > 1:
            sums += rows @ rows.mT
            return
        for first in range(0, rows.shape[1], ROWS_AT_ONCE):
            last = first + ROWS_AT_ONCE
            sums[:, first:last, :last] += rows[:, first:last] @ rows[:, :last].mT

    @property
    def places(self) -> int:
        """How many sampled places were added, in all images and calls."""
        return 0 if self.sums is None else int(self.sums[0, -1, -1])

    def check(self, name: str) -> None:
        """Refuse (DclsConvertError) values that are not finite, by the layer's name."""
        if self.sums is not None and not bool(self.sums.isfinite().all()):
            raise DclsConvertError(
                f"calibration: {name} sees or gives values that are not finite (NaN or infinite)"
            )

    def statistics(self) -> Statistics:
        """Means and covariances of all that was added; something must have been."""
        assert self.sums is not None
        sums = self.sums
        if self.groups == 1:
            sums = sums.tril() + sums.tril(-1).mT
        places = sums[0, -1, -1]
        products = sums / places
        means = products[:, :-1, -1].clone()
        covariances = products[:, :-1, :-1]
        covariances.baddbmm_(means.unsqueeze(2), means.unsqueeze(1), alpha=-1)
        covariance = covariances[:, : self.length, : self.length]
        return Statistics(
            mean_patch=means[:, : self.length],
            mean_target=means[:, self.length :],
            covariance=covariance,
            cross=covariances[:, self.length :, : self.length],
            target_variance=covariances.diagonal(dim1=1, dim2=2)[:, self.length :],
            energy=self._energy(covariance),
        )

    def _energy(self, covariance: Tensor) -> Tensor:
        cells = math.prod(self.box.sides)
        variances = covariance.diagonal(dim1=1, dim2=2)  # (G, R * S)
        energy = variances.reshape(self.groups, -1, cells).mean(-1)  # (G, R)
        least = energy.mean() * self.settings.least_energy + 1e-12
        return energy.maximum(least).repeat_interleave(cells, dim=1)


def shared_roots(moments: Sequence[SecondMoments]) -> Tensor | None:
    """What an error of a kernel does to the outputs, for `fit_elements`: roots (in_channels, S, S).

    An error e of a line costs |e @ root|^2: root root' is the mean of the damped covariances that
    layers of the same form see, not joint, each scaled to a mean variance of 1. Roots for each
    layer alone would cost as many fits, and kept outputs no closer. None where no layer saw
    anything.
    """
    scaled = []
    for alone in moments:
        if alone.sums is None:
            continue
        statistics = alone.statistics()
        covariance = statistics.covariance
        covariance.diagonal(dim1=1, dim2=2).add_(statistics.energy, alpha=alone.settings.damping)
        by_channel = covariance.reshape(alone.layer.in_channels, -1, *covariance.shape[1:])
        matrix = by_channel.mean(1)
        scaled.append(matrix / matrix.diagonal(dim1=1, dim2=2).mean())
    if not scaled:
        return None
    values, vectors = torch.linalg.eigh(torch.stack(scaled).mean(0))
    return torch.mul(vectors, values.clamp(min=0).sqrt().unsqueeze(-2)).float()
