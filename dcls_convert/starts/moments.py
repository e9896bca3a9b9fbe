"""What a convolution sees in images, and what an error of its kernel costs there.

At each place of its output, a convolution sees a patch x of its input: what its kernel covers,
cropped to the box in which the kernel is fitted. An error e of the kernel changes the output by
e'x, in the mean square by e'E[xx']e.

A line group is a set of kernel lines whose inputs share one covariance matrix. If the lines are
joint, a line group has all lines that one output channel sums: one for each input channel of the
convolution's group and each cell of the dense axes. Otherwise, each of these lines is a line group
of its own.

Axes: N images, G line groups, R lines of a line group, S cells of the box.
"""

import math

import torch
from torch import Tensor

from ..errors import DclsConvertError
from ..layers.dcls_conv import DclsConvNd
from .boxes import Box

# Approximate number of places of an image that are sampled. Neighbouring places are alike, so 64 to
# 256 give the same weights.
SAMPLES_PER_IMAGE = 128
# Patches are copied in parts of this size: allocating more takes as long as filling it.
PATCH_FLOATS_AT_ONCE = 1 << 20

# Factors of `InputMoments.costs`, chosen by benchmarks/pretrained.py.
KERNEL_PRIOR = 1e-2  # a
SHARED_CORRELATION = 0.2  # c
# Lower bound on the mean square of a line's input, as a share of that of all lines.
MIN_SQUARE_SHARE = 1e-3
MIN_SQUARE = 1e-12  # if there is no input at all


