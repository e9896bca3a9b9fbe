"""A network seen from outside: built by its name, traced, and measured."""
