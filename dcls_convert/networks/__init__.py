"""A network seen from outside: from a name to the module, weights files, tracing on meta, stages and sites.

Nothing here changes a network that was handed in; what is run is a hollow twin on the meta device.
"""
