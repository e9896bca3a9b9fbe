"""The shell: one file a command with its options, its call and its print.

Imports no torch before a command runs.
"""
