"""Effective receptive fields: how much each pixel matters for a unit in the middle of a layer.

Source: Luo et al., 2016.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DclsConvertError, ModelError
from ..geometry import learnt_axes, size_text
from ..image_files import IMAGENET, normalised, read_pixels, stated_normalisation
from ..layers.position_statistics import mean_distance
from ..networks.building import build_model
from ..networks.running import eval_mode, full_precision, suppress_output
from ..networks.source import ModelSource
from ..networks.state_names import rename_to_model
from ..networks.weights import load_weights_
from ..networks.weights_files import read_weights
from ..planning.plan import ConversionPlan
from ..progress import Note, Notify
from ..text import one_line

MAX_DECADES = 5  # decades of the logarithmic scale
MAX_SHARE_BELOW_SCALE = 0.02  # share of the pixels that may be below the end of the scale
MAX_MAP_SIDE = 112  # pixels of a map; larger fields are averaged, which also reduces the noise
# Shares of the gradient for which the side of the central square is reported.
HALF = 0.5
NEARLY_ALL = 0.99
SMALLER_AFTER = (
    "The field after conversion is smaller, because the elements of this layer are closer to the "
    "centre than the cells of the old kernel: on average {elements:.2f} cells away, instead of "
    "{cells:.2f}. It grows as training moves them out."
)
NOISE_IMAGES = 4
NOISE_SEED = 0
MAX_FIELD_IMAGES = 16
# Pixels per image, unless the user states its size. The activations of all layers stay in memory,
# because a gradient needs them.
MAX_FIELD_PIXELS = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReceptiveFieldOptions:
    """How to compute effective receptive fields."""

    images: Path | None  # folder; None for seeded noise
    original: Path | None  # file with the weights of the unconverted network
    input_size: tuple[int, ...] | None  # (channels, *spatial); None for the plan's


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReceptiveFieldMap:
    """How much each pixel matters: mean |gradient|, as a share of the largest."""

    title: str
    what: str  # describes the network that has this field
    size: tuple[int, int]  # pixels of the images
    logs: Tensor  # (rows, columns); log10 of the share, from -MAX_DECADES to 0
    sentence: str  # how large the field is


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceptiveFieldMaps:
    """Effective receptive fields before and after conversion, and notes on them."""

    maps: tuple[ReceptiveFieldMap, ...]
    notes: tuple[str, ...]  # what the fields show, and why any is missing

    @property
    def decades(self) -> int:
        """Number of decades that a common scale of the maps needs."""
        if not self.maps:
            return MAX_DECADES
        decades = 1
        for field in self.maps:
            pixels_below = int(MAX_SHARE_BELOW_SCALE * field.logs.numel())
            lowest_log = float(field.logs.flatten().sort().values[pixels_below])
            decades = max(decades, math.ceil(-lowest_log))
        return decades


def receptive_field_maps(
    model: nn.Module,
    source: ModelSource,
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    options: ReceptiveFieldOptions,
    notify: Notify,
    note: Note,
) -> ReceptiveFieldMaps:
    """Compute the fields of a checkpoint's last replaced layer, before and after the conversion.

    A field that cannot be computed is left out, and a note says why.

    Args:
        model: The checkpoint's model.
        source: Builds the network before conversion.
        plan: The conversion's plan.
        state: The state dict of `model`.
        options: The images, their size, and the weights before conversion.
        notify: Called with each next step, to show progress.
        note: Called with notes about skipped images.
    """
    try:
        images, about_images = _images(model, plan, options, note)
    except ModelError as error:
        reason = f"There is no effective receptive field: {error}."
        return ReceptiveFieldMaps(maps=(), notes=(reason,))
    notify("building the network before conversion")
    layer = plan.layers[-1].name
    fields = []
    half_sides = []  # of each field, the side of the central square with half of the gradient
    notes = [
        f"How much each pixel counts for the unit in the middle of {layer}, the last replaced "
        f"layer: mean absolute gradient over {about_images}, as a share of the largest, on a "
        "logarithmic scale."
    ]
    networks: list[tuple[str, str, nn.Module]] = []  # title, description, network
    before = _network_before(source, plan, state, options.original)
    if before is None:
        notes.append(
            "The checkpoint holds no weights from before the conversion; "
            "--original FILE draws their field."
        )
    else:
        networks.append(("Before", *before))
    networks.append(("After", "this checkpoint", model.float()))
    for title, description, network in networks:
        notify(f"effective receptive field {title.lower()}")
        try:
            field = receptive_field(network, layer, images)
            fields.append(receptive_field_map(field, title, description))
            half_sides.append(central_side(field, HALF))
        except DclsConvertError as error:
            notes.append(f"There is no field of {description}: {one_line(error)}.")
    if len(half_sides) == 2 and half_sides[1] < half_sides[0]:
        notes += _why_smaller(plan, model)
    return ReceptiveFieldMaps(maps=tuple(fields), notes=tuple(notes))


def _why_smaller(plan: ConversionPlan, model: nn.Module) -> list[str]:
    """Explain why the last layer's field became smaller; [] if its elements are not the reason."""
    layer = plan.layers[-1]
    positions = model.get_submodule(layer.name).positions
    assert isinstance(positions, Tensor)
    sides = []
    for axis in learnt_axes(len(layer.kernel_size), layer.dense_axes):
        side = layer.kernel_size[axis]
        sides.append(layer.dilation[axis] * (torch.arange(side) - (side - 1) / 2))
    cells = torch.stack(torch.meshgrid(sides, indexing="ij"))  # (A, *sides of the old kernel)
    element_distance = mean_distance(positions.detach())
    cell_distance = mean_distance(cells)
    if element_distance >= cell_distance:
        return []
    return [SMALLER_AFTER.format(elements=element_distance, cells=cell_distance)]


