"""The books of a conversion as data, their views for terminal, Markdown, JSON and CSV, and the survey of registries.

A record is counted once, and views only format it.
"""
