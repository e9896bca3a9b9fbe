"""Fold a checkpoint and write it in other formats.

Outputs are compared with the checkpoint's before a file or folder gets its final name.
"""
