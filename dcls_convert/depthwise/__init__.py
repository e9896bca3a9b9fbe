"""Depthwise convolution with wide kernels, in the way that is expected to be fastest."""

from .devices import why_no_blocks as why_no_blocks
