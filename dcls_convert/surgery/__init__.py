"""Changing a model. Whatever fails here, running out of memory included, leaves the model as it
was.
"""
