"""Compare trainings, and time a network's algorithms on a GPU. A model or
measurement that fails is a row with the reason.
"""
