"""What a DCLS layer computes: sizes and padding, interpolations, kernel construction, ties and fast paths.

Knows tensors and single modules, never a whole network. Everything here works under autograd, and nothing here
decides: sizes and counts come in as arguments, and are checked in the constructors.
"""
