"""What a layer sees in images, and the weights that give wanted outputs there, in closed form.

At each place, the layer sees a patch x of its input and gives k @ x + bias. Over many places, the mean square of
k @ x - y depends on the kernel k through the means and covariances of x and y alone.

Axes: G groups, Q output channels of a group, R lines that an output channel sums (input channels of the group x cells
of the dense axes), S cells of the box in which a line is fitted, P places, E elements. There are N = G * Q * R lines.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DclsConvertError
from ..layers.dcls_conv import DclsConvNd
from ..networks.running import in_parallel
from .boxes import Box

DAMPING = 1e-2  # share of an input's energy; keeps a kernel close to the old one where the images have no energy
LEAST_ENERGY = 1e-3  # share of the mean energy of all inputs that each of them counts with at least
RIDGE = 1e-4  # share of the energy of an element in the middle of a cell; bounds elements that nearly coincide
MOST_SCALE = 10.0  # of a channel; beyond, the images say too little about it
MOST_STEPS, LEAST_RESIDUAL = 30, 1e-4  # of conjugate gradients
FLOATS_AT_ONCE = 1 << 20  # of patches; larger tensors would cost as much to get from the system as to fill
LEAST_PARTS = 16  # of a layer's groups, for as many processors
ROWS_AT_ONCE = 256  # of the product of one large matrix

# What some groups see of an image: a view of its patches, their shape (G, R * S, P) with -1 for G, and the wanted
# outputs (G * Q, P).
Part = tuple[Tensor, tuple[int, int, int], Tensor | None]


class Moments:
    """Means and covariances of a layer's patches, and of the outputs that are wanted there; in float64.

    The lines that one output channel sums are seen together (joint), as G groups; else each line is a group of its own.
    """

    def __init__(self, layer: DclsConvNd, box: Box, *, joint: bool) -> None:
        self.layer, self.box = layer, box
        self.rows = layer.in_channels * math.prod(layer.kernel_size[axis] for axis in layer.dense_axes)
        self.groups = layer.groups if joint else self.rows
        self.places = 0
        self.sums: list[Tensor] = []  # of x (G, R * S), x x', and with wanted outputs y (G, Q), x y' and y^2

    def add(self, input: Tensor, wanted: Tensor | None = None) -> None:
        """Add what the layer sees in a batch, (N, in_channels, *spatial), and the outputs that are wanted there."""
        if input.dim() < self.layer.dims + 2:  # one image without the axis of a batch
            input, wanted = input.unsqueeze(0), None if wanted is None else wanted.unsqueeze(0)
        for index, image in enumerate(self.layer.padded(input.detach())):
            parts = self.parts(image, None if wanted is None else wanted[index].detach())
            sums = [torch.cat(part) for part in zip(*in_parallel(_sums, parts, image.device), strict=True)]
            self.sums = [old.add_(new) for old, new in zip(self.sums, sums, strict=True)] if self.sums else sums
            self.places += parts[0][1][-1]

    def parts(self, image: Tensor, wanted: Tensor | None = None) -> list[Part]:
        """All groups of a padded image, some at a time; which ones depends on no number of threads, so no sum does."""
        layer, dims = self.layer, self.layer.dims
        patches = image
        for axis in range(dims):
            patches = patches.unfold(1 + axis, layer.kernel_size[axis], layer.stride[axis])
        places = math.prod(patches.shape[1 : 1 + dims])
        for axis, first, side in zip(self.box.axes, self.box.origin, self.box.sides, strict=True):
            patches = patches.narrow(1 + dims + axis, first + layer.kernel_size[axis] // 2, side)
        window = [1 + dims + axis for axis in (*layer.dense_axes, *self.box.axes)]
        patches = patches.permute(0, *window, *range(1, 1 + dims))  # (in_channels, *dense axes, *box, *output)
        channels = max(1, layer.in_channels // self.groups)  # of the smallest part
        most = -(-layer.in_channels // (channels * LEAST_PARTS))
        step = channels * max(1, min(most, FLOATS_AT_ONCE // max(1, channels * patches[0].numel())))
        shape = (-1, self.rows * math.prod(self.box.sides) // self.groups, places)
        parts: list[Part] = []
        for first in range(0, layer.in_channels, step):
            outputs = slice(*(end * layer.out_channels // layer.in_channels for end in (first, first + step)))
            own = None if wanted is None else wanted[outputs].flatten(1)
            parts.append((patches[first : first + step], shape, own))
        return parts

    def check(self, name: str) -> None:
        """Refuse values that are not finite, by the layer's name."""
        if not all(bool(part.isfinite().all()) for part in self.sums):
            raise DclsConvertError(f"calibration: {name} sees or gives values that are not finite (NaN or infinite)")

    def covariance(self) -> Tensor:
        """Of the patches, (G, R * S, R * S)."""
        mean = self.sums[0] / self.places
        return (self.sums[1] / self.places).baddbmm_(mean.unsqueeze(2), mean.unsqueeze(1), alpha=-1)

    def penalty(self, covariance: Tensor) -> Tensor:
        """(G, R * S): what is added to the covariance's diagonal, a share of the energy of each line's input."""
        cells = math.prod(self.box.sides)
        energy = covariance.diagonal(dim1=1, dim2=2).reshape(self.groups, -1, cells).mean(-1)  # (G, R)
        least = energy.mean() * LEAST_ENERGY + 1e-12
        return DAMPING * energy.maximum(least).repeat_interleave(cells, dim=1)


