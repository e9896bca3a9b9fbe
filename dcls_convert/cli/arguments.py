"""What the commands share: option values from their text, refused with the option's name. Imports no torch."""

from ..errors import DclsConvertError, shown
from ..options import AUTO

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
_MOST_SIDE = 9_999  # cells or pixels; beyond it a kernel or an image is a slip of the keyboard
MOST_CHANNELS = 10**9
MOST_SEED = 2**63 - 1  # torch.Generator


def parse_size(option: str, text: str | None) -> int | tuple[int, ...] | None:
    """ "17" -> 17, "17x9" -> (17, 9)."""
    if text is None:
        return None
    sides = _sides(text)
    if sides is None or len(sides) > 3:
        raise DclsConvertError(
            f"{option} {shown(text)!r} is not a size; give an integer from 1 to {_MOST_SIDE} such as 17, "
            "or sides such as 17x9"
        )
    return sides[0] if len(sides) == 1 else sides


def parse_integer(option: str, text: str | None, *, least: int, most: int) -> int | None:
    if text is None:
        return None
    number = _integer(text)
    if number is None or not least <= number <= most:
        raise DclsConvertError(f"{option} {shown(text)!r} must be an integer from {least} to {most}")
    return number


def parse_count(text: str) -> int | str:
    try:
        return AUTO if text == AUTO else parse_integer("--kernel-count", text, least=1, most=MOST_CHANNELS) or AUTO
    except DclsConvertError as error:
        raise DclsConvertError(f"{error}, or {AUTO}") from None


def parse_input_size(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes = _sides(text)
    if sizes is None or not 2 <= len(sizes) <= 4:
        raise DclsConvertError(
            f"--input-size {shown(text)!r} must be channels and sides, each from 1 to {_MOST_SIDE}, such as 3x224x224"
        )
    return sizes


def _sides(text: str) -> tuple[int, ...] | None:
    """ "17x9" -> (17, 9); None where a part is no integer from 1 to _MOST_SIDE."""
    numbers = [_integer(part) for part in text.lower().split("x")]
    sides = tuple(number for number in numbers if number is not None and 1 <= number <= _MOST_SIDE)
    return sides if len(sides) == len(numbers) else None


def _integer(text: str) -> int | None:
    """Digits and nothing else: int() takes underscores, spaces and digits of other scripts."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
