"""A few large elements of every chunk of a vector, and their places as bits."""
