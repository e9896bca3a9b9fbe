"""What a DCLS layer computes: interpolations, kernel construction, convolution classes, ties, and the layers."""
