"""A model's convolutions as plain values, with the stage of each, and what the model costs before conversion."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..depthwise.geometry import Padding, size_text
from ..errors import PlanError, one_line
from ..layers.conv_classes import AnyConv, padding_of, why_not_replaceable
from ..layers.dcls_conv import DclsConvNd
from .stages import find_stages, output_stride
from .tracing import Calls, Trace, trace

IMAGE_CHANNELS = 3  # where no input size is known


@dataclass(frozen=True, kw_only=True, slots=True)
class OldConv:
    """A convolution of the model, as its site and the plan of its layer state it. Axes in the order of tensor.shape."""

    names: tuple[str, ...]  # every qualified name of the object, the first is canonical
    stage: str | None  # "stages.2"; None where the model has no stages, or outside them
    kind: str  # "depthwise", "grouped" or "dense"
    in_channels: int
    out_channels: int
    groups: int
    bias: bool
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    output_positions: (
        int | None
    )  # spatial positions of all calls for one image; None where not known

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def dims(self) -> int:
        return len(self.kernel_size)

    @property
    def dense_weights(self) -> int:
        return math.prod([self.out_channels, self.in_channels // self.groups, *self.kernel_size])

    def macs(self, size: Sequence[int]) -> int | None:
        """Multiply-accumulates for one image, with a kernel of that size."""
        weights = self.out_channels * (self.in_channels // self.groups) * math.prod(size)
        return None if self.output_positions is None else self.output_positions * weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvSite(OldConv):
    """One convolution object of the model, as found before conversion."""

    type: str  # class name
    stem: bool  # in the stem as timm names it, or takes the image itself
    stride: tuple[int, ...]
    padding: Padding
    padding_mode: str
    output_size: (
        tuple[int, ...] | None
    )  # of the first call, at the stated input size; None where not known
    input_extent: tuple[int, ...] | None  # smallest spatial input of any call; None where not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A convolution that stays as it is, and why."""

    name: str
    type: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConvs:
    """All convolutions of a model, and what the model costs before conversion."""

    sites: tuple[ConvSite, ...]
    skipped: tuple[Skipped, ...]
    params: int  # every parameter once
    macs: int | None  # for one image at input_size; None where the forward pass could not be traced
    input_size: tuple[int, ...] | None
    macs_note: str | None  # why macs is None
    stages_from: str  # how the stages were found
    trace: Trace | None = field(default=None, repr=False, compare=False)

    def __iter__(self) -> Iterator[tuple[ConvSite, ...] | tuple[Skipped, ...]]:
        """`sites, skipped = find_convs(...)`."""
        yield self.sites
        yield self.skipped


