"""A network: built by its name, loaded, traced on the meta device, and run as it is."""
