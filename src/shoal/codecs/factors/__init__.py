"""Sufficient-factor broadcasting: a gradient as the inputs and errors that it is the product of."""
