"""The shell: arguments, progress, printing and exit codes. Imports no torch before a command runs.

Results go to stdout, progress and messages to stderr; whatever happens ends in one line and the documented exit code.
"""
