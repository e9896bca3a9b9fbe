"""Changing a model. Any failure here, running out of memory included, leaves it as it was."""
