"""Depthwise convolution with wide kernels, in the fastest way known for the device.

Also sizes and padding of convolutions in general.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .choice import Choice


def choices() -> "tuple[Choice, ...]":
    """The ways that depthwise convolutions took in this process, and why."""
    from . import choice  # imports torch, which this room's arithmetic does without

    return choice.choices()
