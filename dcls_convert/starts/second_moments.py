"""Means and covariances of the patches that a layer sees, and of its target outputs.

At each place, the layer sees a patch x of its input and gives k'x + bias. Over many places, the
mean square of k'x - y depends on the kernel k through the means and covariances of x and y alone.

Samples, line groups and axes are those of `sampling.py`: G line groups, R lines of a line group, S
cells of the box in which a line is fitted, Q output channels of a group of the convolution, P
samples.
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

MIN_VARIANCE = 1e-12  # least variance of an input that never varies; divisors stay above zero


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Covariances:
    """Means and covariances of patches x and target outputs y, over all samples.

    In `input_variance` and `prior_precision`, all entries of a line are equal.
    """

    mean_patch: Tensor  # (G, R * S)
    mean_target: Tensor  # (G, Q)
    covariance: Tensor  # (G, R * S, R * S): of x
    cross: Tensor  # (G, Q, R * S): covariance of y and x
    target_variance: Tensor  # (G, Q)
    # (G, R * S): v of the objective in `solve_layer.py`, the mean variance of each line's input; at
    # least a share of the mean over all lines.
    input_variance: Tensor
    prior_precision: Tensor  # (G, R * S): p of the objective


class SecondMoments:
    """Accumulates means and products of the patches of a layer, and of its target outputs.

    If `joint`, the lines that one output channel sums are one line group; otherwise each line is a
    line group of its own. Products are summed within a batch in the dtype of the images, in float32
    at least, and over batches in float64.

    Each batch is centred before its products are taken, and merged with a correction for the
    difference of the means (Chan et al. 1979). Uncentred products would cancel, and small variances
    could become negative.
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
        self.line_groups = self.sampler.line_groups
        self.patch_length = self.sampler.patch_length  # R * S
        self.image_count = 0
        self.sample_count = 0  # in all images and calls
        # Let z be [patch (R * S), target outputs (Q)] of a sample, for each line group.
        self.means: Tensor | None = None  # (G, R * S + Q): the mean of z
        # Sum of (z - mean)(z - mean)': (G, R * S + Q, R * S + Q). Only the lower triangle is valid.
        self.products: Tensor | None = None

    def add(self, input: Tensor, targets: Tensor | None = None) -> None:
        """Add the layer's input for a batch, and its target outputs.

        Both have the axes (N, channels, *spatial), or no first axis if they are of a single image.
        """
        if input.dim() < self.layer.dims + 2:
            input = input.unsqueeze(0)
            if targets is not None:
                targets = targets.unsqueeze(0)
        if targets is not None:
            targets = targets.detach()
        padded = self.layer.pad_input(input.detach())
        parts = self.sampler.sample(padded, targets, first_image=self.image_count)
        self.image_count += len(input)
        if self.means is None or self.products is None:
            side = self.patch_length
            if targets is not None:
                side += targets.shape[1] // self.line_groups
            self.means = padded.new_zeros(self.line_groups, side, dtype=torch.float64)
            self.products = padded.new_zeros(self.line_groups, side, side, dtype=torch.float64)
        line_groups = [part.line_groups for part in parts]
        means = torch.split(self.means, line_groups)
        products = torch.split(self.products, line_groups)
        for index, part in enumerate(parts):
            self._merge_(means[index], products[index], self.sampler.rows(part))
        self.sample_count += parts[0].sample_count  # the same in all parts

    def _merge_(self, means: Tensor, products: Tensor, rows: Tensor) -> None:
        """Merge rows (line groups, R * S + Q, P) into the means and products of their line groups.

        The rows are overwritten.
        """
        new_samples = rows.shape[2]
        total = self.sample_count + new_samples
        rows_mean = rows.mean(2, dtype=torch.float64)
        rows -= rows_mean.unsqueeze(2)
        if self.line_groups > 1:
            products += rows @ rows.mT
        else:
            # The lower triangle only, some rows at a time.
            for first in range(0, rows.shape[1], ROWS_AT_ONCE):
                last = first + ROWS_AT_ONCE
                products[:, first:last, :last] += rows[:, first:last] @ rows[:, :last].mT
        step = rows_mean - means
        factor = self.sample_count * new_samples / total
        products.baddbmm_(step.unsqueeze(2), step.unsqueeze(1), alpha=factor)
        means.add_(step, alpha=new_samples / total)

    @property
    def has_too_few_samples(self) -> bool:
        """True if there are too few samples to solve with: the layer keeps its fit and its bias."""
        return self.sample_count < self.settings.min_samples

    @property
    def has_one_line_per_output(self) -> bool:
        """True if each output channel has a single kernel line; only meaningful if `joint`."""
        return self.patch_length == math.prod(self.box.sides)

    def check(self, name: str) -> None:
        """Raise DclsConvertError, with the layer's name, if values are not finite."""
        if self.products is not None and not bool(self.products.isfinite().all()):
            raise DclsConvertError(
                f"calibration: {name} has inputs or outputs that are not finite (NaN or infinite)"
            )

    def covariances(self) -> Covariances:
        """Return the means and covariances over all batches; at least one must have been added."""
        assert self.means is not None
        assert self.products is not None
        all_covariances = (self.products.tril() + self.products.tril(-1).mT).div_(self.sample_count)
        covariance = all_covariances[:, : self.patch_length, : self.patch_length]
        input_variance = self._input_variance(covariance)
        return Covariances(
            mean_patch=self.means[:, : self.patch_length],
            mean_target=self.means[:, self.patch_length :],
            covariance=covariance,
            cross=all_covariances[:, self.patch_length :, : self.patch_length],
            target_variance=all_covariances.diagonal(dim1=1, dim2=2)[:, self.patch_length :],
            input_variance=input_variance,
            prior_precision=self._prior_precision(input_variance),
        )

    def _prior_precision(self, input_variance: Tensor) -> Tensor:
        """Return p = a v + s (v + u), in the letters of the objective in `solve_layer.py`."""
        assert self.means is not None
        settings = self.settings
        cells = math.prod(self.box.sides)
        # Means are included, since few samples may not vary at all, while other images will.
        squared_means = (
            self.means[:, : self.patch_length].square().reshape(self.line_groups, -1, cells)
        )
        mean_square = input_variance + squared_means.mean(-1).repeat_interleave(cells, dim=1)
        share = (settings.samples_of_old_kernel * self.patch_length / self.sample_count) ** 2
        return settings.kernel_prior * input_variance + share * mean_square

    def _input_variance(self, covariance: Tensor) -> Tensor:
        cells = math.prod(self.box.sides)
        variances = covariance.diagonal(dim1=1, dim2=2)  # (G, R * S)
        line_variances = variances.reshape(self.line_groups, -1, cells).mean(-1)  # (G, R)
        min_variance = line_variances.mean() * self.settings.min_input_variance + MIN_VARIANCE
        return line_variances.maximum(min_variance).repeat_interleave(cells, dim=1)


