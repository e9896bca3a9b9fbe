"""The cost of a conversion, as data. It is counted here, once; views only format it."""
