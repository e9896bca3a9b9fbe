"""What a conversion costs, as data. Records are counted once, and views only format them."""