def _network_before(
    source: ModelSource, plan: ConversionPlan, state: Mapping[str, Tensor], weights: Path | None
) -> tuple[str, nn.Module] | None:
    """Return a description of the network before conversion, and the network.

    It has the weights of the file, or the random ones from which it was converted. Return None if
    there is no file and it was converted from other weights.
    """
    # `build_model` uses the default seed of a conversion.
    model = build_model(source, trust_code=True)
    if weights is not None:
        load_weights_(model, rename_to_model(model, read_weights(weights)), f"original {weights}")
        return f"{plan.model}, with the weights of {weights.name}", model.float().eval()
    # It was converted from these random weights if all tensors that a conversion keeps are equal.
    random_state = model.state_dict()
    replaced: set[str] = set()
    for layer in plan.layers:
        replaced.update(f"{name}.weight" for name in layer.names)
    kept = [name for name in random_state if name in state and name not in replaced]
    if not kept or not all(torch.equal(random_state[name], state[name]) for name in kept):
        return None
    description = f"{plan.model}, with the random weights from which the checkpoint was converted"
    return description, model.float().eval()


def _images(
    model: nn.Module, plan: ConversionPlan, options: ReceptiveFieldOptions, note: Note
) -> tuple[Sequence[Tensor], str]:
    """Return images (channels, *spatial), and a description of them.

    Raises:
        ModelError: The size of the images is unknown or too large, or no image can be read.
    """
    size = options.input_size or plan.input_size
    if size is None:
        raise ModelError("the size of the model's images is not known")
    if options.input_size is None and math.prod(size[1:]) > MAX_FIELD_PIXELS:
        limit = f"images of more than {MAX_FIELD_PIXELS:,} pixels"
        raise ModelError(f"{limit} are run only if --input-size is given")
    size_in_pixels = f"{size_text(size[1:])} pixels"
    if options.images is not None:
        normalisation = stated_normalisation(model) or IMAGENET
        pixels_by_file = read_pixels(options.images, size, note, max_images=MAX_FIELD_IMAGES)
        if not pixels_by_file:
            raise ModelError(f"no image of {options.images.name} could be read")
        images = [normalised(image, normalisation) for image in pixels_by_file.values()]
        return images, f"{len(images)} images of {options.images.name}, {size_in_pixels}"
    generator = torch.Generator().manual_seed(NOISE_SEED)
    noise = torch.randn(NOISE_IMAGES, *size, generator=generator)
    return list(noise), f"{NOISE_IMAGES} images of seeded noise, {size_in_pixels}"


