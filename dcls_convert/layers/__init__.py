"""The DCLS layers, and what they are made of.

Interpolations, kernel construction, convolution classes and ties.
"""
