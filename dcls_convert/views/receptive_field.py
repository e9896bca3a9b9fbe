"""The effective receptive field: which pixels count for a unit in the middle of a layer (Luo et al., 2016)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError, one_line
from ..networks.running import evaluating, quietly, reproducible

MOST_DECADES = 5  # of the logarithmic scale
FAINT = 0.02  # share of the pixels that may be below the scale
MOST_SIDE = 112  # pixels of the picture; larger fields are averaged, which also calms the noise
SHARES = (0.5, 0.99)  # of the gradient, for which the central square is stated


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldPicture:
    """How much each pixel counts: mean |gradient|, as a share of the largest."""

    title: str
    what: str  # whose field it is
    size: tuple[int, int]  # pixels of the images
    logs: tuple[tuple[float, ...], ...]  # log10 of the share, from -MOST_DECADES to 0
    sides: tuple[tuple[float, int], ...]  # share of the gradient, and pixels of the central square that holds it


def receptive_field(model: nn.Module, layer: str, images: Iterable[Tensor]) -> Tensor:
    """Mean over images of |d sum of channels / d pixel|, summed over input channels: (rows, columns), in float64.

    The gradient begins at the unit in the middle of the layer's output, at its last call. Images of one axis give one
    row; of three, the sum over the first.

    Args:
        model: In float32; run in eval mode, and left as it is.
        layer: Name of the module.
        images: Each (channels, *spatial).

    Raises:
        ModelError: The model does not run on these images, or the layer's output does not depend on them
            by finite gradients.
    """
    outputs: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda module, given, output: outputs.append(output))
    total: Tensor | None = None
    count = 0
    try:
        for image in images:
            gradient = _gradient(model, image, outputs).abs().sum((0, 1)).double()
            total, count = gradient if total is None else total + gradient, count + 1
    finally:
        handle.remove()
    if total is None:
        raise ModelError("there are no images")
    if not total.isfinite().all():
        raise ModelError("the model's gradient is not finite")
    field = (total / count).cpu()
    return field.unsqueeze(0) if field.dim() == 1 else field.sum(0) if field.dim() == 3 else field


def _gradient(model: nn.Module, image: Tensor, outputs: list[Tensor]) -> Tensor:
    """(1, channels, *spatial), by the pixels of one image."""
    outputs.clear()
    pixels = image.unsqueeze(0).clone().requires_grad_()
    try:
        with evaluating(model), torch.enable_grad(), reproducible(), quietly():
            model(pixels)
            unit = outputs[-1][0]
            for side in unit.shape[1:]:
                unit = unit[:, side // 2]
            return torch.autograd.grad(unit.sum(), pixels)[0]
    except Exception as error:  # the model's own code may raise anything
        raise ModelError(
            f"the model's gradient cannot be had: {type(error).__name__}: {one_line(error)[:200]}"
        ) from error


def field_picture(field: Tensor, title: str, what: str) -> FieldPicture:
    """A field (rows, columns) as a picture."""
    rows, columns = field.shape
    shrunk = F.adaptive_avg_pool2d(field[None], (min(rows, MOST_SIDE), min(columns, MOST_SIDE)))[0]
    most = float(shrunk.max())
    shares = shrunk / most if most > 0 else shrunk
    logs = shares.clamp(min=10.0**-MOST_DECADES).log10()
    return FieldPicture(
        title=title,
        what=what,
        size=(rows, columns),
        logs=tuple(map(tuple, logs.tolist())),
        sides=tuple((share, central_side(field, share)) for share in SHARES),
    )


def central_side(field: Tensor, share: float) -> int:
    """The side of the smallest square in the middle that holds this share of a field (rows, columns)."""
    rows, columns = ((torch.arange(side) - (side - 1) / 2).abs() for side in field.shape)
    distance = torch.maximum(rows[:, None], columns[None, :]).flatten()
    order = distance.argsort(stable=True)
    held = field.flatten()[order].cumsum(0)
    first = int((held < share * held[-1] * (1 - 1e-9)).sum().clamp(max=len(held) - 1))
    return min(math.floor(2 * float(distance[order[first]])) + 1, max(field.shape))


def decades(fields: Iterable[FieldPicture]) -> int:
    """How many decades a scale common to these pictures needs."""
    needed = [sorted(log for line in field.logs for log in line) for field in fields]
    return max((max(1, math.ceil(-logs[int(FAINT * len(logs))])) for logs in needed), default=MOST_DECADES)
