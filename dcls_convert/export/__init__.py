"""Fold a folder and write it in other formats.

Outputs are compared with the folder's before a file or folder gets its final name.
"""
