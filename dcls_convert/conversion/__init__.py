"""One conversion, from the request to the converted network. Any failure, running out of memory
included, leaves the model as it was.
"""
