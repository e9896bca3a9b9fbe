"""A network: built by its name, loaded, traced, measured, and run as it is."""
