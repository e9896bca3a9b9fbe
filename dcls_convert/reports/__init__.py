"""Count the costs of a conversion once, as data; views only format these data."""
