"""Changing a model: placing layers, their start, folding, and the checkpoints of the authors' package.

Whatever fails here, running out of memory included, leaves the model as it was.
"""