def receptive_field(model: nn.Module, layer: str, images: Iterable[Tensor]) -> Tensor:
    """Compute how much each pixel matters for the unit in the middle of the layer's last output.

    It is the mean over images of |d unit / d pixel|. The unit is summed over output channels, and
    the absolute gradients over input channels.

    Returns:
        (rows, columns), in float64. Images of one axis give one row; fields of images of three axes
        are summed over the first.

    Raises:
        ModelError: The gradient cannot be calculated, or is not finite.
    """
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    try:
        with eval_mode(model), torch.enable_grad(), full_precision(), suppress_output():
            for image in images:
                pixels = image.unsqueeze(0).clone().requires_grad_()
                model(pixels)
                unit = outputs[-1][0]
                outputs.clear()
                for side in unit.shape[1:]:
                    unit = unit[:, side // 2]
                (gradient,) = torch.autograd.grad(unit.sum(), pixels)
                gradients.append(gradient.abs().sum((0, 1)).double())
    except Exception as error:  # the model's own code may raise anything
        reason = f"{type(error).__name__}: {one_line(error)[:200]}"
        raise ModelError(f"cannot calculate the model's gradient: {reason}") from error
    finally:
        handle.remove()
    field = torch.stack(gradients).mean(0).cpu()
    if not field.isfinite().all():
        raise ModelError("the model's gradient is not finite")
    if field.dim() == 1:
        return field.unsqueeze(0)
    if field.dim() == 3:
        return field.sum(0)
    return field


def receptive_field_map(field: Tensor, title: str, what: str) -> ReceptiveFieldMap:
    """Return the map of a field (rows, columns): averaged, scaled and described."""
    rows, columns = field.shape
    map_size = (min(rows, MAX_MAP_SIDE), min(columns, MAX_MAP_SIDE))
    averaged = F.adaptive_avg_pool2d(field[None], map_size)[0]
    largest = float(averaged.max()) or 1.0
    half = central_side(field, HALF)
    nearly_all = central_side(field, NEARLY_ALL)
    return ReceptiveFieldMap(
        title=title,
        what=what,
        size=(rows, columns),
        logs=(averaged / largest).clamp(min=10.0**-MAX_DECADES).log10(),
        sentence=(
            f"Half of the gradient falls in the central {half}x{half} pixels, "
            f"{100 * NEARLY_ALL:.0f} % in {nearly_all}x{nearly_all} (of {size_text(field.shape)})."
        ),
    )


def central_side(field: Tensor, share: float) -> int:
    """Return the side of the smallest central square with this share of a field (rows, columns)."""
    rows = _doubled_distances(field.shape[0])
    columns = _doubled_distances(field.shape[1])
    # A central square of side s has the pixels with a doubled distance below s along both axes.
    distances = torch.maximum(rows[:, None], columns)  # (rows, columns)
    cumulative = torch.bincount(distances.flatten(), field.flatten()).cumsum(0)  # by distance
    target = share * cumulative[-1] * (1 - 1e-9)  # slightly less than the share, for rounding
    distance = int((cumulative < target).sum())  # the first that reaches the target
    return min(distance + 1, max(field.shape))


def _doubled_distances(side: int) -> Tensor:
    """Return twice the distance of each pixel from the middle of its axis, as integers: (side,)."""
    return (2 * torch.arange(side) - side + 1).abs()
