"""The effective receptive field: which pixels count for a unit in the middle of a layer (Luo et al., 2016)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..depthwise.geometry import size_text
from ..errors import DclsConvertError, ModelError, one_line
from ..fitting.images import IMAGENET, read_images, stated_normalisation
from ..networks.running import evaluating, full_precision, quietly
from ..networks.source import ModelSource, build_model
from ..networks.weights import load_weights_, read_weights, with_names_of
from ..planning.plan import ConversionPlan
from ..progress import Notify

MOST_DECADES = 5  # of the logarithmic scale
FAINT = 0.02  # share of the pixels that may be below the scale
MOST_SIDE = 112  # pixels of the picture; larger fields are averaged, which also calms the noise
SHARES = (0.5, 0.99)  # of the gradient, for which the central square is stated
NOISE_IMAGES = 4
MOST_IMAGES = 16
# Of an image whose size the folder states; a gradient keeps what every layer gives.
MOST_PIXELS = 1024 * 1024
SEED = 0  # of the noise, and the default of a conversion


@dataclass(frozen=True, slots=True)
class FieldOptions:
    """With what effective receptive fields are found."""

    images: Path | None  # folder; None: seeded noise
    original: Path | None  # weights of the unconverted network
    input_size: tuple[int, ...] | None  # (channels, *spatial); None: the plan's


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FieldPicture:
    """How much each pixel counts: mean |gradient|, as a share of the largest."""

    title: str
    what: str  # whose field it is
    size: tuple[int, int]  # pixels of the images
    logs: Tensor  # (rows, columns); log10 of the share, from -MOST_DECADES to 0
    sentence: str  # how large the field is


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldPictures:
    """Effective receptive fields before and after conversion, and what there is to say about them."""

    fields: tuple[FieldPicture, ...]
    notes: tuple[str, ...]  # what they are, and why one is not there

    @property
    def decades(self) -> int:
        """How many decades a scale common to these pictures needs."""
        faint = [
            field.logs.flatten().sort().values[int(FAINT * field.logs.numel())]
            for field in self.fields
        ]
        return max((max(1, math.ceil(-log)) for log in faint), default=MOST_DECADES)


def field_pictures(
    model: nn.Module,
    source: ModelSource,
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    options: FieldOptions,
    notify: Notify,
    note: Notify,
) -> FieldPictures:
    """The fields of a checkpoint's last replaced layer; of the network before conversion too, where it can be had."""
    images, words = _images(model, plan, options, note)
    if not images:
        return FieldPictures(fields=(), notes=(f"There is no effective receptive field: {words}.",))
    notify("building the network of before")
    layer = plan.layers[-1].name
    fields = []
    notes = [
        f"How much each pixel counts for the unit in the middle of {layer}, the last replaced layer: mean "
        f"absolute gradient over {words}, as a share of the largest, on a logarithmic scale."
    ]
    networks = {
        "Before": _before(source, plan, state, options.original),
        "After": ("this checkpoint", model.float()),
    }
    for title, stated in networks.items():
        if stated is None:
            notes.append(
                "The checkpoint holds no weights from before the conversion; --original FILE draws their field."
            )
            continue
        what, network = stated
        notify(f"effective receptive field {title.lower()}")
        try:
            fields.append(field_picture(receptive_field(network, layer, images), title, what))
        except DclsConvertError as error:
            notes.append(f"There is no field of {what}: {one_line(error)}.")
    return FieldPictures(fields=tuple(fields), notes=tuple(notes))


def _before(
    source: ModelSource, plan: ConversionPlan, state: Mapping[str, Tensor], weights: Path | None
) -> tuple[str, nn.Module] | None:
    """What the unconverted network is, and the network: with the weights of the file, or the random ones of before."""
    model = build_model(source, seed=SEED, trust_code=True)
    if weights is not None:
        load_weights_(model, with_names_of(model, read_weights(weights)), f"original {weights}")
        return f"{plan.model}, with the weights of {weights.name}", model.float().eval()
    # It was converted from random weights if all tensors that conversion leaves alone are equal.
    own = model.state_dict()
    replaced = {f"{name}.weight" for layer in plan.layers for name in layer.names}
    kept = [name for name in own if name in state and name not in replaced]
    if not kept or not all(torch.equal(own[name], state[name]) for name in kept):
        return None
    return (
        f"{plan.model}, with the random weights from which the checkpoint was converted",
        model.float().eval(),
    )


def _images(
    model: nn.Module, plan: ConversionPlan, options: FieldOptions, note: Notify
) -> tuple[Sequence[Tensor], str]:
    """Images (channels, *spatial), and what they are, or why there are none."""
    size = options.input_size or plan.input_size
    if size is None:
        return [], "the size of the model's images is not known"
    if options.input_size is None and math.prod(size[1:]) > MOST_PIXELS:
        return (
            [],
            f"images of more than {MOST_PIXELS:,} pixels are run where --input-size asks for them",
        )
    if options.images is not None:
        normalisation = stated_normalisation(model) or IMAGENET
        images = [
            *read_images(options.images, normalisation, size, note, most=MOST_IMAGES).values()
        ]
        return (
            images,
            f"{len(images)} images of {options.images.name}, {size_text(size[1:])} pixels",
        )
    noise = torch.randn(NOISE_IMAGES, *size, generator=torch.Generator().manual_seed(SEED))
    return list(noise), f"{NOISE_IMAGES} images of seeded noise, {size_text(size[1:])} pixels"


def receptive_field(model: nn.Module, layer: str, images: Iterable[Tensor]) -> Tensor:
    """Mean over images of |d sum of channels / d pixel|, summed over input channels: (rows, columns), in float64.

    Of the unit in the middle of the layer's last output. Images of one axis give one row; of three, a sum over one.
    """
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    try:
        with evaluating(model), torch.enable_grad(), full_precision(), quietly():
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
        message = f"cannot calculate the model's gradient: {type(error).__name__}: {one_line(error)[:200]}"
        raise ModelError(message) from error
    finally:
        handle.remove()
    field = torch.stack(gradients).mean(0).cpu()
    if not field.isfinite().all():
        raise ModelError("the model's gradient is not finite")
    return field.unsqueeze(0) if field.dim() == 1 else field.sum(0) if field.dim() == 3 else field


def field_picture(field: Tensor, title: str, what: str) -> FieldPicture:
    """A field (rows, columns) as a picture."""
    rows, columns = field.shape
    shrunk = F.adaptive_avg_pool2d(field[None], (min(rows, MOST_SIDE), min(columns, MOST_SIDE)))[0]
    most = float(shrunk.max()) or 1.0
    sides = [
        f"{(side := central_side(field, share))} x {side} hold {100 * share:.0f} %"
        for share in SHARES
    ]
    return FieldPicture(
        title=title,
        what=what,
        size=(rows, columns),
        logs=(shrunk / most).clamp(min=10.0**-MOST_DECADES).log10(),
        sentence=f"Of the gradient, the central pixels: {', '.join(sides)}, of {size_text(field.shape)}.",
    )


def central_side(field: Tensor, share: float) -> int:
    """The side of the smallest square in the middle that holds this share of a field (rows, columns)."""
    # Twice the distance.
    rows, columns = ((2 * torch.arange(side) - side + 1).abs() for side in field.shape)
    held = torch.bincount(torch.maximum(rows[:, None], columns).flatten(), field.flatten()).cumsum(
        0
    )
    return min(int((held < share * held[-1] * (1 - 1e-9)).sum()) + 1, max(field.shape))
