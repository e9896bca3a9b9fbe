"""Show records to people: as tables, as text, and as a figure."""
