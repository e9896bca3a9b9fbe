"""Find values for layers that are not in a model yet, and the number of elements per kernel."""
