"""Records of a model's convolutions (shapes, stages, MACs) and of its cost before conversion."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from pydantic import Field

from ..geometry import (
    Direction,
    Grow,
    Pair,
    grow_of_axes,
    learnt_axes,
    size_text,
    useful_limits,
)
from ..layers.conv_settings import ConvSettings
from ..running.input_spec import InputSpec

# Why a window must not grow to both sides in a network that looks to one side only.
ONE_SIDE = (
    "each output depends only on inputs on one side of it; a larger window would also read inputs "
    "on the other side (later times, or a neighbouring tile)"
)

NOT_CALLED = (
    "the forward pass of the network in eval mode does not call it (other code may use its weight)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OldConv(ConvSettings):
    """Facts about the old convolution that both its site and its layer's plan state."""

    # Every qualified name of the object; the first is canonical.
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    stage: str | None  # "stages.2"; None outside all stages, or if the model has none
    kind: str  # "depthwise", "grouped" or "dense"
    # Spatial output positions of all calls for one image; None if not known.
    output_positions: int | None
    # Smallest spatial input of any call, at the stated input size; None if not known.
    input_extent: tuple[int, ...] | None = None
    frozen: bool = False  # True if the weight is not trained

    @property
    def name(self) -> str:
        """The canonical name, used in plans and reports."""
        return self.names[0]

    @property
    def dims(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel_size)

    @property
    def dense_weights(self) -> int:
        """Number of weights of the old kernel."""
        return math.prod([self.out_channels, self.in_channels // self.groups, *self.kernel_size])

    def useful_limits(
        self, window: Sequence[int], dense_axes: Sequence[int], grow: Sequence[Grow]
    ) -> list[Pair]:
        """Return `geometry.useful_limits` of a window in this place, along each learnt axis."""
        grow = grow_of_axes(grow, self.dims)
        limits = []
        for axis in learnt_axes(self.dims, dense_axes):
            map_length = None if self.input_extent is None else self.input_extent[axis]
            limits.append(useful_limits(window[axis], self.extents[axis], map_length, grow[axis]))
        return limits

    def macs(self, size: Sequence[int]) -> int | None:
        """Return the MACs for one image with a kernel of this size, or None if not known."""
        if self.output_positions is None:
            return None
        weights = self.out_channels * (self.in_channels // self.groups) * math.prod(size)
        return self.output_positions * weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvSite(OldConv):
    """One convolution object of the model, as found before conversion."""

    type: str  # class name
    stem: bool  # whether timm counts the convolution as stem, or it takes the image itself
    # Public members of the convolution's class that a DCLS layer does not have.
    missing_members: tuple[str, ...] = ()
    # Why other code needs the attributes of the convolution; None if no other code needs them. A
    # DCLS layer keeps them only if its window grows to one side.
    why_attributes_are_needed: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A convolution that stays as it is, and why."""

    name: str
    type: str
    reason: str


class AllowedWindows(Protocol):
    """Says which windows a network allows, by running it (see `measure.Dependence`)."""

    @property
    def outputs_look(self) -> Direction | None:
        """The side to which all outputs look; None if there is no such side."""

    def broken_by(
        self,
        windows: Mapping[str, Sequence[int]],
        grow: Mapping[str, Sequence[Grow]] | None = None,
    ) -> dict[str, dict[int, str]]:
        """Return, by name and axis, why convolutions must not grow to these windows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Results of measuring a network; see `measure`."""

    # Why convolutions must stay, by name.
    reasons: dict[str, str] = field(default_factory=dict)
    # `ConvSite.why_attributes_are_needed`, by name, for the convolutions that may be replaced.
    why_read: dict[str, str] = field(default_factory=dict)
    dependence: AllowedWindows | None = None  # None if it was not measured
    not_measured: str | None = None  # what could not be measured, and why; None if all was


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConvs:
    """All convolutions of a model, and the model's costs before conversion."""

    sites: tuple[ConvSite, ...]
    skipped: tuple[Skipped, ...]
    params: int  # each parameter counted once
    macs: int | None  # at `inputs`; None if the forward pass could not be traced
    inputs: InputSpec | None  # the tensors that forward takes; None if not known
    # (channels, *spatial) of one image; None if not known, or if the inputs are not one image.
    input_size: tuple[int, ...] | None
    macs_note: str | None  # why `macs` is None, or what `macs` lacks
    # What was not measured, and why (see `measure`). None if everything was measured, or if the
    # model is library code, which need not be measured.
    not_measured: str | None
    # Which windows the outputs' dependence on inputs allows; None if it was not measured.
    dependence: AllowedWindows | None = field(default=None, repr=False, compare=False)
    stages_from: str  # how the stages were found


def count_conv_kinds(convs: ModelConvs) -> Counter[str]:
    """Count the convolutions of each kind: "depthwise 7x7", "dense 3x3 in the stem"."""
    kinds: Counter[str] = Counter()
    for site in convs.sites:
        kind = f"{site.kind} {size_text(site.kernel_size)}"
        if site.stem:
            kind += " in the stem"
        kinds[kind] += 1
    for skip in convs.skipped:
        kinds[f"{skip.type} ({skip.reason})"] += 1
    return kinds
