"""What a conversion costs: counts before and after, of layers and of the whole model."""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import computed_field

from ..planning.layer_plan import LayerPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A count before and after a conversion, None if not known. Its unit is the field's name."""

    before: int | None = None
    after: int | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def delta(self) -> int | None:
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    @property
    def percent(self) -> float | None:
        if self.delta is None or not self.before:
            return None
        return 100 * self.delta / self.before


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamsChange(Change):
    """Parameters of the whole model. `after` includes `weights` and `positions`."""

    weights: int  # weights of all elements; in a folded model, cells of all windows
    positions: int  # positions and sigmas; tied ones are counted once


@dataclass(frozen=True, kw_only=True, slots=True)
class MacsChange(Change):
    """MACs of the whole model for one input."""

    note: str | None = None  # reason, if MACs are not known


def params_of(layers: Iterable[LayerPlan]) -> Change:
    """Sum parameters, with biases and positions; shared positions count in their owner."""
    before = 0
    after = 0
    for layer in layers:
        before += layer.params_before
        after += layer.params_after
    return Change(before=before, after=after)


def macs_of(layers: Iterable[LayerPlan]) -> Change:
    """Sum MACs for one image; unknown if those of a layer are."""
    before = 0
    after = 0
    for layer in layers:
        if layer.macs_before is None or layer.macs_after is None:
            return Change()
        before += layer.macs_before
        after += layer.macs_after
    return Change(before=before, after=after)
