"""QSGD: random rounding to a few levels, in Elias code."""
