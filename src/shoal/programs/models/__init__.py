"""Models: the torch modules that tasks train."""
