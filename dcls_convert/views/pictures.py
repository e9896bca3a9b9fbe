"""All pictures of a checkpoint as data: of a folder, or of a model in memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkpoints.folder import WEIGHTS, read_folder, the_plan
from ..checkpoints.inspection import Inspection, inspect_folder, inspect_positions
from ..checkpoints.load import buildable, load_converted
from ..checkpoints.stamp import read_tensors
from ..depthwise.geometry import size_text
from ..errors import DclsConvertError, one_line
from ..files import check_images
from ..fitting.images import read_images
from ..networks.source import ModelSource
from ..planning.plan import ConversionPlan
from ..progress import Notify, silent
from ..reports.report import Change, ConversionReport, predict_report
from .history import HistoryPicture, read_history
from .kernels import LayerKernels, kernel_pictures
from .original import original_if_random, original_model
from .positions import PositionPicture, position_pictures
from .receptive_field import FieldPicture, field_picture, receptive_field

NOISE_IMAGES, MOST_IMAGES = 4, 16
MOST_FIELD_PIXELS = 1024 * 1024  # of an image whose size the folder states; a gradient keeps what every layer gives
SEED = 0  # of the noise


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """The replaced convolutions of one stage."""

    stage: str
    params: Change  # with biases, and with positions, which count where they are first used
    macs: Change  # for one image; unknown where the model could not be traced


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldPictures:
    """Effective receptive fields before and after conversion, and what there is to say about them."""

    fields: tuple[FieldPicture, ...]
    layer: str  # in whose middle the gradients begin
    images: str  # which they are, in words
    notes: tuple[str, ...]  # why one is not there


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """What there is to see of a checkpoint. None: not asked for."""

    name: str  # of the folder
    report: ConversionReport
    inspection: Inspection
    positions: tuple[PositionPicture, ...]
    kernels: tuple[LayerKernels, ...]
    raw_weights: str | None  # why kernels are of the stored weights; None where they are the rebuilt model's
    fields: FieldPictures | None
    history: HistoryPicture | None

    @property
    def costs(self) -> tuple[StageCost, ...]:
        return stage_costs(self.report)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldOptions:
    """With what effective receptive fields are found."""

    images: Path | None = None  # folder; None: seeded noise
    original: Path | None = None  # weights of the unconverted network
    input_size: tuple[int, ...] | None = None  # (channels, *spatial); None: the plan's


def stage_costs(report: ConversionReport) -> tuple[StageCost, ...]:
    """Parameters and MACs of the replaced convolutions by stage, in the order of the layers."""
    stages: dict[str, list[int]] = {}
    for index, layer in enumerate(report.layers):
        stages.setdefault(layer.stage or "(no stage)", []).append(index)

    def total(members: Sequence[int], unit: str) -> Change:
        counts = [
            [getattr(report.layers[index], f"{unit}_{when}") for index in members] for when in ("before", "after")
        ]
        return Change() if None in counts[0] + counts[1] else Change(before=sum(counts[0]), after=sum(counts[1]))

    return tuple(
        StageCost(stage=stage, params=total(members, "params"), macs=total(members, "macs"))
        for stage, members in stages.items()
    )


def pictures_of_model(model: nn.Module, plan: ConversionPlan, folder: Path, report: ConversionReport) -> Pictures:
    """Pictures of a converted model in memory, without those for which a model must run."""
    state = model.state_dict()
    return _of_state(folder.name, plan, state, model, report, inspect_positions(plan, state, folder))


def _of_state(
    name: str,
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    model: nn.Module | None,
    report: ConversionReport,
    inspection: Inspection,
) -> Pictures:
    return Pictures(
        name=name,
        report=report,
        inspection=inspection,
        positions=position_pictures(plan, state, inspection),
        kernels=tuple(kernel_pictures(plan, state, model)),
        raw_weights=None,
        fields=None,
        history=None,
    )


def pictures_of_folder(
    folder: Path,
    *,
    fields: FieldOptions | None = None,
    history: Path | None = None,
    trust_code: bool = False,
    notify: Notify = silent,
    note: Notify = silent,
) -> Pictures:
    """Pictures of a checkpoint folder.

    Args:
        folder: Written by `save_converted`, or by timm's own savers.
        fields: Find effective receptive fields with these; None: leave them.
        history: Also draw what a `PositionTracker` wrote.
        trust_code: As for `load_converted`. A model that needs it and does not get it is not rebuilt: kernels are then
            those of the stored weights, and there are no receptive fields.
        notify, note: Told about progress, and about files that are no images.

    Raises:
        DclsConvertError: The folder or a file is damaged; says which.
    """
    if fields is not None and fields.images is not None:
        check_images(fields.images, "images")
    track = None if history is None else read_history(history)
    inspection = inspect_folder(folder)
    config = read_folder(folder)
    plan, model, reason = the_plan(config, folder), None, None
    try:
        source = buildable(config.source, folder, trust_code=trust_code)
    except DclsConvertError as error:
        reason = one_line(error)
        state = dict(read_tensors(folder / WEIGHTS))
    else:
        notify("loading")
        model = load_converted(folder, trust_code=trust_code)
        state = model.state_dict()
    notify("drawing positions and kernels")
    pictures = _of_state(folder.resolve().name, plan, state, model, predict_report(plan), inspection)
    pictures = replace(pictures, raw_weights=reason, history=track)
    if fields is None or model is None:
        return pictures
    return replace(pictures, fields=_fields(model, source, plan, state, fields, notify, note))


def _fields(
    model: nn.Module,
    source: ModelSource,
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    options: FieldOptions,
    notify: Notify,
    note: Notify,
) -> FieldPictures:
    notify("building the network of before")
    before, what, notes = _before(source, plan, state, options.original)
    images, words = _images(model, plan, options, note)
    layer, found = plan.layers[-1].name, []
    for title, whose, network in (("Before", what, before), ("After", "this checkpoint", model.float())):
        if network is None or not images:
            continue
        notify(f"effective receptive field {title.lower()}")
        try:
            found.append(field_picture(receptive_field(network, layer, images), title, whose))
        except DclsConvertError as error:
            notes.append(f"There is no field of {whose}: {one_line(error)}.")
    if not images:
        notes.append(f"There is no effective receptive field: {words}.")
    return FieldPictures(fields=tuple(found), layer=layer, images=words if images else "", notes=tuple(notes))


def _before(
    source: ModelSource, plan: ConversionPlan, state: Mapping[str, Tensor], weights: Path | None
) -> tuple[nn.Module | None, str, list[str]]:
    """The unconverted network, what it is, and what to say where there is none."""
    if weights is not None:
        return original_model(source, weights), f"{plan.model}, with the weights of {weights.name}", []
    random = original_if_random(source, plan, state)
    if random is not None:
        return random, f"{plan.model}, with the random weights from which the checkpoint was converted", []
    return None, "", ["The checkpoint holds no weights from before the conversion; --original FILE draws their field."]


def _images(
    model: nn.Module, plan: ConversionPlan, options: FieldOptions, note: Notify
) -> tuple[Sequence[Tensor], str]:
    """Images (channels, *spatial), and what they are, or why there are none."""
    size = options.input_size or plan.input_size
    if size is None:
        return [], "the size of the model's images is not known"
    if options.input_size is None and math.prod(size[1:]) > MOST_FIELD_PIXELS:
        return [], f"images of more than {MOST_FIELD_PIXELS:,} pixels are run where --input-size asks for them"
    if options.images is not None:
        read = read_images(options.images, model, size, note, most=MOST_IMAGES)
        return read, f"{len(read)} images of {options.images.name}, {size_text(size[1:])} pixels"
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(NOISE_IMAGES, *size, generator=generator)
    return list(noise), f"{NOISE_IMAGES} images of seeded noise, {size_text(size[1:])} pixels"