def shared_roots(moments: Sequence[Moments]) -> Tensor | None:
    """What layers of the same form see, not joint, as roots (in_channels, S, S) for `fit_elements`.

    None where none of them sees anything. The mean over layers, of which each counts alike: roots for each alone would
    cost as many fits, and kept outputs no closer.
    """
    seen = []
    for alone in moments:
        if alone.places:
            covariance = alone.covariance()
            covariance.diagonal(dim1=1, dim2=2).add_(alone.penalty(covariance))
            matrix = covariance.reshape(alone.layer.in_channels, -1, *covariance.shape[1:]).mean(1)
            seen.append(matrix / matrix.diagonal(dim1=1, dim2=2).mean())
    if not seen:
        return None
    values, vectors = torch.linalg.eigh(torch.stack(seen).mean(0))
    return torch.mul(vectors, values.clamp(min=0).sqrt().unsqueeze(-2)).float()


def _sums(part: Part) -> list[Tensor]:
    seen, shape, wanted = part
    patches = seen.double().reshape(shape)
    blocks = torch.split(patches, ROWS_AT_ONCE, dim=1) if len(patches) == 1 else [patches]
    squares = in_parallel(lambda rows: rows @ patches.mT, blocks, patches.device)
    sums = [patches.sum(-1), torch.cat(squares, dim=1)]
    if wanted is None:
        return sums
    targets = wanted.double().reshape(len(patches), -1, shape[-1])
    return [*sums, targets.sum(-1), targets @ patches.mT, targets.square().sum(-1)]


def best_weights(
    moments: Moments, places: Tensor, old: Tensor, start: Tensor, *, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """Weights (N, E) of elements for outputs close to the wanted ones, and means (O,) to add to the outputs.

    Each channel then has the wanted variance and mean. From joint moments with wanted outputs, places (N, E, A) in the
    box, and weights to go on from (N, E), which are only to be kept where they are fixed. Where the images have no
    energy, the kernel stays close to the old one (N, S).
    """
    places, old, start = places.double(), old.double(), start.double()
    covariance = moments.covariance()
    groups, length, _ = covariance.shape
    mean_x, mean_y = moments.sums[0] / moments.places, moments.sums[2] / moments.places
    cross = moments.sums[3] / moments.places - mean_y.unsqueeze(2) * mean_x.unsqueeze(1)  # (G, Q, R * S)
    penalty = moments.penalty(covariance)
    footprint = moments.box.footprint(places)  # (N, E, S)
    goal = cross + old.reshape(groups, -1, length) * penalty.unsqueeze(1)
    damped = covariance.diagonal_scatter(covariance.diagonal(dim1=1, dim2=2) + penalty, dim1=1, dim2=2)
    weights = start if fixed else _solved(damped, footprint, goal, start)
    kernel = (weights.unsqueeze(1) @ footprint).reshape(groups, -1, length)
    variance = (kernel @ covariance * kernel).sum(-1)  # (G, Q)
    wanted = (moments.sums[4] / moments.places - mean_y.square()).clamp(min=0)
    least = torch.finfo(torch.float32).eps * wanted.mean()
    scale = torch.where((wanted > least) & (variance > least), (wanted / variance.clamp(min=least)).sqrt(), 1.0)
    scale = torch.ones_like(scale) if fixed else scale.clamp(1 / MOST_SCALE, MOST_SCALE)
    weights = weights * scale.flatten().repeat_interleave(len(weights) // scale.numel()).unsqueeze(1)
    return weights, (mean_y - scale * (kernel @ mean_x.unsqueeze(2)).squeeze(2)).flatten()


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
