"""`dcls-convert compare` is a script now."""

from ..errors import DclsConvertError


def compare() -> None:
    """Say where the comparison of trained networks went."""
    raise DclsConvertError(
        "compare is now a script in the repository: "
        "python examples/compare.py MODEL --data FOLDER --sizes 13,17 --seeds 5"
    )
