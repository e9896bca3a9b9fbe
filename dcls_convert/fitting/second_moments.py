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
from .sampling import PatchSampler


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
    damping: Tensor  # (G, R * S): a diag(v) of the objective in `solution.py`


class SecondMoments:
    """Means and products over the patches of a layer, and of the outputs that are wanted there.

    The lines that one output channel sums are seen together (joint), as G groups; otherwise each
    line is a group of its own. Products are summed as the images are, in float32 at least, and the
    sums of batches in float64.

    Each batch is centred before its products are taken, and merged by what its mean differs in
    (Chan et al. 1979). Products less those of the means would cancel, and variances of inputs that
    hardly vary could be negative.
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
        self.places = 0  # sampled, in all images and calls
        # Of z, which is [patch (R * S), wanted outputs (Q)], over all places, by group.
        self.means: Tensor | None = None  # (G, R * S + Q)
        # Sum of (z - mean)(z - mean)': (G, R * S + Q, same). Only the lower triangle counts.
        self.products: Tensor | None = None

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
        if self.means is None or self.products is None:
            side = self.length
            if wanted is not None:
                side += wanted.shape[1] // self.groups
            self.means = padded.new_zeros(self.groups, side, dtype=torch.float64)
            self.products = padded.new_zeros(self.groups, side, side, dtype=torch.float64)
        groups = [self.sampler.groups_in(part) for part in parts]
        means = torch.split(self.means, groups)
        products = torch.split(self.products, groups)
        places = 0
        for index, part in enumerate(parts):
            rows = self.sampler.rows(part)
            places = rows.shape[2]
            self._merge_(means[index], products[index], rows)
        self.places += places

    def _merge_(self, means: Tensor, products: Tensor, rows: Tensor) -> None:
        """Merge some groups' rows (groups, R * S + Q, P), which are changed, into their sums."""
        total = self.places + rows.shape[2]
        rows_mean = rows.mean(2, dtype=torch.float64)
        rows -= rows_mean.unsqueeze(2)
        if self.groups > 1:
            products += rows @ rows.mT
        else:
            for first in range(0, rows.shape[1], ROWS_AT_ONCE):
                last = first + ROWS_AT_ONCE
                products[:, first:last, :last] += rows[:, first:last] @ rows[:, :last].mT
        step = rows_mean - means
        factor = self.places * rows.shape[2] / total
        products.baddbmm_(step.unsqueeze(2), step.unsqueeze(1), alpha=factor)
        means.add_(step, alpha=rows.shape[2] / total)

    @property
    def too_few_places(self) -> bool:
        """Whether too few places are sampled to solve for: the layer keeps its fit and its bias."""
        return self.places < self.settings.min_places

    def check(self, name: str) -> None:
        """Refuse (DclsConvertError) values that are not finite, by the layer's name."""
        if self.products is not None and not bool(self.products.isfinite().all()):
            raise DclsConvertError(
                f"calibration: {name} sees or gives values that are not finite (NaN or infinite)"
            )

    def statistics(self) -> Statistics:
        """Means and covariances of all that was added; something must have been."""
        assert self.means is not None
        assert self.products is not None
        covariances = (self.products.tril() + self.products.tril(-1).mT).div_(self.places)
        covariance = covariances[:, : self.length, : self.length]
        energy = self._energy(covariance)
        return Statistics(
            mean_patch=self.means[:, : self.length],
            mean_target=self.means[:, self.length :],
            covariance=covariance,
            cross=covariances[:, self.length :, : self.length],
            target_variance=covariances.diagonal(dim1=1, dim2=2)[:, self.length :],
            energy=energy,
            damping=self._damping(energy),
        )

    def _damping(self, energy: Tensor) -> Tensor:
        """a diag(v) of the objective, and the part by which it grows where places are few."""
        assert self.means is not None
        settings = self.settings
        cells = math.prod(self.box.sides)
        # With the means: few places may not vary at all, and other images will.
        squared_means = self.means[:, : self.length].square().reshape(self.groups, -1, cells)
        mean_square = energy + squared_means.mean(-1).repeat_interleave(cells, dim=1)
        share = (settings.places_of_old_kernel * self.length / self.places) ** 2
        return settings.damping * energy + share * mean_square

    def _energy(self, covariance: Tensor) -> Tensor:
        cells = math.prod(self.box.sides)
        variances = covariance.diagonal(dim1=1, dim2=2)  # (G, R * S)
        energy = variances.reshape(self.groups, -1, cells).mean(-1)  # (G, R)
        least = energy.mean() * self.settings.min_energy + 1e-12
        return energy.maximum(least).repeat_interleave(cells, dim=1)


def shared_roots(moments: Sequence[SecondMoments]) -> Tensor | None:
    """What an error of a kernel does to the outputs, for `fit_elements`: roots (in_channels, S, S).

    An error e of a line costs |e @ root|^2: root @ root.mT is the mean of the layers' damped
    covariances for the line's input channel, each layer's scaled to a mean variance of 1. Roots for
    each layer alone would cost as many fits, and kept outputs no closer.

    Args:
        moments: Of the layers of a tie group, each line by itself (not joint).

    Returns:
        None if every layer saw too few places.
    """
    scaled = []
    for alone in moments:
        if alone.places == 0 or alone.too_few_places:
            continue
        statistics = alone.statistics()
        covariance = statistics.covariance
        covariance.diagonal(dim1=1, dim2=2).add_(statistics.damping)
        by_channel = covariance.reshape(alone.layer.in_channels, -1, *covariance.shape[1:])
        matrix = by_channel.mean(1)
        scaled.append(matrix / matrix.diagonal(dim1=1, dim2=2).mean())
    if not scaled:
        return None
    values, vectors = torch.linalg.eigh(torch.stack(scaled).mean(0))
    return torch.mul(vectors, values.clamp(min=0).sqrt().unsqueeze(-2)).float()
