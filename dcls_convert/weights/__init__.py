"""Weights in the files that people have, and how they get into a network."""
