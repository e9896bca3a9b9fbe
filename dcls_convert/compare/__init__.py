"""Several conversions of one network side by side: what each costs and keeps, and which one to take.

Promises: a row says what the conversion with its command would; one that does not fit or fails is a row with its
reason; whatever interrupts, the rows keep what is known by then.
"""
