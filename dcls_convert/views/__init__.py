"""What people look at: records as tables, pictures as data or files, and all of it as one page.

The page uses no network.
"""
