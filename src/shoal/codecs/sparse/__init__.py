"""Codecs that send few elements of a vector, and their positions."""
