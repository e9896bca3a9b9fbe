"""Several conversions, or models, side by side. What does not fit or fails is a row with its
reason."""
