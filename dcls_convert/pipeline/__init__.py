"""One conversion, from the request through loading and decisions to the converted network."""
