"""Running a network: its arguments, the run itself, and comparing the outputs of two runs."""