def find_convs(model: nn.Module, input_size: Sequence[int] | None = None) -> ModelConvs:
    """Every convolution object of `model`, once, under all its names.

    Args:
        model: Left as it is. Its weights may be on any device, meta included.
        input_size: (channels, *spatial) of one input, or only the spatial sizes where there are 3 channels; without it,
            the size that a timm model states. One forward pass on the meta device gives output sizes and MACs; where
            the model does not run there, they are None.

    Raises:
        PlanError: `input_size` is not positive integers for as many dimensions as the convolutions have, or the model
            has DCLS layers already, or is compiled.
    """
    if hasattr(model, "_orig_mod"):
        raise PlanError("the model is compiled; convert it before torch.compile")
    converted = sum(isinstance(module, DclsConvNd) for module in model.modules())
    if converted:
        raise PlanError(f"the model is converted already: it has {converted} DCLS layers")
    names_of: dict[AnyConv, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, AnyConv):
            names_of.setdefault(module, []).append(name)
    size = _input_size(
        model, input_size, max((len(conv.kernel_size) for conv in names_of), default=2)
    )
    traced, note = None, "no input size is known; state one" if size is None else None
    if size is not None:
        try:
            traced = trace(model, size)
        except Exception as error:  # any model code may run here; without a trace, the model can still be converted
            note = f"the model does not run on the meta device at {size}: {one_line(error)[:200]}"
    spatial = {names[0] for conv, names in names_of.items() if max(conv.kernel_size) > 1}
    seen, image = (traced.calls, traced.input_size[1:]) if traced else ({}, ())
    strides = {
        name: output_stride(image, calls.sizes[0])
        for name, calls in seen.items()
        if len(calls.sizes[0]) == len(image)
        and min(calls.sizes[0]) > 0  # with all of the image's axes
    }
    stages_from, stage_of, in_stem = find_stages(model, strides, spatial)
    holders: dict[int, list[str]] = {}  # id of a parameter -> the modules that hold it
    for name, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append(name)
    sites: list[ConvSite] = []
    skipped: list[Skipped] = []
    for conv, names in names_of.items():
        reason = why_not_replaceable(conv)
        if reason is None and len(sharing := holders[id(conv.weight)]) > 1:
            reason = f"its weight is shared with {' and '.join(sharing)}"
        if reason is None:
            calls = seen.get(names[0])
            takes_image = calls.takes_image if calls else traced is None and not sites
            stem = in_stem(names[0]) or (
                takes_image and conv.in_channels == (size[0] if size else IMAGE_CHANNELS)
            )
            never = 0 if traced else None  # output positions of what is not called
            sites.append(_site(conv, names, calls, never, stage=stage_of(names[0]), stem=stem))
        else:
            skipped.append(Skipped(name=names[0], type=type(conv).__name__, reason=reason))
    return ModelConvs(
        sites=tuple(sites),
        skipped=tuple(skipped),
        params=sum(
            p.numel()
            for p in model.parameters()
            if not isinstance(p, nn.parameter.UninitializedParameter)
        ),
        macs=sum(traced.flops[""].values()) // 2
        if traced
        else None,  # two operations are one multiply-accumulate
        input_size=size,
        macs_note=note,
        stages_from=stages_from,
        trace=traced,
    )


def _site(
    conv: AnyConv,
    names: Sequence[str],
    calls: Calls | None,
    never: int | None,
    *,
    stage: str | None,
    stem: bool,
) -> ConvSite:
    depthwise = conv.groups == conv.in_channels and conv.groups > 1
    own: dict[str, Any] = {
        name: tuple(getattr(conv, name)) for name in ("kernel_size", "stride", "dilation")
    }
    own |= {
        name: getattr(conv, name)
        for name in ("in_channels", "out_channels", "groups", "padding_mode")
    }
    return ConvSite(
        **own,
        names=tuple(names),
        type=type(conv).__name__,
        kind="depthwise" if depthwise else "grouped" if conv.groups > 1 else "dense",
        stage=stage,
        stem=stem,
        padding=padding_of(conv),
        bias=conv.bias is not None,
        output_size=calls.sizes[0] if calls else None,
        input_extent=calls.input_extent if calls else None,
        output_positions=calls.output_positions if calls else never,
    )


def kinds_of_convs(convs: ModelConvs) -> Counter[str]:
    """How many convolutions there are of each kind: "depthwise 7x7", "dense 3x3 in the stem"."""
    kinds = Counter(
        f"{site.kind} {size_text(site.kernel_size)}" + " in the stem" * site.stem
        for site in convs.sites
    )
    return kinds + Counter(f"{skip.type} ({skip.reason})" for skip in convs.skipped)


def _input_size(model: nn.Module, asked: Sequence[int] | None, dims: int) -> tuple[int, ...] | None:
    """(channels, *spatial): as asked for, or as a timm model states it."""
    if asked is None:
        config = getattr(model, "pretrained_cfg", None)
        stated = config.get("input_size") if isinstance(config, Mapping) else None
        channels = getattr(model, "_model_args", {}).get(
            "in_chans"
        )  # as timm was asked; its config still says 3
        return (channels or stated[0], *stated[1:]) if stated else None
    sides = asked if isinstance(asked, Sequence) else ()
    if not 2 <= len(sides) <= 4 or any(not isinstance(side, int) or side < 1 for side in sides):
        raise PlanError(
            f"input size {asked!r} must be channels and spatial sizes, such as (3, 224, 224)"
        )
    if len(asked) not in (dims, dims + 1):
        raise PlanError(
            f"input size {size_text(asked)} must be channels and {dims} sides, the model is {dims}-D"
        )
    return tuple(asked) if len(asked) > dims else (IMAGE_CHANNELS, *asked)
