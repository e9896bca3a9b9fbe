"""Depthwise convolution with wide kernels, by the algorithm that is expected to be fastest."""

from .choice import Choice as Choice
from .choice import choices as choices
