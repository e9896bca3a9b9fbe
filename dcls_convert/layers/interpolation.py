"""The interpolations: what is asked of how an element spreads, apart from its profile.

Imports no torch; the profiles are in `profiles.py`.
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
    # Distance in cells, with the initial sigma, from which on a cell gets nothing of an element, or
    # less than rounding shows.
    support: int
    # Whether an element at a cell's centre lies in that cell alone, with the initial sigma.
    is_exact_on_cells: bool
    # Whether the authors' package spreads elements in the same way, so that its layers can be
    # loaded (`conversion/authors.py`).
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
    # The minimum keeps the gradient of an element between two cells. Both values are those of DCLS
    # 0.1.1, which adds 0.27 to a parameter that starts at 0.23.
    Interpolation(
        name="gaussian",
        support=4,  # eight times the initial sigma
        is_exact_on_cells=False,
        is_of_authors=True,
        min_sigma=0.27,
        initial_sigma=0.5,
    ),
)
INTERPOLATIONS: dict[str, Interpolation] = {each.name: each for each in _ALL}
