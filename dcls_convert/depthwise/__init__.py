"""Depthwise convolution with wide kernels, by the algorithm that is fastest on the device."""

from .choice import Choice as Choice
from .choice import choices as choices
