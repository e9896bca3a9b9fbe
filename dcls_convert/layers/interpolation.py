"""Properties of the interpolations, by which elements spread over cells.

This module imports no torch. The profiles themselves are in `profiles.py`.
"""

from dataclasses import dataclass

from ..options import InterpolationName

# The parameters that say where elements are. Layers of a tie group share them.
POSITION_PARAMETERS = ("positions", "sigma")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpolation:
    """One way to spread an element along an axis of the window.

    A new interpolation also needs its profile, in `PROFILES`. It needs `min_sigma` and
    `initial_sigma` if elements have a learnt width.
    """

    name: InterpolationName
    # Cells at this distance (in cells) or farther get nothing of an element that has the initial
    # sigma, or less than rounding shows.
    support: int
    # True if an element with the initial sigma, at the centre of a cell, lies in that cell alone.
    is_exact_on_cells: bool
    # True if the authors' package spreads elements in the same way. Its layers can then be loaded
    # (`conversion/authors.py`).
    is_of_authors: bool
    min_sigma: float | None = None  # in cells; None if the interpolation has no sigma
    initial_sigma: float | None = None  # cells

    @property
    def has_sigma(self) -> bool:
        """True if elements have a learnt width in addition to their position."""
        return self.min_sigma is not None

    @property
    def position_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that say where elements are."""
        return POSITION_PARAMETERS if self.has_sigma else POSITION_PARAMETERS[:1]


def find_interpolation(name: str) -> Interpolation:
    """Return the interpolation of this name, or raise a ValueError that lists the known names."""
    if name not in INTERPOLATIONS:
        raise ValueError(
            f"interpolation={name!r} is not known; it is one of {', '.join(INTERPOLATIONS)}"
        )
    return INTERPOLATIONS[name]


_ALL = (  # sigmas as in DCLS 0.1.1
    Interpolation(name="bilinear", support=1, is_exact_on_cells=True, is_of_authors=True),
    Interpolation(
        name="triangle",
        support=1,
        is_exact_on_cells=True,
        is_of_authors=True,
        min_sigma=1.0,
        initial_sigma=1.0,
    ),
    # With a smaller minimum, an element between two cells would have hardly any gradient. Both
    # values are as in DCLS 0.1.1, which adds 0.27 to a parameter that starts at 0.23.
    Interpolation(
        name="gaussian",
        support=4,  # eight times the initial sigma
        is_exact_on_cells=False,
        is_of_authors=True,
        min_sigma=0.27,
        initial_sigma=0.5,
    ),
)
INTERPOLATIONS: dict[str, Interpolation] = {entry.name: entry for entry in _ALL}
