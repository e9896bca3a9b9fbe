"""Convolution with a wide depthwise kernel, in the fastest way for the device; sizes and padding of convolutions."""
