"""The command line: each command has a file with its options, the call it makes, and its output.

Nothing here imports torch before a command runs.
"""
