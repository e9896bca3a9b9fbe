"""Convolution with a wide depthwise kernel, in the fastest way for the device; sizes and padding of convolutions."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .choice import Choice


def choices() -> "tuple[Choice, ...]":
    """What was chosen in this process for wide windows on GPUs: each kind of convolution, its way, and the times."""
    from .choice import chosen  # imports torch, which this room's arithmetic does without

    return tuple(chosen.values())
