"""One conversion, from the request to the converted network.

After any failure, even running out of memory, the model is as it was.
"""
