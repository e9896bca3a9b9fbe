"""What the convolutions of a network see in real images, so that a warm start can keep outputs instead of kernels.

An error E of a kernel changes an output by the sum of E[a] x[p + a] over its cells a. Over many places p its mean
square is the sum of E[a] C[a, b] E[b], where C holds the correlations of the input with itself, shifted by b - a. With
C = R R', that is the sum of squares of E @ R. Correlations between input channels are left out.

Axes: N images, C input channels, S cells of the box in which a kernel is fitted.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, one_line, shown
from ..networks.running import evaluating
from ..planning.plan import ConversionPlan, LayerPlan
from .boxes import box_of

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
MOST_IMAGES = 64
BATCH = 8  # images
DAMPING = 1e-2  # of the input's mean energy; keeps a penalty where the images have no energy
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # where the model states none


def calibrate(
    model: nn.Module,
    plan: ConversionPlan,
    images: str | Path | Iterable[Tensor],
    *,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, Tensor]:
    """Run images through a model that is not converted yet, and record what the layers of the plan see.

    Args:
        model: Left as it is.
        plan: Made for it.
        images: A folder, of which the first 64 images in order of their names are taken, scaled and normalised as the
            model states it; or batches (N, channels, *spatial) as the model takes them.
        note: Told about files that are no images.

    Returns:
        Layer name -> (in_channels, S, S), for `apply_plan_(calibration=...)`.

    Raises:
        DclsConvertError: No images there, or the model does not take them.
    """
    batches = _read_images(Path(images), model, plan, note) if isinstance(images, str | Path) else iter(images)
    seen = {layer.name: _Correlations(layer) for layer in plan.layers}
    handles = [model.get_submodule(name).register_forward_pre_hook(found.look) for name, found in seen.items()]
    try:
        with evaluating(model):
            count = sum(len(batch) for batch in batches if model(batch) is not None)
    except DclsConvertError:
        raise
    except Exception as error:  # the model's own code
        raise DclsConvertError(f"calibration: the model does not take the images: {one_line(error)[:200]}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not count:
        raise DclsConvertError(f"calibration: there are no images in {images}")
    return {name: found.roots() for name, found in seen.items()}


class _Correlations:
    """Of one layer's input with itself, for all shifts within its box."""

    def __init__(self, layer: LayerPlan) -> None:
        self.box = box_of(layer.kernel_size, layer.dilation, layer.dilated_size, layer.interpolation, layer.dense_axes)
        self.dims, self.channels = len(layer.kernel_size), layer.in_channels
        self.sums: Tensor | None = None  # (C, *(2 side - 1)), in float64
        self.places = 0

    def look(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """A forward pre-hook."""
        learnt = [axis - self.dims for axis in self.box.axes]
        others = [axis for axis in range(-self.dims, 0) if axis not in learnt]
        entering = inputs[0].detach().double()
        entering = entering.unsqueeze(0) if entering.dim() == self.dims + 1 else entering
        channel_first = entering.movedim(-self.dims - 1, 0)  # (C, N, *spatial)
        rows = channel_first.permute(0, 1, *(axis + self.dims + 2 for axis in [*others, *learnt]))
        rows = rows.flatten(1, 1 + len(others))  # (C, N and dense axes, *learnt)
        self.places += rows[0].numel()
        # Pad by the longest shift, so that nothing wraps around.
        sizes = [max(length, side) + side - 1 for length, side in zip(rows.shape[2:], self.box.sides, strict=True)]
        over = tuple(range(-len(sizes), 0))
        power = torch.fft.rfftn(rows, s=sizes, dim=over).abs().square().sum(1)
        shifted = torch.fft.irfftn(power, s=sizes, dim=over)
        for axis, side in zip(over, self.box.sides, strict=True):
            shifted = shifted.roll(side - 1, axis).narrow(axis, 0, 2 * side - 1)
        self.sums = shifted if self.sums is None else self.sums + shifted

    def roots(self) -> Tensor:
        """(C, S, S): roots of the correlation matrices."""
        cells = math.prod(self.box.sides)
        if self.sums is None:
            return torch.eye(cells).expand(self.channels, cells, cells)
        places = torch.tensor(list(itertools.product(*map(range, self.box.sides))))  # (S, A)
        middle = torch.tensor(self.box.sides) - 1
        shift = (places[:, None] - places[None] + middle).unbind(-1)  # each (S, S)
        matrix = self.sums[:, *shift] / self.places  # type: ignore[index]  # (C, S, S)
        energy = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
        damping = DAMPING * energy.clamp(min=float(energy.mean()) * 1e-3 + 1e-12)
        values, vectors = torch.linalg.eigh(matrix + damping[:, None, None] * torch.eye(cells, dtype=matrix.dtype))
        return torch.mul(vectors, values.clamp(min=0).sqrt().unsqueeze(-2)).float()


def _read_images(folder: Path, model: nn.Module, plan: ConversionPlan, note: Callable[[str], None]) -> Iterator[Tensor]:
    if not folder.is_dir():
        missing = "is not a folder" if folder.exists() else "there is no such folder"
        raise DclsConvertError(f"calibration images {shown(folder)}: {missing}")
    size = plan.input_size
    if size is None or len(size) != 3 or size[0] not in (1, 3):
        raise DclsConvertError("calibration: the model does not take images of 1 or 3 channels")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)[:MOST_IMAGES]
    if not paths:
        raise DclsConvertError(f"calibration images {folder}: no files there end in {', '.join(SUFFIXES)}")
    read = [image for path in paths if (image := _read_image(path, size, model, note)) is not None]
    for start in range(0, len(read), BATCH):
        yield torch.stack(read[start : start + BATCH])


def _read_image(path: Path, size: Sequence[int], model: nn.Module, note: Callable[[str], None]) -> Tensor | None:
    """(channels, rows, columns), normalised as the model states it; None for what is no image."""
    from PIL import Image, ImageOps

    channels, rows, columns = size
    try:
        with Image.open(path) as image:
            converted = image.convert("RGB" if channels == 3 else "L")
        fitted = ImageOps.fit(converted, (columns, rows), Image.Resampling.BICUBIC)
    except (OSError, ValueError, SyntaxError) as error:  # what Pillow's readers raise
        note(f"{path} is not an image: {one_line(error)[:100]}")
        return None
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8).reshape(rows, columns, channels)
    stated = getattr(model, "pretrained_cfg", None) or {}
    usual = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    mean, std = (torch.tensor(tuple(stated.get(name) or usual[name])[:channels]).view(-1, 1, 1) for name in usual)
    return (pixels.movedim(-1, 0).float() / 255 - mean) / std
