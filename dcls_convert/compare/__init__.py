"""Several trainings, or models, side by side; and the same network on a GPU, by all algorithms. One
that fails is a row with the reason.
"""
