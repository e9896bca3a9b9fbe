"""A network seen from outside: built by its name, read from files, traced on the meta device and never run itself."""