class InputMoments:
    """Sums of the patches of a layer's inputs, and of their products.

    Products are summed within a batch in the dtype of the images, in float32 at least, and over
    batches in float64, from the mean of the first batch: otherwise, small variances would vanish
    beside large means.
    """

    def __init__(self, layer: DclsConvNd, box: Box, *, joint: bool) -> None:
        self.layer = layer
        self.box = box
        dense_sides = [layer.dilated_kernel_size[axis] for axis in layer.dense_axes]
        lines = layer.in_channels * math.prod(dense_sides)
        self.line_groups = layer.groups if joint else lines
        self.patch_length = lines * math.prod(box.lengths) // self.line_groups  # R * S
        self.sample_count = 0
        self._origin: Tensor | None = None  # (G, R * S): the mean of the first batch
        self._sum = torch.empty(0)  # (G, R * S): of patches, from the origin
        self._products = torch.empty(0)  # (G, R * S, R * S): of patches, from the origin

    def add(self, input: Tensor) -> None:
        """Add the layer's input for a batch: (N, channels, *spatial), or of one image."""
        if input.dim() < self.layer.dims + 2:
            input = input.unsqueeze(0)
        patches = self._sampled_patches(self.layer.pad_input(input.detach()))
        samples = patches[0].numel() // self.patch_length
        groups_at_once = max(1, PATCH_FLOATS_AT_ONCE // (samples * self.patch_length))
        dtype = torch.promote_types(patches.dtype, torch.float32)
        if self._origin is None:
            sample_axes = tuple(range(-1 - self.layer.dims, 0))
            self._origin = patches.mean(sample_axes, dtype=dtype).flatten(1)
            self._sum = torch.zeros_like(self._origin, dtype=torch.float64)
            self._products = self._sum.new_zeros(*self._sum.shape, self.patch_length)
        first = 0
        for part in torch.split(patches, groups_at_once):
            groups = slice(first, first + len(part))
            copied = part.reshape(len(part), self.patch_length, samples).to(dtype)
            centred = copied - self._origin[groups].unsqueeze(2)
            self._sum[groups] += centred.sum(2)
            self._products[groups] += centred @ centred.mT
            first += len(part)
        self.sample_count += samples

    def _sampled_patches(self, images: Tensor) -> Tensor:
        """Return a view of patches of padded images: (G, [lines of a group,] *patch, N, *places).

        The places are every n-th along each axis.
        """
        layer = self.layer
        dims = layer.dims
        window = layer.dilated_kernel_size
        patches = images  # (N, channels, *padded map)
        for axis in range(dims):  # -> (N, channels, *places, *window)
            patches = patches.unfold(2 + axis, window[axis], layer.stride[axis])
        # -> (N, channels, *places, *patch)
        for axis, first, length in zip(
            self.box.axes, self.box.origin, self.box.lengths, strict=True
        ):
            patches = patches.narrow(2 + dims + axis, first + window[axis] // 2, length)
        places = math.prod(patches.shape[2 : 2 + dims])
        nth = max(1, round((places / SAMPLES_PER_IMAGE) ** (1 / dims)))
        for axis in range(2, 2 + dims):  # keep every n-th place
            length = patches.shape[axis]
            first = min(nth // 2, length - 1)
            patches = patches[(slice(None),) * axis + (slice(first, None, nth),)]
        patch_axes = [2 + dims + axis for axis in (*layer.dense_axes, *self.box.axes)]
        # -> (channels, *dense lengths, *box lengths, N, *places)
        patches = patches.permute(1, *patch_axes, 0, *range(2, 2 + dims))
        if self.line_groups == layer.groups:
            return torch.unflatten(patches, 0, (layer.groups, -1))
        return patches.flatten(0, len(layer.dense_axes))

    @property
    def _mean_from_origin(self) -> Tensor:
        return self._sum / self.sample_count

    @property
    def mean(self) -> Tensor:
        """The mean patch: (G, R * S)."""
        assert self._origin is not None
        return self._origin + self._mean_from_origin

    def products(self) -> Tensor:
        """Return E[xx'] over the patches x: (G, R * S, R * S)."""
        assert self._origin is not None
        origin = self._origin.double()
        # With x = o + y, where o is the origin: E[xx'] = E[yy'] + o E[x]' + E[y] o'.
        products = self._products / self.sample_count
        products.baddbmm_(origin.unsqueeze(2), self.mean.unsqueeze(1))
        return products.baddbmm_(self._mean_from_origin.unsqueeze(2), origin.unsqueeze(1))

    def covariance(self) -> Tensor:
        """Return the covariance of the patches: (G, R * S, R * S)."""
        mean = self._mean_from_origin
        covariance = self._products / self.sample_count  # E[yy'], less E[y] E[y]'
        return covariance.baddbmm_(mean.unsqueeze(2), mean.unsqueeze(1), alpha=-1)

    def costs(self) -> Tensor:
        """Return the matrices M (G, R * S, R * S): an error e of a kernel costs e'Me.

            M = E[xx'] + a diag(u) + c C

        u: mean square of each line's input, over its cells. Where images do not show what matters
            in a kernel, this term keeps it close to the old one.
        C: if each line is a group of its own: the mean over the groups of Cov(x) / u, times the
            group's own u. Correlations that all channels share carry over to other images.
        """
        costs = self.products()
        cells = math.prod(self.box.lengths)
        diagonal = costs.diagonal(dim1=1, dim2=2)
        squares = diagonal.reshape(self.line_groups, -1, cells).mean(-1)  # (G, R)
        least = MIN_SQUARE_SHARE * squares.mean() + MIN_SQUARE
        u = squares.maximum(least).repeat_interleave(cells, dim=1)  # (G, R * S)
        diagonal.add_(KERNEL_PRIOR * u)
        if self.patch_length == cells:  # each line is a group of its own
            shared = (self.covariance() / u.unsqueeze(2)).mean(0)  # (S, S)
            costs += SHARED_CORRELATION * shared * u.unsqueeze(2)
        return costs

    def output_error(self, old: Tensor, new: Tensor, bias: Tensor | float) -> float:
        """Return |new - old| / |old| of the outputs over the patches; 0 if the old ones are 0.

        Args:
            old, new: Kernel lines (N, S).
            bias: (O,), or 0.
        """
        products = self.products()
        old_kernels = old.reshape(self.line_groups, -1, self.patch_length)
        changes = (new - old).reshape(old_kernels.shape)
        means = (old_kernels @ self.mean.unsqueeze(2)).flatten()
        old_squares = (old_kernels @ products * old_kernels).sum()
        old_squares += (2 * means * bias + bias**2).sum()
        if old_squares <= 0:
            return 0.0
        change_squares = (changes @ products * changes).sum().clamp(min=0)
        return float((change_squares / old_squares).sqrt())

    def check(self, name: str) -> None:
        """Raise DclsConvertError, with the layer's name, if inputs are not finite."""
        if not bool(self._products.isfinite().all()):
            raise DclsConvertError(
                f"calibration: {name} has inputs that are not finite (NaN or infinite)"
            )
