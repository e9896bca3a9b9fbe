"""A network seen from outside: a name becomes a module, and the module its convolutions, stages and costs.

What is looked at does not change: tracing runs a copy on the meta device, never the network itself. Weights are
read from files here, and nothing that a file holds is executed.
"""
