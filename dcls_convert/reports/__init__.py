"""What a conversion costs, as data; its views for terminal, Markdown, JSON and CSV; and the survey of the registries.

Records are counted once, and views only format them. JSON has the records' own field names and only finite numbers.
"""
