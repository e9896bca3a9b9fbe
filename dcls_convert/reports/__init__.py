"""What a conversion costs, as data. It is counted here, once; views only format it."""
