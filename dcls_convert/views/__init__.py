"""What people look at: records as tables, pictures as data, and these as one page, which uses no network, or files."""
