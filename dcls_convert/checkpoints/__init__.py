"""A converted model on disk: save, load, load through timm, verify and inspect.

Reading a folder runs no code that it names, unless the caller trusts it.
"""
