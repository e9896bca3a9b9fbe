"""Weights in files, as people have them, and how they get into a network."""
