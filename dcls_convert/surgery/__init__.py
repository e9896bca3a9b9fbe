"""Change a model. Any failure here, running out of memory included, leaves the model as it was."""
