"""Models: torch modules that tasks train."""
