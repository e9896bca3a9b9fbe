"""A folded checkpoint in other formats.

What is written was run before, and gave the checkpoint's outputs.
"""
