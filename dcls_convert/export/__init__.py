"""Fold the model of a folder, and write it in other formats.

The written model must give the outputs of the folder's model before it gets its final name.
"""
