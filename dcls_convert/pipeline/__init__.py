"""One conversion: what was asked for, the network that it loads, what is decided, and the carrying out."""
