"""A converted model on disk: save, load, load through timm, verify and inspect.

A folder appears whole or not at all. Whatever it holds, reading it runs no code, and weights other than those that were
written are refused.
"""
