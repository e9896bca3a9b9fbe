"""A converted model on disk: the folder, its stamp, timm's rebuilding, verify and inspect.

A folder appears whole or not at all, and nothing that is read from one runs code.
"""
