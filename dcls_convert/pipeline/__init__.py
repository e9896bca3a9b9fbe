"""One conversion: what was asked, the network loaded, what is decided, and what is done."""
