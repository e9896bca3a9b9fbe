"""What people look at: tables of records, and a figure."""