def shared_covariance_roots(moments: Sequence[SecondMoments]) -> Tensor | None:
    """Return the square root of the covariance that weights kernel errors: (in_channels, S, S).

    An error e of a line costs |e @ root|^2, which is about its effect on the outputs; this is what
    `fit_elements` minimises. root @ root.mT is the mean, over the layers, of the covariance plus
    prior precision for the line's input channel; each layer's is scaled to a mean variance of 1.
    Separate roots for each layer would cost as much as a fit for each layer, and kept outputs no
    closer.

    Args:
        moments: One for each layer of a tie group, with lines that are not joint.

    Returns:
        None if every layer saw too few samples.
    """
    scaled = []
    for layer_moments in moments:
        if layer_moments.sample_count == 0 or layer_moments.has_too_few_samples:
            continue
        covariances = layer_moments.covariances()
        channels = (layer_moments.layer.in_channels, -1)  # each with its lines
        matrix = torch.unflatten(covariances.covariance, 0, channels).mean(1)
        prior_precision = torch.unflatten(covariances.prior_precision, 0, channels).mean(1)
        matrix = matrix + torch.diag_embed(prior_precision)
        scaled.append(matrix / matrix.diagonal(dim1=1, dim2=2).mean())
    if not scaled:
        return None
    values, vectors = torch.linalg.eigh(torch.stack(scaled).mean(0))
    root_values = values.clamp(min=0).sqrt()  # (in_channels, S)
    return torch.mul(vectors, root_values.unsqueeze(-2)).float()
