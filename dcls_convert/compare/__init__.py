"""Several conversions, or models, side by side. One that does not fit or fails is a row with the
reason.
"""
