"""Values for new layers from old kernels: elements closest to kernels, least squares, calibration with images, counts.

Gives values to layers that are in no model yet. Loading a checkpoint imports `groups` and `boxes` alone, and fits
nothing.
"""
