"""What people look at: records as tables, pictures as data, and these as one page or as files.

A page asks no network for anything. Where a picture shows a part only, it says so.
"""
