"""What a layer sees in images, and the weights that give wanted outputs there, in closed form.

At each place, the layer sees a patch x of its input and gives k @ x + bias. Over many places, the mean square of
k @ x - y depends on the kernel k through the means and covariances of x and y alone.

Axes: G groups, Q output channels of a group, R lines that an output channel sums (input channels of the group x cells
of the dense axes), S cells of the box in which a line is fitted, P places, E elements. There are N = G * Q * R lines.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DclsConvertError
from ..layers.dcls_conv import DclsConvNd
from ..networks.running import in_parallel
from .boxes import Box

DAMPING = 1e-2  # share of an input's energy; keeps a kernel close to the old one where the images have no energy
# Of depthwise layers, for the same reason; other images have other means and covariances than the few that calibrate.
MEAN_PATCH = 100.0  # times the square of what a kernel makes of the mean patch, whose size differs from image to image
ALIKE = 0.2  # share of what all channels of the layer see in the mean
LEAST_ENERGY = 1e-3  # share of the mean energy of all inputs that each of them counts with at least
RIDGE = 1e-4  # share of the energy of an element in the middle of a cell; bounds elements that nearly coincide
MOST_STEPS, LEAST_RESIDUAL = 5, 1e-4  # of conjugate gradients; more steps fit the noise of few images
FLOATS_AT_ONCE = 1 << 20  # of patches; larger tensors would cost as much to get from the system as to fill
LEAST_PARTS = 16  # of a layer's groups, for as many processors
ROWS_AT_ONCE = 256  # of the product of one large matrix

PLACES = 128  # of an image, about; neighbours say much the same
SHIFT = 7  # places by which the first one along a further axis moves more from image to image

# What some groups see: of each image a view of its patches, with the axes (*groups, *patch, *output), and of the
# outputs that are wanted there, (groups, Q, *output).
Part = tuple[list[Tensor], list[Tensor]]


class Moments:
    """Means and covariances of a layer's patches, and of the outputs that are wanted there.

    The lines that one output channel sums are seen together (joint), as G groups; else each line is a group of its own.
    Products are summed as the images are, in float32 at least, and the sums of batches in float64.
    """

    def __init__(self, layer: DclsConvNd, box: Box, *, joint: bool) -> None:
        self.layer, self.box, self.joint = layer, box, joint
        lines = layer.in_channels * math.prod(layer.kernel_size[axis] for axis in layer.dense_axes)
        self.groups, self.axes = (layer.groups, 1) if joint else (lines, 1 + len(layer.dense_axes))  # of their views
        self.length = lines * math.prod(box.sides) // self.groups  # R * S
        self.images = 0
        # Of z z', where z is a patch, its wanted outputs, and 1: (G, R * S + Q + 1, same); of one group its lower half.
        self.sums: Tensor | None = None

    def add(self, input: Tensor, wanted: Tensor | None = None) -> None:
        """Add what the layer sees in a batch, (N, in_channels, *spatial), and the outputs that are wanted there."""
        if input.dim() < self.layer.dims + 2:  # one image without the axis of a batch
            input, wanted = input.unsqueeze(0), None if wanted is None else wanted.unsqueeze(0)
        parts = self.parts(self.layer.padded(input.detach()), None if wanted is None else wanted.detach())
        if self.sums is None:
            side = self.length + (0 if wanted is None else wanted.shape[1] // self.groups) + 1
            self.sums = torch.zeros(self.groups, side, side, dtype=torch.float64, device=input.device)
        groups = [math.prod(seen[0].shape[: self.axes]) for seen, *_ in parts]
        work = list(zip(torch.split(self.sums, groups), parts, strict=True))
        in_parallel(lambda pair: self._add_products_(*pair), work, input.device)

    def parts(self, images: Tensor, wanted: Tensor | None = None) -> list[Part]:
        """All groups in padded images, some at a time; which ones depends on no number of threads, so no sum does.

        Of each image, some hundred places alone: every n-th along each axis, from another first one in each image.
        """
        layer, dims = self.layer, self.layer.dims
        patches = images
        for axis in range(dims):
            patches = patches.unfold(2 + axis, layer.kernel_size[axis], layer.stride[axis])

        nth = max(1, round((math.prod(patches.shape[2 : 2 + dims]) / PLACES) ** (1 / dims)))
        for axis, first, side in zip(self.box.axes, self.box.origin, self.box.sides, strict=True):
            patches = patches.narrow(2 + dims + axis, first + layer.kernel_size[axis] // 2, side)
        window = [2 + dims + axis for axis in (*layer.dense_axes, *self.box.axes)]
        patches = patches.permute(0, 1, *window, *range(2, 2 + dims))  # (N, in_channels, *dense axes, *box, *output)
        channels = layer.in_channels // layer.groups if self.joint else 1  # of a group
        if self.joint:
            patches = torch.unflatten(patches, 1, (-1, channels))
        if wanted is not None:
            wanted = torch.unflatten(wanted, 1, (self.groups, -1))
        seen, targets = [], []
        for image in range(len(patches)):
            firsts = ((self.images + image) * SHIFT**axis % nth for axis in range(dims))
            some: Any = (..., *(slice(first, None, nth) for first in firsts))
            seen.append(patches[image][some])
            targets += [] if wanted is None else [wanted[image][some]]
        self.images += len(patches)
        most = -(-len(seen[0]) // LEAST_PARTS)
        step = max(1, min(most, FLOATS_AT_ONCE * len(seen[0]) // sum(image.numel() for image in seen)))
        some_groups = [slice(first, first + step) for first in range(0, len(seen[0]), step)]
        return [([image[some] for image in seen], [target[some] for target in targets]) for some in some_groups]

    def rows(self, part: Part) -> Tensor:
        """What the products are of: (groups, R * S + Q + 1, P)."""
        (seen, wanted), dims = part, self.layer.dims
        groups, outputs = math.prod(seen[0].shape[: self.axes]), wanted[0].shape[1] if wanted else 0
        places = [math.prod(image.shape[-dims:]) for image in seen]
        dtype = torch.promote_types(seen[0].dtype, torch.float32)
        rows = seen[0].new_ones(groups, self.length + outputs + 1, sum(places), dtype=dtype)
        for image, target, own in itertools.zip_longest(seen, wanted, torch.split(rows, places, dim=2)):
            own = own.view(*own.shape[:2], *image.shape[-dims:])
            own[:, : self.length].view(image.shape).copy_(image)
            if outputs:
                own[:, self.length : -1].copy_(target)
        return rows

    def _add_products_(self, sums: Tensor, part: Part) -> None:
        rows = self.rows(part)
        if self.groups > 1:
            sums += rows @ rows.mT
            return

        def add(first: int) -> None:
            last = first + ROWS_AT_ONCE
            sums[:, first:last, :last] += rows[:, first:last] @ rows[:, :last].mT

        in_parallel(add, range(0, rows.shape[1], ROWS_AT_ONCE), rows.device)

    def check(self, name: str) -> None:
        """Refuse values that are not finite, by the layer's name."""
        if self.sums is not None and not bool(self.sums.isfinite().all()):
            raise DclsConvertError(f"calibration: {name} sees or gives values that are not finite (NaN or infinite)")

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Means (G, R * S + Q) and covariances of the patches and the wanted outputs behind them."""
        assert self.sums is not None
        sums = self.sums if self.groups > 1 else self.sums.tril() + self.sums.tril(-1).mT
        products = sums / sums[0, -1, -1]  # the number of places
        means = products[:, :-1, -1].clone()
        return means, products[:, :-1, :-1].baddbmm_(means.unsqueeze(2), means.unsqueeze(1), alpha=-1)

    def energy(self, covariance: Tensor) -> Tensor:
        """(G, R * S): the mean variance of each line's input, at least a share of that of all."""
        cells = math.prod(self.box.sides)
        energy = covariance.diagonal(dim1=1, dim2=2)[:, : self.length]  # (G, R * S)
        energy = energy.reshape(self.groups, -1, cells).mean(-1)  # (G, R)
        least = energy.mean() * LEAST_ENERGY + 1e-12
        return energy.maximum(least).repeat_interleave(cells, dim=1)


