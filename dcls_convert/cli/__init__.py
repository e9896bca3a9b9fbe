"""The command line: one file for each command, with its options, one call, and what it prints.

Imports no torch before a command runs.
"""
