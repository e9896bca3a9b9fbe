"""A network is run: with which arguments, how, and how close the outputs of two runs are."""
