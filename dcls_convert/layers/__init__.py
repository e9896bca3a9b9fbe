"""What a DCLS layer computes.

Interpolations, kernel construction, convolution classes, ties, and the layers.
"""
