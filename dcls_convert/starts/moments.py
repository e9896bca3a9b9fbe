"""Statistics of the patches that a convolution sees in images, and the costs of kernel errors.

At each place of its output, a convolution sees a patch x of its input: the cells under its kernel,
cropped to the box in which the kernel is fitted. For example, with a kernel of three cells:

    padded input    0   3   1   4   1   0
    first patch     0   3   1
    second patch        3   1   4
    last patch                  4   1   0

An error e of the kernel changes the output by e'x, in the mean square by e'E[xx']e.

At neighbouring places, changes of the output have similar effects on the network's own outputs:
changes of one sign add up, and changes of alternating signs cancel each other. For separate lines,
the mean change over neighbouring places therefore costs as well: e'E[ss']e, where s is the mean of
the patches at these places.

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
SAMPLES_PER_IMAGE = 64
# Patches are copied in parts of this size: allocating more takes as long as filling it.
PATCH_FLOATS_AT_ONCE = 1 << 20

# Factors of `InputMoments.costs`, chosen by benchmarks/pretrained.py.
KERNEL_PRIOR = 1e-2  # a
NEIGHBOURS = 2.0  # b
SHARED_CORRELATION = 0.2  # c
# Lower bound on the mean square of a line's input, as a share of the mean over all lines.
MIN_SQUARE_SHARE = 1e-3
MIN_SQUARE = 1e-12  # if there is no input at all


class PatchSums:
    """Sums of patches, and of their products, for each line group.

    Patches are taken relative to the mean of the first batch: otherwise, small variances would
    vanish beside large means. Products are summed within a batch in the dtype of the images, in
    float32 at least, and over batches in float64.
    """

    def __init__(self, patch_length: int) -> None:
        self.patch_length = patch_length  # R * S
        self.count = 0  # of patches
        self._origin = torch.empty(0)  # (G, R * S): the mean of the first batch
        self._sum = torch.empty(0)  # (G, R * S): of patches, from the origin
        self._products = torch.empty(0)  # (G, R * S, R * S): of patches, from the origin

    def add(self, patches: Tensor, sample_axes: int) -> None:
        """Add patches (G, *patch, *samples); `sample_axes` is the number of axes of samples."""
        samples = patches[0].numel() // self.patch_length
        if not samples:  # the batch is empty
            return
        groups_at_once = max(1, PATCH_FLOATS_AT_ONCE // (samples * self.patch_length))
        dtype = torch.promote_types(patches.dtype, torch.float32)
        if not self.count:
            axes = tuple(range(-sample_axes, 0))
            self._origin = patches.mean(axes, dtype=dtype).flatten(1)
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
        self.count += samples

    @property
    def _mean_from_origin(self) -> Tensor:
        return self._sum / self.count

    @property
    def mean(self) -> Tensor:
        """The mean patch: (G, R * S)."""
        return self._origin + self._mean_from_origin

    @property
    def is_finite(self) -> bool:
        """True if no patch has NaN or infinite values."""
        return bool(self._products.isfinite().all())

    def products(self) -> Tensor:
        """Return E[xx'] over the patches x: (G, R * S, R * S)."""
        origin = self._origin.double()
        # With x = o + y, where o is the origin: E[xx'] = E[yy'] + o E[x]' + E[y] o'.
        products = self._products / self.count
        products.baddbmm_(origin.unsqueeze(2), self.mean.unsqueeze(1))
        return products.baddbmm_(self._mean_from_origin.unsqueeze(2), origin.unsqueeze(1))

    def covariance(self) -> Tensor:
        """Return the covariance of the patches: (G, R * S, R * S)."""
        mean = self._mean_from_origin
        return self._products / self.count - mean.unsqueeze(2) * mean.unsqueeze(1)


class InputMoments:
    """Moments of a layer's inputs: see `JointMoments` and `LineMoments`."""

    def __init__(self, layer: DclsConvNd, box: Box, line_groups: int) -> None:
        self.layer = layer
        self.box = box
        self.line_groups = line_groups  # G
        lines = _lines_of_outputs(layer)
        self.patch_length = lines * math.prod(box.lengths) // line_groups  # R * S
        self._patches = PatchSums(self.patch_length)

    @property
    def sample_count(self) -> int:
        """The number of patches; 0 if the layer was not called."""
        return self._patches.count

    def add(self, input: Tensor) -> None:
        """Add the layer's input for a batch: (N, channels, *spatial), or of one image."""
        if input.dim() < self.layer.dims + 2:
            input = input.unsqueeze(0)
        self._add_padded(self.layer.pad_input(input.detach()))

    def _add_padded(self, images: Tensor) -> None:
        """Add padded images (N, channels, *padded map)."""
        self._patches.add(self._sampled_patches(images), 1 + self.layer.dims)

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
        if self.line_groups == layer.groups:  # joint, or one input channel for each output
            return torch.unflatten(patches, 0, (layer.groups, -1))
        return patches.flatten(0, len(layer.dense_axes))

    def costs(self) -> Tensor:
        """Return the matrices M (G, R * S, R * S): an error e of a kernel costs e'Me.

            M = E[xx'] + a diag(u)

        u: mean square of each line's input, over its cells. Where images do not show what matters
            in a kernel, the term a diag(u) keeps the kernel close to the old one.
        """
        costs = self._patches.products()
        costs.diagonal(dim1=1, dim2=2).add_(KERNEL_PRIOR * self._mean_squares(costs))
        return costs

    def _mean_squares(self, products: Tensor) -> Tensor:
        """Return the mean of the diagonal over each line's cells, for each of them: (G, R * S).

        It is at least a small share of the mean over all lines.
        """
        cells = math.prod(self.box.lengths)
        squares = products.diagonal(dim1=1, dim2=2)
        squares = squares.reshape(self.line_groups, -1, cells).mean(-1)  # (G, R)
        least = MIN_SQUARE_SHARE * squares.mean() + MIN_SQUARE
        return squares.maximum(least).repeat_interleave(cells, dim=1)

    def output_error(self, old: Tensor, new: Tensor, bias: Tensor | float) -> float:
        """Return |new - old| / |old| of the outputs over the patches; 0 if the old ones are 0.

        Args:
            old, new: Kernel lines (N, S).
            bias: (O,), or 0.
        """
        products = self._patches.products()
        old_kernels = old.reshape(self.line_groups, -1, self.patch_length)
        changes = (new - old).reshape(old_kernels.shape)
        means = (old_kernels @ self._patches.mean.unsqueeze(2)).flatten()
        old_squares = (old_kernels @ products * old_kernels).sum()
        old_squares += (2 * means * bias + bias**2).sum()
        if old_squares <= 0:
            return 0.0
        change_squares = (changes @ products * changes).sum().clamp(min=0)
        return float((change_squares / old_squares).sqrt())

    def _is_finite(self) -> bool:
        return self._patches.is_finite

    def check(self, name: str) -> None:
        """Raise DclsConvertError, with the layer's name, if inputs are not finite."""
        if not self._is_finite():
            raise DclsConvertError(
                f"calibration: {name} has inputs that are not finite (NaN or infinite)"
            )


class JointMoments(InputMoments):
    """All lines that an output channel sums are one line group."""

    def __init__(self, layer: DclsConvNd, box: Box) -> None:
        super().__init__(layer, box, layer.groups)


class LineMoments(InputMoments):
    """Each line is a line group of its own.

    There are also sums of patches that are averaged over neighbouring places. For joint lines,
    these would double the memory.
    """

    def __init__(self, layer: DclsConvNd, box: Box) -> None:
        super().__init__(layer, box, _lines_of_outputs(layer))
        self._averaged = PatchSums(self.patch_length)

    def _is_finite(self) -> bool:
        return super()._is_finite() and self._averaged.is_finite

    def _add_padded(self, images: Tensor) -> None:
        super()._add_padded(images)
        averaged = self._sampled_patches(self._mean_of_neighbours(images))
        self._averaged.add(averaged, 1 + self.layer.dims)

    def _mean_of_neighbours(self, images: Tensor) -> Tensor:
        """Average padded images (N, channels, *padded map) over three places along each axis.

        At an end of an axis, there are two places; on a short axis, there is one.
        """
        mean = images.to(torch.promote_types(images.dtype, torch.float32))
        for axis, to_next_place in enumerate(self.layer.stride, start=2):
            length = mean.shape[axis]
            first = min(to_next_place, length)  # the first cell that has a place before it
            rest = length - first
            sums = mean.clone()
            sums.narrow(axis, 0, rest).add_(mean.narrow(axis, first, rest))
            sums.narrow(axis, first, rest).add_(mean.narrow(axis, 0, rest))
            places = torch.ones(length, dtype=mean.dtype, device=mean.device)
            places[:rest] += 1
            places[first:] += 1
            mean = sums.div_(places.reshape(-1, *[1] * (mean.dim() - 1 - axis)))
        return mean

    def costs(self) -> Tensor:
        """Return the matrices M (G, S, S): an error e of a kernel costs e'Me.

            M = V + u (a I + c C)
            V = E[xx'] + b E[ss']
            C = the mean of (Cov[x] + b Cov[s]) / u over all lines

        x: the patches.
        s: their means over neighbouring places.
        u: the mean of V's diagonal over the line's cells, as in `InputMoments.costs`.

        C is there because correlations that all channels share carry over to other images.
        """
        costs = self._patches.products() + NEIGHBOURS * self._averaged.products()
        u = self._mean_squares(costs)  # (G, S)
        costs.diagonal(dim1=1, dim2=2).add_(KERNEL_PRIOR * u)
        covariance = self._patches.covariance() + NEIGHBOURS * self._averaged.covariance()
        shared = (covariance / u.unsqueeze(2)).mean(0)  # (S, S)
        return costs + SHARED_CORRELATION * shared * u.unsqueeze(2)


def _lines_of_outputs(layer: DclsConvNd) -> int:
    """Return how many lines there are for one output channel of each group, all groups together."""
    dense_sides = [layer.dilated_kernel_size[axis] for axis in layer.dense_axes]
    return layer.in_channels * math.prod(dense_sides)
