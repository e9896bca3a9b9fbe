"""The records that a report consists of: costs of layers, use of the budget, changed outputs."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, computed_field

from ..networks.model_outputs import Agreement


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One replaced convolution.

    In a folded model, a plain convolution is in its place, and `kernel_count` is the count before
    folding.
    """

    name: str
    stage: str | None
    kind: str
    kernel_size: tuple[int, ...]
    dilated_size: tuple[int, ...]
    kernel_count: int
    interpolation: str
    tie_group: str | None
    params_before: int  # with bias
    params_after: int  # with bias, and with `position_params`
    weight_params: int  # part of params_after: weights of elements; if folded, of the whole window
    # Part of params_after: positions and sigma. Tied ones are counted in their group's first layer.
    position_params: int
    macs_before: int | None
    macs_after: int | None
    fit_error: float | None = None  # relative error of the kernel after the start
    output_error: float | None = None  # relative error of the outputs, on a calibration's images
    # Reasons for `output_error` besides the limits of the elements; absent from the JSON if empty.
    error_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetReport:
    """How the kernel counts were chosen, and how many parameters they may use, and do use.

    The numbers of a folded model are those before folding.
    """

    scope: str
    kernel_count: int | None  # None if layers have different counts
    limit: int
    used: int
    # The kernel count that would use the whole budget, rounded down to two decimals; None if the
    # counts of layers differ.
    exact_count: float | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def slack(self) -> int:
        """Parameters left; negative if a given count exceeds the budget."""
        return self.limit - self.used


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The effect of a conversion on the outputs of a trained network."""

    kernel_error: float | None  # mean of the layers' `fit_error`
    images: int  # held-out images, or crops of them, on which outputs were compared
    # Images that the new layers were fitted to; not in the JSON.
    fitted_images: Annotated[int, Field(exclude=True)] = 0
    # Number of held-out images that `images` are crops of; 0 without crops. Not in the JSON.
    images_cropped: Annotated[int, Field(exclude=True)] = 0
    same_top1: float | None = None  # this and the next two are as in `Agreement`
    kl: float | None = None
    output_error: float | None = None
    # For comparison: agreement of the old outputs with those for images moved by one pixel.
    shifted: Agreement | None = None