def shared_roots(moments: Sequence[Moments]) -> Tensor | None:
    """What layers of the same form see, not joint, as roots (in_channels, S, S) for `fit_elements`.

    None where none of them sees anything. The mean over layers, of which each counts alike: roots for each alone would
    cost as many fits, and kept outputs no closer.
    """
    seen = []
    for alone in moments:
        if alone.sums is not None:
            _, covariance = alone.statistics()
            covariance.diagonal(dim1=1, dim2=2).add_(alone.energy(covariance), alpha=DAMPING)
            matrix = covariance.reshape(alone.layer.in_channels, -1, *covariance.shape[1:]).mean(1)
            seen.append(matrix / matrix.diagonal(dim1=1, dim2=2).mean())
    if not seen:
        return None
    values, vectors = torch.linalg.eigh(torch.stack(seen).mean(0))
    return torch.mul(vectors, values.clamp(min=0).sqrt().unsqueeze(-2)).float()


def best_weights(
    moments: Moments, places: Tensor, old: Tensor, start: Tensor, *, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """Weights (N, E) of elements for outputs close to the wanted ones, and means (O,) to add to the outputs.

    Each channel then has the wanted mean. From joint moments with wanted outputs, places (N, E, A) in the box, and
    weights to go on from (N, E), which are only to be kept where they are fixed. Where the images say little, the
    kernel stays close to the old one (N, S).
    """
    places, old, start = places.double(), old.double(), start.double()
    (means, everything), length = moments.statistics(), moments.length
    covariance, cross = everything[:, :length, :length], everything[:, length:, :length]  # (G, Q, R * S)
    patch, energy, footprint = means[:, :length], moments.energy(covariance), moments.box.footprint(places)  # (N, E, S)
    old = old.reshape(cross.shape)
    goal = cross + DAMPING * old * energy.unsqueeze(1)
    if length == footprint.shape[2]:  # one line for each output channel
        prior = ALIKE * (covariance / energy.unsqueeze(2)).mean(0) * energy.unsqueeze(2)
        prior.baddbmm_(patch.unsqueeze(2), patch.unsqueeze(1), alpha=MEAN_PATCH)
        goal += old @ prior
        covariance += prior
    covariance.diagonal(dim1=1, dim2=2).add_(energy, alpha=DAMPING)
    weights = start if fixed else _solved(covariance, footprint, goal, start)
    kernel = (weights.unsqueeze(1) @ footprint).reshape(cross.shape)
    return weights, (means[:, length:] - (kernel @ patch.unsqueeze(2)).squeeze(2)).flatten()


def _solved(matrix: Tensor, footprint: Tensor, goal: Tensor, start: Tensor) -> Tensor:
    """Weights (N, E) whose kernels k have the least k @ matrix @ k - 2 k @ goal, by conjugate gradients.

    Each line is solved for exactly where the others stand, as a preconditioner; where an output channel sums one line,
    the first step is the solution. Of elements that nearly coincide, only the sum counts; else they stay as they start.
    """
    groups, length, _ = matrix.shape
    lines, _, cells = footprint.shape
    inputs = length // cells  # R
    blocks = matrix.reshape(groups, inputs, cells, inputs, cells).diagonal(dim1=1, dim2=3)  # (G, S, S, R)
    blocks = blocks.movedim(-1, 1).unsqueeze(1)  # (G, 1, R, S, S)
    by_channel = footprint.reshape(groups, -1, inputs, *footprint.shape[1:])
    normal = (by_channel @ blocks @ by_channel.mT).flatten(0, 2)  # (N, E, E)
    ridge = RIDGE * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)  # (N, 1)
    factor = torch.linalg.cholesky(normal + torch.diag_embed(ridge.expand(start.shape) + 1e-30))

    multiplier = matrix.float() if inputs > 1 else matrix  # most of the time goes here; steps need no more digits

    def applied(weights: Tensor) -> Tensor:
        kernel = (weights.unsqueeze(1) @ footprint).reshape(groups, -1, length)
        pulled = (kernel.to(multiplier) @ multiplier).to(kernel)
        return (footprint @ pulled.reshape(lines, cells, 1)).squeeze(2) + ridge * weights

    def dot(one: Tensor, other: Tensor) -> Tensor:
        """Of each output channel, for each of its lines: (N, 1)."""
        products = (one * other).reshape(-1, inputs * one.shape[1]).sum(1)
        return products.repeat_interleave(inputs).unsqueeze(1)

    weights = start
    residual = (footprint @ goal.reshape(lines, cells, 1)).squeeze(2) + ridge * start - applied(start)
    direction, before = torch.zeros_like(residual), torch.ones_like(ridge)
    first = None
    for step in range(MOST_STEPS if inputs > 1 else 2):
        better = torch.cholesky_solve(residual.unsqueeze(2), factor).squeeze(2)
        now = dot(residual, better)
        first = now if first is None else first
        if bool((now <= first * LEAST_RESIDUAL**2).all()):
            break
        direction = better + (now / before if step else 0.0) * direction
        along = applied(direction)
        curvature = dot(direction, along)
        size = torch.where(curvature > 0, now / curvature, 0.0)
        weights, residual, before = weights + size * direction, residual - size * along, now.clamp(min=1e-300)
    return weights
