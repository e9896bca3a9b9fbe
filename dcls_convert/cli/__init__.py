"""The shell: one file a command with its options, its call and its print. Imports no torch before a command runs.

Results go to stdout, progress and messages to stderr; no control character from data reaches either. Whatever happens
ends in one line at most and the documented exit code, and says nothing that is not true.
"""
