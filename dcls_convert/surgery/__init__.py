"""Changing a model: placing layers, the one conversion pipeline, folding, and the checkpoints of the authors' package.

Whatever fails here, running out of memory included, leaves the model as it was.
"""
