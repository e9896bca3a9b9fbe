"""What people look at: tables of records, pictures, and an HTML page that needs no network."""
