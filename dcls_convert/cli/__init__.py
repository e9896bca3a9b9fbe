"""The shell: one file a command with its options, its call and its print. Imports no torch before a command runs.

Results go to stdout, progress and messages to stderr; a mistake is one line, with the documented exit code.
"""
